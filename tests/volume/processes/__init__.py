"""Real processes over NVMe/TCP: a job of four ranks writes, three readers follow, and anything happens to anybody.

    python -m tests.volume.processes --rounds 200

SIGKILL of writers, single ranks, readers and the target, which has a volatile cache; SIGSTOP of writers for less than
the heartbeat's patience, and for longer, so that another job takes over and they wake up as zombies; a second kill
while the next session recovers. `roles` are the processes, `rounds` what is done to them and what must hold.
"""
