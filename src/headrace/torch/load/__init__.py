"""Checkpoints being read.

reader.py reading.py   DCP's `StorageReader`; what one rank reads
together.py sharing.py the ranks of a load; what several want is read once and sent
"""
