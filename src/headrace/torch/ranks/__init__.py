"""How the ranks of a job talk, and what they hold together.

coordination.py        rounds over the job's store, with deadlines and names
beats.py               signs of life there
groups.py              private groups, without torch's counters
agreement.py           one of the main thread
attachment.py          a volume, given open or opened where it is needed
desk.py scribe.py gathered.py    one process has the session, and the others ask it: for interfaces of files
failures.py follow.py  DCP's failures as ours; all ranks at one state of a volume
"""
