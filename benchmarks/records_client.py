"""The client of suite `records`: all records of a dataset in a random order, epoch after epoch, as batches of eight.

`python -m benchmarks.records_client VOLUME NAME SECONDS` prints one JSON object. The time begins when the first batch
is there, and its bytes do not count.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from headrace.dataset import Records, RecordsAhead, Sampler
from headrace.dataset.records_ahead import Record
from headrace.volume import Volume

BATCH = 8


def order(count: int) -> Iterator[npt.NDArray[np.int64]]:
    sampler = Sampler(count, seed=7)
    for epoch in itertools.count():
        for first in range(0, count - BATCH + 1, BATCH):
            yield sampler.indices(epoch, first, BATCH)


def main(where: str, name: str, seconds: float) -> None:
    with Volume.open(where) as volume:
        records = Records.open(volume, name)
        ahead: RecordsAhead[Record] = RecordsAhead(records, order(len(records)))
        with ahead:
            next(ahead)
            before = ahead.metrics().payload_bytes
            began, cpu = time.perf_counter(), time.process_time()
            while time.perf_counter() < began + seconds:
                next(ahead)
            now = time.perf_counter()
            got = ahead.metrics().payload_bytes - before
            used = time.process_time() - cpu
    print(json.dumps({"bytes_per_s": got / (now - began), "cpu_s_per_gb": used / got * 1e9}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
