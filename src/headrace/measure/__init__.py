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

`records.py` is what is written down, `clock.py` writes it, `arithmetic.py` and `statistics.py` are pure,
`summary.py` puts the ranks together and pronounces the verdict, `charts.py` and `report.py` draw the page.
"""

from __future__ import annotations

from headrace.measure.clock import StepClock
from headrace.measure.records import StepRecord, read_records, write_records
from headrace.measure.summary import FEED_THRESHOLD, Summary, Verdict, summarise

__all__ = [
    "FEED_THRESHOLD",
    "StepClock",
    "StepRecord",
    "Summary",
    "Verdict",
    "read_records",
    "summarise",
    "write_records",
]
