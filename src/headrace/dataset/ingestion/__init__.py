"""Files into a volume, on all cores and many machines, killed anywhere and gone on with to the same bytes.

corpus.py              documents out of files, as a stream
places.py readers.py columns.py archives.py    files and URLs; text, lines, Parquet, Arrow; tars and folders
tokenizer.py           text to tokens
text.py megatron.py records.py    what comes of it: tokens, a pair of Megatron's files as it is, records
run.py slices.py work.py          what is read at a time; what of it is in the volume already
pool.py worker.py output.py progress.py    who reads it, on all cores
hire.py channel.py     where workers come from; what they and the ingest tell each other
ray_hire.py ray_bridge.py         workers of a Ray cluster
"""
