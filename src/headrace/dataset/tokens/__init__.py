"""Tokens in a volume, and the samples that they are.

idx.py stream.py       Megatron's index; the stream, read at any token
packing.py packs.py    documents that share a sample: which, and stored beside the stream
samples.py segments.py what a sample is; where documents begin in it
"""
