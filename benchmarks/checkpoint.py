"""Suite `checkpoint`: saves and loads of a Llama's state over NVMe/TCP, beside what else could be done with the bytes.

Several ranks, sharded as ZeRO 3 does it. Ours is a whole save, flushed and committed, and a whole load, verified, into
the tensors that are there. Medium "memory" is a target's memory, "file" its files on the disk of the temporary folder,
past the page cache (`--direct on`, as one serves a target for checkpoints); what peers wrote there is dropped from the
page cache before it is read.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import checkpoint_jobs as jobs
from benchmarks import checkpoint_peers
from benchmarks.checkpoint_jobs import Model
from benchmarks.figures import Figure
from benchmarks.pairs import Measure, interleaved
from benchmarks.ranks import Ranks
from headrace.checkpoint.shares import blocks_of, rows_of, share
from headrace.device import open_device
from headrace.testing.serve import ServeProcess, serving
from headrace.units import MIB
from headrace.volume import Volume

SUITE = "checkpoint"
NQN = "nqn.2024-01.headrace:benchmark-checkpoint"
MEMBERS = 2
#: Bytes that one checksum stands for.
BLOCK = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Scale:
    rounds: int
    model: Model
    ranks: int
    #: Of `read_amplification`: a smaller model, and more ranks.
    small: Model
    readers: int


# 0.78 GB of state; 3 GB of memory for it, its copies and the target at a time.
FULL = Scale(
    rounds=5,
    model=Model(hidden=1024, feed_forward=3584, layers=3, vocabulary=8000, key_value=256),
    ranks=2,
    small=Model(hidden=512, feed_forward=1792, layers=4, vocabulary=4000, key_value=128),
    readers=8,
)
QUICK = Scale(
    rounds=3,
    model=Model(hidden=256, feed_forward=896, layers=1, vocabulary=1000, key_value=64),
    ranks=2,
    small=Model(hidden=256, feed_forward=896, layers=1, vocabulary=1000, key_value=64),
    readers=2,
)


class Rig:
    """A target with a volume and as much raw space, and the ranks."""

    def __init__(self, scale: Scale, medium: str) -> None:
        self.scale = scale
        self.medium = medium
        self.steps = itertools.count(1)
        self._stack = ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-benchmark-")))
        total = scale.model.bytes
        # Room for a checkpoint, the one that takes its place, and one that keep_last reserves.
        share_of = -(-total // MEMBERS // MIB) * MIB
        sizes = [3 * share_of + 96 * MIB] * MEMBERS + [share_of + 16 * MIB] * MEMBERS
        if medium == "file":
            sizes = sizes[:MEMBERS]
        names = [f"mem:{size}" for size in sizes]
        if medium == "file":
            names = [f"{self.folder}/{number}.img:{size}" for number, size in enumerate(sizes)]
        past_cache = ["--direct", "on"] if medium == "file" else []
        self.target: ServeProcess = self._stack.enter_context(serving(NQN, *names, options=past_cache))
        self.uris = [self.target.uri(nsid) for nsid in range(1, len(sizes) + 1)]
        for uri in self.uris:
            _fill(uri)
        Volume.create(self.uris[:MEMBERS]).close()
        self.ranks = Ranks(scale.ranks)
        self._stack.callback(self.ranks.close)
        self.bytes = sum(self.ranks.all(jobs.make, scale.model, "fsdp"))
        self.ranks.all(jobs.attach, self.uris[:MEMBERS])
        self._stack.callback(self.ranks.all, jobs.detach)
        self.save()
        self.load()

    def close(self) -> None:
        self._stack.close()

    def save(self) -> float:
        return float(self.bytes / 1e9 / self.ranks.seconds(jobs.save, next(self.steps)))

    def load(self, verify: bool = True) -> float:
        return self.loaded(jobs.load, verify)

    def loaded(self, job: Callable[..., Any], *arguments: Any) -> float:
        """Of a job that loads the state, ours or a peer's: what it brings back is looked at, outside of the clock."""
        self.ranks.all(jobs.forget)
        found = self.rate(job, *arguments)
        self.ranks.all(jobs.check)
        return found

    def rate(self, job: Callable[..., Any], *arguments: Any) -> float:
        if self.medium == "file":
            drop(self.folder)
        return float(self.bytes / 1e9 / self.ranks.seconds(job, *arguments))


