"""Suite `volume`: objects beside the same bytes moved raw, over NVMe/TCP.

Four namespaces of one target: two are the volume's members, two are the peer's. Both sides move the same bytes of one
buffer in the same stripes through the same host, and flush alike; what the volume does besides is checksums and their
table, allocation, commit. One Python process, and the target in another.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.figures import Figure
from benchmarks.pairs import Pairs, interleaved
from headrace.device import Batch, BlockDevice, flush_all, open_device, read_batch, submit_read, write_batch
from headrace.testing.serve import ServeProcess, serving
from headrace.units import GIB, KIB, MIB
from headrace.volume import Session, Volume

SUITE = "volume"
NQN = "nqn.2024-01.headrace:benchmark-volume"
MEMBERS = 2
STRIPE = MIB
SMALL = 4 * KIB
RANGE = 32 * KIB
DEPTH = 64


@dataclass(frozen=True, kw_only=True)
class Scale:
    rounds: int
    #: Of the one big object.
    object_bytes: int
    small_objects: int
    #: Random ranges a round, DEPTH of them in a batch.
    ranges: int


FULL = Scale(rounds=7, object_bytes=4 * GIB, small_objects=100_000, ranges=64 * 512)
QUICK = Scale(rounds=3, object_bytes=64 * MIB, small_objects=5_000, ranges=64 * 16)

U8 = npt.NDArray[np.uint8]


class Rig:
    """A target with a volume and as much raw space; the buffer that both sides write."""

    def __init__(self, scale: Scale, medium: str) -> None:
        self.scale = scale
        self.medium = medium
        self._stack = ExitStack()
        half = scale.object_bytes // MEMBERS
        # Room for one object: the next one takes the space of the one that was deleted.
        volume_bytes, raw_bytes = half + half // 8 + 96 * MIB, half
        self.target = self._serve([volume_bytes] * MEMBERS + [raw_bytes] * MEMBERS)
        uris = [self.target.uri(nsid) for nsid in range(1, 2 * MEMBERS + 1)]
        # Both sides write to memory, or blocks of a file, that were there before.
        for uri in uris:
            _fill(uri)
        self.volume = self._stack.enter_context(Volume.create(uris[:MEMBERS], stripe_bytes=STRIPE))
        self.session: Session = self._stack.enter_context(self.volume.session())
        self.raw: list[BlockDevice] = []
        for uri in uris[MEMBERS:]:
            device = open_device(uri)
            self._stack.callback(device.close)
            self.raw.append(device)
        # What is written stays what it is, so that pages are not touched for the first time while a figure is taken.
        self.data: U8 = np.random.default_rng(1).integers(0, 256, scale.object_bytes, np.uint8)

    def _serve(self, sizes: Sequence[int]) -> ServeProcess:
        if self.medium == "memory":
            namespaces = [f"mem:{size}" for size in sizes]
        else:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-benchmark-")))
            namespaces = [f"{folder}/{number}.img:{size}" for number, size in enumerate(sizes)]
        return self._stack.enter_context(serving(NQN, *namespaces))

    def close(self) -> None:
        self._stack.close()

    @cached_property
    def stripes(self) -> Batch:
        """The bytes of the whole buffer, dealt out over the raw namespaces as an object's are."""
        count = np.arange(-(-self.scale.object_bytes // STRIPE), dtype=np.uint64)
        return Batch(
            member=(count % np.uint64(MEMBERS)).astype(np.uint32),
            offset=count // np.uint64(MEMBERS) * np.uint64(STRIPE),
            length=np.full(len(count), STRIPE, np.uint64),
            buffer_offset=count * np.uint64(STRIPE),
        )

    def put(self, name: str, data: U8, checksum_block_bytes: int = 64 * KIB) -> None:
        with self.session.transaction() as transaction:
            if name in self.volume:
                transaction.delete(name)
            transaction.put(name, data, checksum_block_bytes=checksum_block_bytes)

    def delete(self, *names: str) -> None:
        with self.session.transaction() as transaction:
            for name in names:
                transaction.delete(name)


def _fill(uri: str) -> None:
    piece = np.full(16 * MIB, 0xA5, np.uint8)
    with open_device(uri) as device:
        for start in range(0, device.size_bytes, len(piece)):
            device.write(start, piece[: min(len(piece), device.size_bytes - start)])
        device.flush()


@dataclass
class Timed:
    """One side of a pair: work for each call, and a rate back. What `after` does is not timed."""

    work: float
    run: Callable[[], None]
    after: Callable[[], None] = lambda: None
    seconds: float = 0.0
    cpu: float = 0.0

    def __call__(self) -> float:
        cpu, start = time.process_time(), time.perf_counter()
        self.run()
        took = time.perf_counter() - start
        self.seconds += took
        self.cpu += time.process_time() - cpu
        self.after()
        return self.work / took


def _figure(name: str, pairs: Pairs, unit: str, ours: Timed, peer: Timed, at_least: float | None) -> Figure:
    return Figure(
        suite=SUITE,
        figure=name,
        value=pairs.median_ratio,
        unit="ratio",
        at_least=at_least,
        samples=pairs.ratios,
        noise=pairs.noise,
        ours=float(np.median(pairs.ours)),
        peer=float(np.median(pairs.peer)),
        measured_in=unit,
        cpu={"ours": ours.cpu / ours.seconds, "peer": peer.cpu / peer.seconds},
    )


def write(rig: Rig, at_least: float) -> Iterator[Figure]:
    """One object, committed and flushed, over the same bytes written raw and flushed."""
    gb = rig.scale.object_bytes / 1e9

    def raw() -> None:
        write_batch(rig.raw, rig.stripes, [rig.data])
        flush_all(rig.raw)

    ours = Timed(gb, lambda: rig.put("big", rig.data), lambda: rig.delete("big"))
    peer = Timed(gb, raw)
    pairs = interleaved(ours, peer, rig.scale.rounds)
    yield _figure(f"write_{rig.medium}", pairs, "GB/s", ours, peer, at_least)


def read(rig: Rig, at_least: float) -> Iterator[Figure]:
    """The object read back and verified, over the same bytes read raw."""
    gb = rig.scale.object_bytes / 1e9
    rig.put("big", rig.data)
    write_batch(rig.raw, rig.stripes, [rig.data])
    into = np.zeros_like(rig.data)
    rig.volume.read_into("big", 0, into)
    if not np.array_equal(into, rig.data):
        raise AssertionError("the object is not what was written")
    ours = Timed(gb, lambda: rig.volume.read_into("big", 0, into))
    peer = Timed(gb, lambda: read_batch(rig.raw, rig.stripes, [into]))
    pairs = interleaved(ours, peer, rig.scale.rounds)
    rig.delete("big")
    yield _figure(f"read_{rig.medium}", pairs, "GB/s", ours, peer, at_least)


def random_ranges(rig: Rig, at_least: float | None, *, cold: bool = False) -> Iterator[Figure]:
    """Ranges of 32 KiB at multiples of 4 KiB, DEPTH under way, of an object with a checksum for every 4 KiB.

    `cold`: the first ones, when no page of the checksum table has been read.
    """
    length = rig.scale.object_bytes
    # Cold for so long as most ranges meet a page that was not read: one page has the checksums of 16 MiB.
    count = max(2 * DEPTH, length // (16 * MIB) // DEPTH * DEPTH) if cold else rig.scale.ranges
    rig.put("records", rig.data, 4 * KIB)
    write_batch(rig.raw, rig.stripes, [rig.data])
    # Within a stripe, so that both sides send as many commands.
    places = np.random.default_rng(2).integers(0, length // STRIPE, count) * STRIPE
    places += np.random.default_rng(3).integers(0, (STRIPE - RANGE) // SMALL + 1, count) * SMALL
    into = np.zeros(2 * DEPTH * RANGE, np.uint8)
    slots = np.arange(2 * DEPTH, dtype=np.int64) * RANGE
    lengths = np.full(DEPTH, RANGE, np.int64)
    info = rig.volume.stat("records")

    def in_turns(submit: Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], object]) -> None:
        # Two batches of half the depth would do; with two of DEPTH the engine's own window decides alike on both sides.
        under_way: list[object] = []
        for number, start in enumerate(range(0, count, DEPTH)):
            turn = number % 2
            under_way.append(submit(places[start : start + DEPTH], slots[turn * DEPTH : (turn + 1) * DEPTH]))
            if len(under_way) == 2:
                under_way.pop(0).wait()  # type: ignore[attr-defined]
        for transfer in under_way:
            transfer.wait()  # type: ignore[attr-defined]

    def verified(offsets: npt.NDArray[np.int64], to: npt.NDArray[np.int64]) -> object:
        return rig.volume.submit_read(info, offsets, lengths, [into], to)

    def raw(offsets: npt.NDArray[np.int64], to: npt.NDArray[np.int64]) -> object:
        unit = offsets // STRIPE
        batch = Batch(
            member=(unit % MEMBERS).astype(np.uint32),
            offset=(unit // MEMBERS * STRIPE + offsets % STRIPE).astype(np.uint64),
            length=lengths.astype(np.uint64),
            buffer_offset=to.astype(np.uint64),
        )
        return submit_read(rig.raw, batch, [into])

    for submit in (verified, raw):
        submit(places[:DEPTH], slots[:DEPTH]).wait()  # type: ignore[attr-defined]
        want = np.concatenate([rig.data[place : place + RANGE] for place in places[:DEPTH].tolist()])
        if not np.array_equal(into[: DEPTH * RANGE], want):
            raise AssertionError("the ranges are not what was written")
    forget = rig.volume._checksums.forget if cold else (lambda: None)
    forget()
    ours = Timed(count / 1e3, lambda: in_turns(verified), forget)
    peer = Timed(count / 1e3, lambda: in_turns(raw))
    pairs = interleaved(ours, peer, rig.scale.rounds)
    rig.delete("records")
    yield _figure(f"random_32kib_{'cold' if cold else 'verified'}", pairs, "1000/s", ours, peer, at_least)


def small_objects(rig: Rig, at_least: float) -> Iterator[Figure]:
    """Many objects of 4 KiB in one transaction, over one object of the same bytes."""
    count = min(rig.scale.small_objects, rig.scale.object_bytes // SMALL)
    data = rig.data[: count * SMALL]
    lengths = np.full(count, SMALL, np.int64)
    turns = itertools.count()

    def fresh() -> list[str]:
        """Names that never were, as the samples of another step have."""
        turn = next(turns)
        return [f"small/{turn:03d}/{number:06d}" for number in range(count)]

    names = fresh()

    def many() -> None:
        with rig.session.transaction() as transaction:
            transaction.put_many(names, data, lengths)

    def end_many() -> None:
        with rig.session.transaction() as transaction:
            transaction.delete_prefix("small/")
        names[:] = fresh()

    ours = Timed(count / 1e3, many, end_many)
    peer = Timed(count / 1e3, lambda: rig.put("one", data), lambda: rig.delete("one"))
    pairs = interleaved(ours, peer, rig.scale.rounds)
    yield _figure("small_objects_100k", pairs, "1000/s", ours, peer, at_least)


#: figure: (medium, measure, bound)
FIGURES: dict[str, tuple[str, Callable[[Rig, Any], Iterator[Figure]], float | None]] = {
    "write_memory": ("memory", write, 0.75),
    "read_memory": ("memory", read, 0.75),
    "random_32kib_verified": ("memory", random_ranges, 0.7),
    "random_32kib_cold": ("memory", partial(random_ranges, cold=True), None),
    "small_objects_100k": ("memory", small_objects, 0.3),
    "write_file": ("file", write, 0.9),
    "read_file": ("file", read, 0.9),
}


def run(quick: bool, only: Sequence[str] = ()) -> Iterator[Figure]:
    for medium in ("memory", "file"):
        wanted = [row for name, row in FIGURES.items() if row[0] == medium and (not only or name in only)]
        if not wanted:
            continue
        rig = Rig(QUICK if quick else FULL, medium)
        try:
            for _, measure, at_least in wanted:
                yield from measure(rig, at_least)
        finally:
            rig.close()
