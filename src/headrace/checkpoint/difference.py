"""Two checkpoints, tensor by tensor: which differ, in how many elements, and by how much.

Both are read once, in boxes that are contiguous in the chunk of the one and lie in a bounded range of every chunk of
the other, however each was sharded; so memory is bounded by a few such boxes, whatever the tensors' sizes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.layout import box_runs
from headrace.checkpoint.manifest import Manifest, TensorEntry
from headrace.checkpoint.numbers import bits, distances, stored_dtype
from headrace.checkpoint.ranges import Piece, pieces_of, read_ahead
from headrace.errors import CheckpointFailed, HeadraceError
from headrace.units import MIB
from headrace.volume import ObjectInfo, Volume

#: Bytes of a box, and of what is read of a chunk to have it.
BOX_BYTES = 2 * MIB

Shape: TypeAlias = tuple[int, ...]
Range: TypeAlias = tuple[ObjectInfo, int, int]
Kind: TypeAlias = Literal["equal", "differs", "added", "missing", "dtype", "shape", "kind"]


@dataclass(kw_only=True)
class Difference:
    """What became of one tensor (or item of bytes) from one checkpoint to the other."""

    name: str
    #: "differs" in elements; "added": only the second has it, "missing": only the first; another "dtype", "shape", or
    #: "kind" (a tensor in the one, bytes in the other).
    kind: Kind
    #: For "dtype", "shape" and bytes of another length: what the first has, and the second.
    was: str = ""
    now: str = ""
    #: Elements in all, and those whose bits differ. Of bytes: bytes.
    elements: int = 0
    differing: int = 0
    #: Over the elements whose distance is a number; the mean is that of all of these, equal ones included.
    max_abs: float = 0.0
    mean_abs: float = 0.0
    #: Elements that differ and are infinite or no number in one of the two.
    not_finite: int = 0


@dataclass(frozen=True, kw_only=True)
class Step:
    """How far it is, in bytes of the second checkpoint, and what is known of one more name."""

    done_bytes: int
    found: Difference | None = None


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    info: ObjectInfo
    at: int
    offsets: Shape
    sizes: Shape


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What one read gives: of which side, where it lies in the box, and how its elements lie in what is read."""

    second: bool
    range: Range
    box: tuple[slice, ...]
    shape: Shape
    strides: Shape


@dataclass(kw_only=True)
class _Job:
    """A box of a tensor (or a range of bytes), and the reads that it needs."""

    difference: Difference
    dtype: str
    shape: Shape
    parts: list[_Part] = field(default_factory=list)


class _Side:
    def __init__(self, volume: Volume, manifest: Manifest) -> None:
        self.manifest = manifest
        self._infos = [volume.stat(entry.name) for entry in manifest.objects]
        self.tensors = {tensor.fqn: (i, tensor) for i, tensor in enumerate(manifest.tensors)}
        self.blobs = {name: len(manifest.tensors) + i for i, name in enumerate(manifest.blobs)}
        self._bounds = manifest.coordinates()

    def chunks(self, key: int) -> list[_Chunk]:
        m = self.manifest
        first, last = (int(np.searchsorted(m.key, np.uint64(key), side)) for side in ("left", "right"))
        found = []
        for item in range(first, last):
            ends = slice(int(self._bounds[item]), int(self._bounds[item + 1]))
            found.append(
                _Chunk(
                    info=self._infos[int(m.object[item])],
                    at=int(m.offset[item]),
                    offsets=tuple(m.chunk_offset[ends].tolist()),
                    sizes=tuple(m.chunk_size[ends].tolist()),
                )
            )
        return found

    def bytes_of(self, name: str) -> Range:
        m, key = self.manifest, np.uint64(self.blobs[name])
        item = int(np.searchsorted(m.key, key))
        if item == len(m.key) or m.key[item] != key:
            raise CheckpointFailed("this manifest says nothing about where an item lies", found=name)
        return self._infos[int(m.object[item])], int(m.offset[item]), int(m.length[item])


