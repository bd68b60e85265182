"""The client of the suites over a shaped link: what comes over it, as records of a volume or to a bare socket.

`python -m benchmarks.records_client ADDRESS PORT [VOLUME NAME]`, and jobs as JSON lines, answered by
`{"bytes_per_s", "cpu_s_per_gb"}`:

    {"bare": 2.0}       of `benchmarks.link_socket` at ADDRESS and PORT, for so many seconds
    {"records": 2.0}    all records of the dataset in a random order, epoch after epoch, in batches of eight, verified
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from benchmarks.link_socket import receive
from headrace.dataset import Records, RecordsAhead, Sampler
from headrace.dataset.records.ahead import Record
from headrace.volume import Volume

BATCH = 8


def order(count: int) -> Iterator[npt.NDArray[np.int64]]:
    sampler = Sampler(count, seed=7)
    for epoch in itertools.count():
        for first in range(0, count - BATCH + 1, BATCH):
            yield sampler.indices(epoch, first, BATCH)


def read(ahead: RecordsAhead[Record], seconds: float) -> tuple[float, float]:
    """(bytes a second, CPU seconds of this process a GB), from when as many batches as are read ahead have
    come, and one more; they do not count."""
    for _ in range(ahead.options.prefetch + 1):
        next(ahead)
    before = ahead.metrics().payload_bytes
    began, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() < began + seconds:
        next(ahead)
    took, used = time.perf_counter() - began, time.process_time() - cpu
    got = ahead.metrics().payload_bytes - before
    # What is on its way leaves the link before the next job.
    while (now := ahead.metrics()).ready < now.in_flight:
        time.sleep(0.01)
    return got / took, used / got * 1e9


def main(address: str, port: int, dataset: list[str]) -> None:
    ahead: RecordsAhead[Record] | None = None
    if dataset:
        records = Records.open(Volume.open(dataset[0]), dataset[1])
        # One for all turns, as a training run has one for all steps.
        ahead = RecordsAhead(records, order(len(records)))
    for line in sys.stdin:
        job = json.loads(line)
        if "bare" in job:
            rate, cpu = receive(address, port, job["bare"])
        else:
            assert ahead is not None
            rate, cpu = read(ahead, job["records"])
        print(json.dumps({"bytes_per_s": rate, "cpu_s_per_gb": cpu}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
