"""Suite `stage`: a dataset staged on this node, beside a bare copy of as many bytes.

Both read from namespaces of one target in another process, through the same host, and write a new file on the same
medium, which they flush. The bare copy is threads that read 4 MiB into their buffer and write it, as many of them as
ours; it verifies nothing, and keeps no account. So the peer is the slower of link and medium.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure
from benchmarks.pairs import interleaved
from headrace.dataset import StageOptions, stage, stages
from headrace.device import open_device
from headrace.testing.serve import serving
from headrace.units import MIB
from headrace.volume import Volume

SUITE = "stage"
NQN = "nqn.2026-01.io.headrace:benchmark-stage"
PIECE = 4 * MIB
WORKERS = 4


@dataclass(frozen=True, kw_only=True)
class Scale:
    rounds: int
    dataset_bytes: int


FULL = Scale(rounds=7, dataset_bytes=512 * MIB)
QUICK = Scale(rounds=3, dataset_bytes=32 * MIB)

#: Where a new file goes: on a disk, or in memory, where nothing but the link and the cores is in the way.
FIGURES = {"copy_to_disk": (None, 0.9), "copy_to_memory": ("/dev/shm", None)}


class Rig:
    """A target with a volume that has a dataset, and a namespace with as many bytes; a folder for the copies."""

    def __init__(self, scale: Scale, folder: str | None) -> None:
        self._stack = ExitStack()
        self.size = scale.dataset_bytes
        self.folder = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-benchmark-", dir=folder))
        )
        room = self.size + self.size // 16 + 64 * MIB
        target = self._stack.enter_context(serving(NQN, f"mem:{room}", f"mem:{self.size}"))
        data = np.random.default_rng(1).integers(0, 256, PIECE, np.uint8)
        self.volume = self._stack.enter_context(Volume.create([target.uri(1)]))
        with self.volume.session() as session, session.transaction() as transaction:
            pieces = itertools.repeat(data, self.size // PIECE)
            transaction.write_stream("corpus.bin", pieces, length_bytes=self.size, checksum_block_bytes=4096)
        self.raw = open_device(target.uri(2))
        self._stack.callback(self.raw.close)
        for start in range(0, self.size, PIECE):
            self.raw.write(start, data)
        self._numbers = itertools.count()

    def close(self) -> None:
        self._stack.close()

    def ours(self) -> float:
        """Bytes a second."""
        where = self.folder / f"stage-{next(self._numbers)}"
        started = time.perf_counter()
        report = stage(self.volume, "corpus", where, StageOptions(workers=WORKERS))
        took = time.perf_counter() - started
        assert report.complete and report.copied_bytes == self.size
        (found,) = stages(where)
        assert found.complete
        _remove(where)
        return self.size / took

    def bare(self) -> float:
        """Bytes a second."""
        where = self.folder / f"bare-{next(self._numbers)}"
        where.mkdir()
        places = iter(range(0, self.size, PIECE))
        lock = threading.Lock()
        started = time.perf_counter()
        file = os.open(where / "copy", os.O_CREAT | os.O_RDWR)
        os.ftruncate(file, self.size)

        def work() -> None:
            buffer = bytearray(PIECE)
            while True:
                with lock:
                    place = next(places, None)
                if place is None:
                    return
                self.raw.read_into(place, buffer)
                os.pwrite(file, buffer, place)

        threads = [threading.Thread(target=work) for _ in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.fdatasync(file)
        took = time.perf_counter() - started
        os.close(file)
        _remove(where)
        return self.size / took


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def run(quick: bool, only: Sequence[str] = ()) -> Iterator[Figure]:
    scale = QUICK if quick else FULL
    for name, (folder, bound) in FIGURES.items():
        if only and name not in only:
            continue
        if folder is not None and not os.access(folder, os.W_OK):
            continue
        rig = Rig(scale, folder)
        try:
            pairs = interleaved(rig.ours, rig.bare, scale.rounds)
        finally:
            rig.close()
        yield Figure(
            suite=SUITE,
            figure=name,
            value=pairs.median_ratio,
            unit="of a bare copy",
            at_least=bound,
            samples=pairs.ratios,
            noise=pairs.noise,
            ours=float(np.median(pairs.ours)) / 1e6,
            peer=float(np.median(pairs.peer)) / 1e6,
            measured_in="MB/s",
        )
