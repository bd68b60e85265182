"""The order in which training sees samples, and where a loader stands in it.

sampler.py             a permutation that is computed, never stored
mixture.py             several datasets in shares
steps.py               what a rank gets of it, batch by batch
state.py records.py    a few integers, and what they belong to: tokens, records
"""
