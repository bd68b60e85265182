"""Batches for a training loop, as tensors.

loader.py records.py   of tokens and documents; of records
ordered.py parallel.py the order that they follow; which part of it a rank gets
reused.py              memory of batches, used again
dataset.py sampler.py iterable.py epochs.py    the same for `DataLoader` and frameworks
"""
