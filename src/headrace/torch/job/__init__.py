"""Checkpoints of a plain training loop.

checkpointer.py        save, restore, stop
training_state.py      model, optimizer, data position, RNG
saving.py restoring.py what saves cost and when the next is due; which step, and what became of it
certificate.py preemption.py    what a restore did; being told to stop
"""
