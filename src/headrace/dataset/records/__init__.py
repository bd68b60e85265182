"""Records: bytes, found by number and key.

index.py lookup.py     the index; places of many records in two reads
records.py             read in batches
ahead.py npz.py        batches ahead of time, decoded in threads; arrays in them
"""
