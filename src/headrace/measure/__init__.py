"""What a training loop spends its time on, and what storage costs it.

    clock = StepClock(rank=0, path="steps.jsonl")
    for number in range(steps):
        with clock.step(number, tokens=batch_tokens):
            with clock.data_wait():
                batch = next(loader)
            train(batch)
            with clock.checkpoint():
                save()
    print(summarise(clock.records).verdict().sentence)

(`StepClock` is what the demo is measured by, and enough where data wait and checkpoints are the question. `Watch`
takes more apart, with any loader, and by the clock of the device.)

`records.py` is what is written down, `clock.py` writes it, `arithmetic.py` and `statistics.py` are pure,
`summary.py` puts the ranks together and pronounces the verdict, `charts.py` and `report.py` draw the page; `watch/` is
`Watch`, and what is made of its files.
"""

from __future__ import annotations

from headrace.measure.clock import StepClock
from headrace.measure.records import StepRecord, read_records, write_records
from headrace.measure.summary import FEED_THRESHOLD, Summary, Verdict, summarise
from headrace.measure.watch.differential import differential, synthetic
from headrace.measure.watch.predict import Prediction, Stalls
from headrace.measure.watch.record import UnderWay, WatchStep
from headrace.measure.watch.watch import Watch

__all__ = [
    "FEED_THRESHOLD",
    "Prediction",
    "Stalls",
    "StepClock",
    "StepRecord",
    "Summary",
    "UnderWay",
    "Verdict",
    "Watch",
    "WatchStep",
    "differential",
    "read_records",
    "summarise",
    "synthetic",
    "write_records",
]