def differences(volume: Volume, first: Manifest, second: Manifest) -> Iterator[Step]:
    """Every name of either, in the order of the first, then what only the second has. ChecksumMismatch names the
    tensor whose bytes are damaged.
    """
    one, two = _Side(volume, first), _Side(volume, second)
    jobs: deque[_Job] = deque()
    done = 0

    def walk() -> Iterator[Range]:
        for job in _jobs(one, two):
            jobs.append(job)
            for part in job.parts:
                yield part.range

    known: list[Difference] = []
    # What needs no bytes comes among the jobs as one without parts, so the order is kept.
    with closing(read_ahead(volume, walk())) as reading:
        while True:
            piece = next(reading, None)
            while jobs and (piece is None or not jobs[0].parts):
                yield from _finished(known, jobs.popleft().difference, done)
            if piece is None:
                break
            job = jobs.popleft()
            arrays = [np.empty(job.shape, stored_dtype(job.dtype)) for _ in range(2)]
            for number, part in enumerate(job.parts):
                taken = piece if number == 0 else next(reading)
                done += taken.length if part.second else 0
                arrays[part.second][part.box] = _elements(taken, part, job)
            _compare(job, *(array.reshape(-1) for array in arrays))
            yield from _finished(known, job.difference, done)
    if known:
        yield Step(done_bytes=done, found=_summed(known[0]))


def _finished(known: list[Difference], now: Difference, done: int) -> Iterator[Step]:
    """A name is known when the next one begins."""
    if known and known[0] is not now:
        yield Step(done_bytes=done, found=_summed(known.pop()))
    if not known:
        known.append(now)
    yield Step(done_bytes=done)


def _summed(found: Difference) -> Difference:
    if found.differing:
        found.kind = "differs"
    # Until here it was the sum.
    counted = found.elements - found.not_finite
    found.mean_abs = found.mean_abs / counted if counted else 0.0
    return found


def _jobs(one: _Side, two: _Side) -> Iterator[_Job]:
    names = [*one.tensors, *one.blobs]
    names += [name for name in [*two.tensors, *two.blobs] if name not in one.tensors and name not in one.blobs]
    for name in names:
        here, there = (name in side.tensors or name in side.blobs for side in (one, two))
        if not (here and there):
            yield _job(Difference(name=name, kind="missing" if here else "added"))
        elif (name in one.tensors) != (name in two.tensors):
            yield _job(Difference(name=name, kind="kind"))
        elif name in one.tensors:
            yield from _tensor_jobs(name, one, two)
        else:
            yield from _bytes_jobs(name, one, two)


def _job(difference: Difference) -> _Job:
    return _Job(difference=difference, dtype="uint8", shape=(0,))


def _bytes_jobs(name: str, one: _Side, two: _Side) -> Iterator[_Job]:
    (a, at_a, length_a), (b, at_b, length_b) = one.bytes_of(name), two.bytes_of(name)
    found = Difference(name=name, kind="equal", elements=max(length_a, length_b))
    if length_a != length_b:
        found.kind, found.was, found.now = "differs", f"{length_a} bytes", f"{length_b} bytes"
        found.differing = abs(length_a - length_b)
    common = min(length_a, length_b)
    yield _job(found)
    pairs = zip(pieces_of(a, at_a, common), pieces_of(b, at_b, common), strict=True)
    for range_a, range_b in pairs:
        length = range_a[2]
        job = _Job(difference=found, dtype="uint8", shape=(length,))
        for second, range_ in ((False, range_a), (True, range_b)):
            box = (slice(0, length),)
            job.parts.append(_Part(second=second, range=range_, box=box, shape=(length,), strides=(1,)))
        yield job


def _tensor_jobs(name: str, one: _Side, two: _Side) -> Iterator[_Job]:
    (key_a, a), (key_b, b) = one.tensors[name], two.tensors[name]
    if a.dtype != b.dtype:
        yield _job(Difference(name=name, kind="dtype", was=a.dtype, now=b.dtype))
        return
    if a.shape != b.shape:
        yield _job(Difference(name=name, kind="shape", was=str(list(a.shape)), now=str(list(b.shape))))
        return
    found = Difference(name=name, kind="equal", elements=math.prod(a.shape))
    yield _job(found)
    there = two.chunks(key_b)
    seen = 0
    for chunk in one.chunks(key_a):
        for offsets, sizes in boxes(chunk.offsets, chunk.sizes, a.shape, a.element_bytes):
            job = _Job(difference=found, dtype=a.dtype, shape=sizes)
            for second, candidates in ((False, [chunk]), (True, there)):
                job.parts += _parts(second, candidates, offsets, sizes, a)
            covered = sum(math.prod(part.shape) for part in job.parts if part.second)
            if covered != math.prod(sizes):
                raise CheckpointFailed(
                    f"the shards of tensor {name!r} are not all of it", where=str(two.manifest.summary.id)
                )
            seen += covered
            yield job
    if seen != found.elements:
        raise CheckpointFailed(f"the shards of tensor {name!r} are not all of it", where=str(one.manifest.summary.id))


