"""Files and folders into a volume, out of it, and objects from one volume into another.

    report = copy_in(session, ["checkpoints/", "notes.txt"], "archive", CopyOptions(recursive=True))
    report = copy_out(volume, ["archive"], "/scratch/archive", CopyOptions(recursive=True))
    report = copy_between(volume, session, ["archive"], "archive")

Where things go is what `cp -r` would do (`plan.py`). Before the first byte is moved everything is looked at: what can't
be copied (links, pipes, names that no object can have, what is there already) is named, one `Problem` each.

* **Stopping at the first problem** (the default), a copy into a volume is one transaction: all of it, or nothing. Out
  of a volume, a file has its name when it is whole; what was whole before the problem stays.
* **Going on** (`keep_going`): what can be copied is, in transactions of a pack of small files or one large file each;
  what the caller says is of use only with others (`last`) behind all else, in the order in which it was committed.

Within one volume nothing is moved: the copies share the bytes of what they were copied from.

Small files travel in packs, large ones in pieces, several at a time; memory is bounded by `workers` buffers of 16 MiB.
Out of a volume every block is verified on its way. `verify`: what was written is read back and compared.

plan.py    what goes where, and what cannot
files.py   the end in a file system
objects.py the end in a volume
compare.py no end at all: is what comes what is there?
run.py     the threads between two ends
"""

from headrace.volume.copy.plan import CopyOptions, CopyReport, Plan, Problem
from headrace.volume.copy.run import Progress, copy_between, copy_in, copy_out, plan_between, plan_in

__all__ = [
    "CopyOptions",
    "CopyReport",
    "Plan",
    "Problem",
    "Progress",
    "copy_between",
    "copy_in",
    "copy_out",
    "plan_between",
    "plan_in",
]
