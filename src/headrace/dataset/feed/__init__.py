"""Batches ahead of time, into memory that is used again and again.

options.py feed.py     what is asked for; the batches
stretch.py flight.py   what comes next, and where it lies; what is read with one request
ring.py                the memory
records.py             batches of records
chosen.py              batches that somebody else chooses
"""
