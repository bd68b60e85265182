"""Batches ahead of time, into memory that is used again and again.

options.py feed.py     what is asked for; the batches
ring.py                the memory
records.py             batches of records
chosen.py              batches that somebody else chooses
"""
