"""The client of suite `checkpoint-beside-feed`: steps that read records, and saves beside them.

`python -m benchmarks.beside_client RECORDS_URI SAVES_URI RATE NAME`, and jobs as JSON lines:

    {"steps": 40}                          so many steps
    {"until": FILE}                        steps until that file is there
    {"save": BYTES, "paced": true}         an asynchronous save, and nothing else
    {"save": BYTES, "paced": true, "beside": true}       steps until it is committed

A step asks for its records one after another, one of them read ahead, and then computes for as long as the way takes
for as many bytes: half of the way, in bursts that nothing hides. Answered with `waits` (seconds of each step), `bytes`
and `seconds` of the feed, `written` and `saved` (bytes, seconds) of the save, and what the save says of its pace.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.records_client import order
from headrace.dataset import AheadOptions, Records, RecordsAhead
from headrace.dataset.records.ahead import Record
from headrace.torch import VolumeWriter, WriterOptions
from headrace.volume import Volume

#: Records that a step asks for.
RECORDS = 8


def steps(records: Records, rate: float, more: Callable[[int], bool]) -> dict[str, Any]:
    waits: list[float] = []
    singles = (numbers[at : at + 1] for numbers in order(len(records)) for at in range(len(numbers)))
    ahead: RecordsAhead[Record]
    with RecordsAhead(records, singles, options=AheadOptions(prefetch=1)) as ahead:
        # Opens what has to be open.
        next(ahead)
        before, began = ahead.metrics(), time.perf_counter()
        while more(len(waits)):
            earlier = ahead.metrics()
            for _ in range(RECORDS):
                next(ahead)
            now = ahead.metrics()
            waits.append(now.wait_s - earlier.wait_s)
            time.sleep((now.payload_bytes - earlier.payload_bytes) / rate)
        seconds = time.perf_counter() - began
        return {"waits": waits, "bytes": ahead.metrics().payload_bytes - before.payload_bytes, "seconds": seconds}


class Saver:
    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._writers: dict[bool, VolumeWriter] = {}
        self._states: dict[int, dict[str, torch.Tensor]] = {}
        self._steps = itertools.count(1)

    def save(self, length: int, paced: bool, beside: Callable[[Callable[[], bool]], None]) -> dict[str, Any]:
        """`beside` is called with whether the save has ended, and returns when it has."""
        for other in [kept for kept in self._writers if kept is not paced]:
            # A volume has one writer.
            self._writers.pop(other).close()
        if paced not in self._writers:
            options = WriterOptions(keep_last=1, overwrite=True, pacing=paced, takeover="if-dead")
            self._writers[paced] = VolumeWriter([self._uri], "run", run_id="benchmark", options=options)
            # The session begins with the first save.
            self._writers[paced].save({"weights": torch.ones(1)}, f"run/step-{next(self._steps)}")
        writer = self._writers[paced]
        state = self._states.setdefault(length, {"weights": torch.ones(length, dtype=torch.uint8)})
        writer.prepare(state)
        began = time.perf_counter()
        future = writer.async_save(state, f"run/step-{next(self._steps)}")
        beside(future.done)
        seconds = time.perf_counter() - began
        report = future.result()
        return {
            "written": report.object_bytes,
            "saved": seconds,
            "writing": report.write_seconds,
            "pacing": None if report.pacing is None else asdict(report.pacing),
        }


def until(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(0.005)


def main(uri: str, saves_uri: str, rate: float, name: str) -> None:
    torch.set_num_threads(1)
    records = Records.open(Volume.open(uri), name)
    saver = Saver(saves_uri)
    print("READY", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), records, rate, saver)), flush=True)


def answer(job: dict[str, Any], records: Records, rate: float, saver: Saver) -> dict[str, Any]:
    if "steps" in job:
        return steps(records, rate, lambda done: done < job["steps"])
    if "until" in job:
        return steps(records, rate, lambda _: not Path(job["until"]).exists())
    if not job.get("beside"):
        return saver.save(job["save"], job["paced"], until)
    fed: dict[str, Any] = {}
    saved = saver.save(job["save"], job["paced"], lambda done: fed.update(steps(records, rate, lambda _: not done())))
    return {**fed, **saved}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4])