def drop(folder: Path) -> None:
    """These files out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def _fill(uri: str) -> None:
    """Both sides write to memory, or blocks of a file, that were there before."""
    piece = np.full(16 * MIB, 0xA5, np.uint8)
    with open_device(uri) as device:
        for start in range(0, device.size_bytes, len(piece)):
            device.write(start, piece[: min(len(piece), device.size_bytes - start)])
        device.flush()


def _figure(rig: Rig, name: str, ours: Measure, peer: Measure, at_least: float | None) -> Figure:
    pairs = interleaved(ours, peer, rig.scale.rounds)
    return Figure(
        suite=SUITE,
        figure=name,
        value=pairs.median_ratio,
        unit="ratio",
        at_least=at_least,
        samples=pairs.ratios,
        noise=pairs.noise,
        ours=statistics.median(pairs.ours),
        peer=statistics.median(pairs.peer),
        measured_in="GB/s",
    )


def beside_raw(rig: Rig, name: str, at_least: float | None) -> Iterator[Figure]:
    rig.ranks.all(jobs.attach_raw, rig.uris[MEMBERS:])
    rig.rate(jobs.save_raw)
    if name.startswith("save"):
        yield _figure(rig, name, rig.save, lambda: rig.rate(jobs.save_raw), at_least)
    else:
        yield _figure(rig, name, rig.load, lambda: rig.rate(jobs.load_raw), at_least)
    rig.ranks.all(jobs.detach_raw)


def beside_bare(rig: Rig, name: str, at_least: float | None) -> Iterator[Figure]:
    folder, write = str(rig.folder), name.startswith("save")
    rig.rate(jobs.bare, folder, True)
    yield _figure(rig, name, rig.save if write else rig.load, lambda: rig.rate(jobs.bare, folder, write), at_least)
    for path in rig.folder.glob("bare-*"):
        path.unlink()


def beside_dcp(rig: Rig, name: str, at_least: float | None) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-", dir="/dev/shm") as folder:
        best = max((1, 2, 4), key=lambda threads: rig.rate(jobs.save_dcp, folder, threads))
        if name.startswith("save"):
            yield _figure(rig, name, rig.save, lambda: rig.rate(jobs.save_dcp, folder, best), at_least)
        else:
            yield _figure(rig, name, rig.load, lambda: rig.loaded(jobs.load_dcp, folder), at_least)


def beside_torch(rig: Rig, name: str, at_least: float | None) -> Iterator[Figure]:
    folder = str(rig.folder)
    rig.rate(jobs.save_torch, folder)
    if name.startswith("save"):
        yield _figure(rig, name, rig.save, lambda: rig.rate(jobs.save_torch, folder), at_least)
    else:
        yield _figure(rig, name, rig.load, lambda: rig.loaded(jobs.load_torch, folder), at_least)
    for path in rig.folder.glob("torch-*"):
        path.unlink()


def beside_torch_checkpointing(rig: Rig, name: str, at_least: float | None) -> Iterator[Figure]:
    folder, packages = str(rig.folder), checkpoint_peers.packages()

    def saved(threads: int | None = None) -> float:
        if threads is not None:
            rig.ranks.all(checkpoint_peers.attach, packages, threads)
        rig.ranks.all(checkpoint_peers.clear, folder)
        return rig.rate(checkpoint_peers.save, folder)

    best = max((1, 2, 4), key=saved)
    saved(best)
    if name.startswith("save"):
        yield _figure(rig, name, rig.save, saved, at_least)
    else:
        yield _figure(rig, name, rig.load, lambda: rig.loaded(checkpoint_peers.load, folder), at_least)
    rig.ranks.all(checkpoint_peers.clear, folder)
    rig.ranks.all(checkpoint_peers.detach)


def beside_fio(rig: Rig, name: str, at_least: float | None) -> Iterator[Figure]:
    """Files beside those of the target, on the same disk."""
    if not checkpoint_peers.has_fio():
        return
    write = name.startswith("save")

    def measured(writing: bool = write) -> float:
        drop(rig.folder)
        return checkpoint_peers.fio(rig.folder, rig.bytes, rig.scale.ranks, writing)

    measured(True)
    yield _figure(rig, name, rig.save if write else rig.load, measured, at_least)
    for path in rig.folder.glob("fio.*"):
        path.unlink()


def unverified(rig: Rig, name: str, at_least: float | None) -> Iterator[Figure]:
    yield _figure(rig, name, rig.load, lambda: rig.load(False), at_least)


#: figure: (medium, measure, bound)
RATES: dict[str, tuple[str, Callable[[Rig, str, float | None], Iterator[Figure]], float | None]] = {
    "save_memory": ("memory", beside_raw, 0.75),
    "load_memory": ("memory", beside_raw, 0.75),
    "load_verified": ("memory", unverified, 0.8),
    "save_dcp": ("memory", beside_dcp, 1.2),
    "load_dcp": ("memory", beside_dcp, 1.2),
    "save_file": ("file", beside_bare, 0.85),
    "load_file": ("file", beside_bare, 0.85),
    "save_torch": ("file", beside_torch, 1.2),
    "load_torch": ("file", beside_torch, 1.2),
    "save_torch_checkpointing": ("file", beside_torch_checkpointing, 1.2),
    "load_torch_checkpointing": ("file", beside_torch_checkpointing, 1.2),
    "save_fio": ("file", beside_fio, 0.85),
    "load_fio": ("file", beside_fio, 0.85),
}


# ---- how much is read ---------------------------------------------------------------------------------


def read_amplification(scale: Scale, layout: str) -> Iterator[Figure]:
    """Bytes that the target read for a restore by a new job, everything that opening a volume takes included, over the
    bytes of the state."""
    size = scale.small.bytes
    with serving(NQN, *[f"mem:{(2 * size // MEMBERS // MIB + 96) * MIB}"] * MEMBERS) as target:
        uris = [target.uri(nsid) for nsid in range(1, MEMBERS + 1)]
        Volume.create(uris).close()
        ranks = Ranks(scale.readers)
        try:
            ranks.all(jobs.make, scale.small, layout)
            ranks.all(jobs.attach, uris)
            ranks.all(jobs.save, 1)
            ranks.all(jobs.detach)
            ranks.all(jobs.forget)
            before = _read(target)
            ranks.all(jobs.load_once, uris)
            found = _read(target) - before
            ranks.all(jobs.check)
        finally:
            ranks.close()
    yield Figure(
        suite=SUITE, figure=f"read_amplification_{layout}", value=found / size, unit="ratio", at_most=1.05,
        ours=found / 1e9, peer=size / 1e9, measured_in="GB",
    )  # fmt: skip


def _read(target: ServeProcess) -> int:
    status = target.ask("status")
    return sum(each["read_bytes"] for subsystem in status["subsystems"] for each in subsystem["namespaces"])


def planned(layout: str, saved: int, ranks: int) -> Iterator[Figure]:
    """The plan alone, at full size: a model of 8 billion parameters that `saved` ranks saved, for `ranks`."""
    model = Model(hidden=4096, feed_forward=14336, layers=32, vocabulary=128256, key_value=1024)
    # Each shape once, as often as it is there would only repeat it.
    sizes = [int(np.prod(shape)) * 14 for shape in model.parameters().values()]
    parts = saved if layout == "fsdp" else saved // 8 if layout == "hsdp" else 1
    readers = {"fsdp": ranks, "hsdp": ranks // 8, "ddp": 1}[layout]
    share_of = [np.linspace(0, size, parts + 1).astype(np.uint64) // np.uint64(64) * np.uint64(64) for size in sizes]
    width = np.array([edges[1:] - edges[:-1] for edges in share_of])
    start = np.cumsum(width, axis=0) - width
    lengths = width.sum(axis=0)
    wants = []
    for reader in range(readers):
        rows = []
        for tensor, edges in enumerate(share_of):
            low, high = (
                size_at * np.uint64(sizes[tensor]) // np.uint64(readers)
                for size_at in np.array([reader, reader + 1], np.uint64)
            )
            first, last = int(np.searchsorted(edges, low, "right")) - 1, int(np.searchsorted(edges, high, "left"))
            for part in range(max(first, 0), min(last, parts)):
                begin, end = max(low, edges[part]), min(high, edges[part + 1])
                if end > begin:
                    at = int(start[tensor, part]) - int(edges[part])
                    rows.append((part, at + int(begin), at + int(end)))
        wants.append(blocks_of(rows_of(*np.array(rows, np.uint64).T), lengths, BLOCK))
    copies = ranks // readers
    every = [wants[rank // copies] for rank in range(ranks)]
    union = blocks_of(np.concatenate(wants), lengths, BLOCK)
    unique = int(sum(sizes))
    alone = int((union[:, 2] - union[:, 1]).sum())
    plan = share(every)
    read = np.zeros(ranks)
    exchanged = 0
    for rank, one in enumerate(plan):
        size = np.add.reduceat(one.rows[:, 2] - one.rows[:, 1], one.bounds[:-1]) if len(one) else np.zeros(0)
        mine = one.reader == rank
        read[rank] = float((every[rank][:, 2] - every[rank][:, 1]).sum() - size.sum() + size[mine].sum())
        exchanged += int(size[mine].sum())
    assert int(read.sum()) >= alone
    yield Figure(
        suite=SUITE, figure=f"planned_{layout}_{saved}_to_{ranks}", value=float(read.sum()) / unique, unit="ratio",
        at_most=1.05, ours=float(read.sum()) / 1e9, peer=unique / 1e9, measured_in="GB",
        samples=[float(read.max() / max(read.mean(), 1.0))],
    )  # fmt: skip


LAYOUTS = ("ddp", "hsdp", "fsdp")
FIGURES = [
    *RATES,
    *(f"read_amplification_{layout}" for layout in LAYOUTS),
    *(f"planned_{layout}_1024_to_{ranks}" for layout in LAYOUTS for ranks in (1024, 768)),
]


#: With --quick and nothing else: each way of measuring once.
QUICK_FIGURES = ("save_memory", "load_memory", "load_dcp", "read_amplification_hsdp")


def run(quick: bool, only: Sequence[str] = ()) -> Iterator[Figure]:
    scale = QUICK if quick else FULL
    if quick:
        only = only or QUICK_FIGURES
    for medium in ("memory", "file"):
        wanted = {name: row for name, row in RATES.items() if row[0] == medium and (not only or name in only)}
        if not wanted:
            continue
        rig = Rig(scale, medium)
        try:
            for name, (_, measure, at_least) in wanted.items():
                yield from measure(rig, name, at_least)
        finally:
            rig.close()
    for layout in LAYOUTS:
        if not only or f"read_amplification_{layout}" in only:
            yield from read_amplification(scale, layout)
        for ranks in (1024, 768):
            if not only or f"planned_{layout}_1024_to_{ranks}" in only:
                yield from planned(layout, 1024, ranks)
