"""Checkpoints being written.

options.py writer.py   what is asked for; DCP's `StorageWriter`
group.py one_save.py   the ranks that save; one save of one of them
planning.py kept.py    the plan of a rank, kept from save to save; what the ranks need not tell each other again
skeleton.py stager.py  what a state is made of; the one host copy of asynchronous saves
pacing.py window.py    when its bytes go out: training's reads first
staging.py seals.py    where the bytes lie; that they are still the same
room.py                space that is kept before training begins
"""