def boxes(offsets: Shape, sizes: Shape, shape: Shape, element_bytes: int) -> Iterator[tuple[Shape, Shape]]:
    """A chunk of a tensor of `shape`, cut into boxes (offsets in the tensor, and sizes) of at most BOX_BYTES, whatever
    chunk the elements of a box lie in: those before the dimension that is cut have one index, those behind it all.
    """
    if not math.prod(sizes):
        return
    if not sizes:
        yield (), ()
        return
    cut, row = 0, math.prod(shape[1:]) * element_bytes
    while row > BOX_BYTES and cut < len(sizes) - 1:
        cut += 1
        row = math.prod(shape[cut + 1 :]) * element_bytes
    step = max(1, BOX_BYTES // row)
    for index in product(*(range(size) for size in sizes[:cut])):
        for start in range(0, sizes[cut], step):
            within = (*index, start, *(0 for _ in sizes[cut + 1 :]))
            count = min(step, sizes[cut] - start)
            begin = tuple(o + w for o, w in zip(offsets, within, strict=True))
            yield begin, (*(1 for _ in index), count, *sizes[cut + 1 :])


def _parts(
    second: bool, candidates: Sequence[_Chunk], offsets: Shape, sizes: Shape, tensor: TensorEntry
) -> Iterator[_Part]:
    """The reads that give a box, out of the chunks that have something of it."""
    for chunk in candidates:
        low = tuple(max(o, c) for o, c in zip(offsets, chunk.offsets, strict=True))
        ends = zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
        lengths = tuple(min(o + s, c + d) - at for (o, s, c, d), at in zip(ends, low, strict=True))
        if any(length <= 0 for length in lengths):
            continue
        inside = tuple(at - c for at, c in zip(low, chunk.offsets, strict=True))
        start, length = box_runs(chunk.sizes, inside, lengths, tensor.element_bytes).span
        strides = [tensor.element_bytes] * len(chunk.sizes)
        for dimension in range(len(chunk.sizes) - 2, -1, -1):
            strides[dimension] = strides[dimension + 1] * chunk.sizes[dimension + 1]
        box = tuple(slice(at - o, at - o + n) for at, o, n in zip(low, offsets, lengths, strict=True))
        yield _Part(
            second=second,
            range=(chunk.info, chunk.at + start, length),
            box=box,
            shape=lengths,
            strides=tuple(strides),
        )


def _elements(piece: Piece, part: _Part, job: _Job) -> npt.NDArray[Any]:
    if piece.problem is not None:
        error: HeadraceError = piece.problem
        error.what = f"{job.difference.name!r} of a checkpoint is damaged: {error.what}"
        raise error
    dtype = stored_dtype(job.dtype)
    if not part.shape:
        return piece.data.view(dtype).reshape(())
    # The range ends with the last element of the box: no stride leads out of it.
    flat = np.frombuffer(piece.data.data, dtype)
    return np.lib.stride_tricks.as_strided(flat, part.shape, part.strides, writeable=False)


def _compare(job: _Job, one: npt.NDArray[Any], two: npt.NDArray[Any]) -> None:
    differing = (bits(one) != bits(two)).any(axis=1)
    count = int(differing.sum())
    if not count:
        return
    found = job.difference
    found.differing += count
    apart = distances(one[differing], two[differing], job.dtype)
    finite = apart[np.isfinite(apart)]
    found.not_finite += min(count, len(apart) - len(finite))
    found.max_abs = max(found.max_abs, float(finite.max(initial=0.0)))
    found.mean_abs += float(finite.sum())
