"""Records: bytes, found by number and key.

index.py lookup.py     the index; places of many records in two reads
records.py joined.py   read in batches; several datasets as one
memory.py              what they are read into, used again
ahead.py npz.py        batches ahead of time, decoded in threads; arrays in them
"""
