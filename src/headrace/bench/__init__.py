"""What a storage path gives to training, measured as training would use it.

figures.py     what is measured: series, latencies, figures, outcomes; rounds put together
meter.py       bytes as they complete, by slots of time
places/        what a path is: a folder, a block device, a namespace, a volume; read and written by flows
patterns/      one file a pattern: `run(place, options, tell)` is one round
"""
