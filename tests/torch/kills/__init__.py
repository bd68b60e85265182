"""A training job of two to four ranks saves over NVMe/TCP, and anybody is killed or stopped at any moment.

    python -m tests.torch.kills --rounds 300

SIGKILL of a rank, of the coordinator, of the whole job and of the target, which has a volatile cache; SIGSTOP of ranks
for a moment, for longer than a save waits, and until another job has taken over. Parameters and the optimizer's state
change during every flush. `job` is what ranks do, `rounds` what is done to them and what must hold.
"""
