"""Live attribution: what each step of a training loop waited for, on every rank, and what that cost.

causes.py      what a step's time can go to
watch.py       `Watch`: steps, counters, files
notes.py replay.py   what the thread that trains notes, and what that means
loader.py source.py wait.py    any loader, watched; what is known of it; one wait for a batch taken apart
device.py      clocks of devices that work behind their callers' backs
host.py paths.py activity.py    counters of process and node, of paths, of the GPU's multiprocessors
record.py lines.py   the lines of a rank's file; writing them
join.py        the ranks put together: a step ends for all when it ends for the slowest
verdict.py     one plain sentence
tell.py page.py      for people: text, and a page with pictures
differential.py predict.py    synthetic, cached, storage: stalls by subtraction; what other storage would give
"""
