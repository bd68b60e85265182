"""What a storage path gives to training, measured as training would use it.

figures.py meter.py     what is measured: series, latencies, figures, outcomes; rounds put together
cache.py                dropped, passed by or warm: what is done about caches, and what cannot be
look.py                 what is there, also in a process of its own
places/                 what a path is: a folder, a block device, a namespace, a volume; read and written by flows
layouts.py ranks.py     which files each rank of a checkpoint writes, and the processes that do (`rank.py` is one)
patterns/               one file a pattern: `run(place, options, tell)` is one round
suite.py                which rounds are run, what they cost at most, in which order
report.py page.py       what came of it, in words and as a page
sustained.py            levels of a rate: throttling, burst credits (and `sustained_page.py`)
accelerators/           how many accelerators storage feeds, emulated as MLPerf Storage does
meeting/ merge.py       ranks of several nodes that begin together; what came to all of them
histogram.py            latencies that can be put together
compare.py              several paths in turns: who is faster beyond noise (`compare_works.py`, `compare_page.py`)
"""
