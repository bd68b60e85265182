"""What the demo and the drill make accidents with: processes that are started to be stopped or killed, a target among
them, and a path to a target that can be cut.

processes.py   processes that never outlive their owner
peace.py       cleaning up that no signal cuts short
apart.py       what the kernel may never answer, asked in a process that nobody needs
stopping.py    SIGSTOP, until everybody stands
target.py      `headrace serve`, to be killed and started again where it was
relay.py       a TCP path that is cut, or falls silent with writes in it, and heals
"""
