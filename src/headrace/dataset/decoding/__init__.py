"""Records to what training wants of them, by a function of the caller's, beside the loop that trains.

decoder.py             who decodes: threads
processes.py           processes
worker.py              what runs in one of them
memory.py              the memory that it shares with the loader
"""
