"""How many accelerators can this storage feed? MLPerf Storage's question, asked in its way, without accelerators.

An emulated accelerator waits for its next batch, computes (sleeps) for as long as a real one would, and waits for the
others; a loader beside it reads ahead. What share of the time it computes is its utilisation, AU.

    workload = workload_of("unet3d-h100")
    trial = emulate(workload, source, accelerators=4, seconds=30)      # source(i): the loader of accelerator i
    found = search(lambda n: measure(n), threshold=workload.au)        # the most that stay above the threshold

`workloads.py` MLPerf's workloads and the user's own, `arithmetic.py` AU by formula, `emulator.py` the threads,
`bracket.py` the search, `samples.py` which bytes a batch is, `run.py` all of it on a place, on one node or many.
None of it is an MLPerf result, and must not be called one.
"""

from __future__ import annotations

from headrace.bench.accelerators.arithmetic import utilisation
from headrace.bench.accelerators.bracket import Found, search
from headrace.bench.accelerators.emulator import Loader, Trial, emulate
from headrace.bench.accelerators.workloads import WORKLOADS, Workload, workload_of

__all__ = [
    "WORKLOADS",
    "Found",
    "Loader",
    "Trial",
    "Workload",
    "emulate",
    "search",
    "utilisation",
    "workload_of",
]
