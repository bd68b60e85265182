"""What one rank reads of a checkpoint: items of DCP's plan to byte ranges, those to batches, bytes to tensors.

A saved chunk is row-major bytes, so what a rank wants of it is byte ranges. Where the destination is contiguous host
memory of the same dtype, ranges are read into it directly; otherwise (accelerator memory, other dtype, a column slice)
through a bounce buffer. Blocks that several ranges touch (small tensors, and where one tensor ends and the next begins)
are read once, and their bytes copied. What other ranks want as well comes as messages (`headrace.torch.load.sharing`).
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from headrace.checkpoint.layout import box_runs
from headrace.checkpoint.save import CHECKSUM_BLOCK_BYTES
from headrace.checkpoint.shares import Share, cut, met_twice
from headrace.errors import CheckpointFailed, ChecksumMismatch, HeadraceError
from headrace.torch.metadata import Place
from headrace.torch.tensors import as_bytes
from headrace.units import MIB
from headrace.volume import ObjectInfo, Volume, VolumeTransfer

#: Runs shorter than a checksum block would each read a whole one; below this the rows that cover them are read at once.
SHORTEST_RUN = CHECKSUM_BLOCK_BYTES
#: Bytes of bounce buffers under way at a time; the next lot is read while this one is copied to its destination.
BOUNCE_BYTES = 256 * MIB
#: Of the first lot: the devices begin while the rest is looked up.
FIRST_LOT_BYTES = 32 * MIB

U64 = npt.NDArray[np.uint64]
U8 = npt.NDArray[np.uint8]


@dataclass(kw_only=True)
class Wanted:
    """One read item: byte ranges of an object into one buffer, and the tensor that they are for."""

    item: ReadItem
    #: Number of the object.
    object: int
    #: uint64[n] each: bytes in the object, bytes of the range, bytes in the buffer.
    starts: U64
    lengths: U64
    at: U64
    buffer_bytes: int
    #: dtype and shape of the buffer; None for an item of bytes.
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    #: Which box of the buffer is wanted, where it is not all of it: (dimension, start, length).
    box: tuple[tuple[int, int, int], ...] = ()
    #: Bytes of the item itself.
    wanted_bytes: int
    #: Reads and messages that it still waits for.
    left: int = 0
    #: Of its bytes, those that come in messages; what came of them before there was a buffer.
    shared_bytes: int = 0
    early: list[tuple[int, U8]] = field(default_factory=list)
    target: torch.Tensor | None = None
    bounce: torch.Tensor | None = None
    #: The memory that is read into: of `target`, of `bounce`, or of an item of bytes. None: not yet.
    buffer: U8 | None = None

    def resolve(self, planner: LoadPlanner) -> bool:
        """Find the destination. True: it is read into directly."""
        if self.dtype is None:
            return False
        if self.target is None:
            target = planner.resolve_tensor(self.item).detach()
            if target.shape != self.item.lengths:
                raise CheckpointFailed(
                    f"the destination of {self.item.dest_index.fqn!r}",
                    expected=str(list(self.item.lengths)),
                    found=str(list(target.shape)),
                )
            self.target = target
        target = self.target
        # The memory of a view that conjugates or negates is not what its elements are.
        as_it_lies = target.is_contiguous() and not (target.is_conj() or target.is_neg())
        return not self.box and target.device.type == "cpu" and target.dtype == self.dtype and as_it_lies

    def open(self, planner: LoadPlanner) -> U8:
        if self.buffer is None:
            if self.resolve(planner):
                assert self.target is not None
                self.buffer = _array(self.target)
            elif self.dtype is None:
                self.buffer = np.empty(self.buffer_bytes, np.uint8)
            else:
                self.bounce = torch.empty(self.shape, dtype=self.dtype)
                self.buffer = _array(self.bounce)
            for at, data in self.early:
                self.buffer[at : at + len(data)] = data
            self.early.clear()
        return self.buffer

    def put(self, at: int, data: U8, planner: LoadPlanner) -> None:
        """Bytes that came in a message."""
        if self.buffer is None and not self.resolve(planner) and 2 * self.shared_bytes < self.buffer_bytes:
            # Most of it is read later, and so is its bounce buffer made.
            self.early.append((at, data.copy()))
        else:
            self.open(planner)[at : at + len(data)] = data

    def close(self, planner: LoadPlanner) -> None:
        """All bytes are there."""
        buffer = self.open(planner)
        if self.target is None:
            planner.load_bytes(self.item, io.BytesIO(buffer.data))
        else:
            if self.bounce is not None:
                view = self.bounce
                for dimension, start, length in self.box:
                    view = view.narrow(dimension, start, length)
                self.target.copy_(view)
            planner.commit_tensor(self.item, self.target)
        self.buffer = self.bounce = self.target = None


def _array(tensor: torch.Tensor) -> U8:
    return np.frombuffer(as_bytes(tensor), np.uint8) if tensor.numel() else np.empty(0, np.uint8)


def wanted(item: ReadItem, place: Place, number: int, metadata: Metadata) -> Wanted:
    """Where the bytes of this item lie in object `number`, and how they lie in its buffer."""
    if item.type == LoadItemType.BYTE_IO:
        starts, lengths, at = _columns([place.offset], [place.length], [0])
        return Wanted(
            item=item,
            object=number,
            starts=starts,
            lengths=lengths,
            at=at,
            buffer_bytes=place.length,
            wanted_bytes=place.length,
        )
    entry = metadata.state_dict_metadata[item.storage_index.fqn]
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointFailed(f"{item.storage_index.fqn!r} is bytes in the checkpoint, not a tensor")
    dtype, chunk = entry.properties.dtype, _chunk(entry, item.storage_index)
    if place.length and item.lengths == chunk.sizes and not any(item.storage_offsets):
        # All of it, as where nothing is sharded anew.
        return Wanted(
            item=item, object=number, starts=np.array([place.offset], np.uint64),
            lengths=np.array([place.length], np.uint64), at=np.zeros(1, np.uint64), buffer_bytes=place.length,
            dtype=dtype, shape=tuple(item.lengths), wanted_bytes=place.length,
        )  # fmt: skip
    runs = box_runs(chunk.sizes, item.storage_offsets, item.lengths, dtype.itemsize)
    if len(runs.offsets) <= 1 or runs.length >= SHORTEST_RUN:
        starts, lengths, at = _columns(
            runs.offsets + np.uint64(place.offset),
            np.full(len(runs.offsets), runs.length),
            np.arange(len(runs.offsets)) * runs.length,
        )
        return Wanted(
            item=item, object=number, starts=starts, lengths=lengths, at=at, buffer_bytes=runs.total, dtype=dtype,
            shape=tuple(item.lengths), wanted_bytes=runs.total,
        )  # fmt: skip
    # Many short runs: the rows of the chunk that hold them, whole, then the columns by a view.
    row_bytes = math.prod(chunk.sizes[1:]) * dtype.itemsize
    whole = item.lengths[0] * row_bytes
    starts, lengths, at = _columns([place.offset + item.storage_offsets[0] * row_bytes], [whole], [0])
    return Wanted(
        item=item, object=number, starts=starts, lengths=lengths, at=at, buffer_bytes=whole, dtype=dtype,
        shape=(item.lengths[0], *chunk.sizes[1:]), wanted_bytes=runs.total,
        box=tuple(zip(range(1, len(chunk.sizes)), item.storage_offsets[1:], item.lengths[1:], strict=True)),
    )  # fmt: skip


def _columns(starts: npt.ArrayLike, lengths: npt.ArrayLike, at: npt.ArrayLike) -> tuple[U64, U64, U64]:
    first, size, place = (np.asarray(column, np.uint64) for column in (starts, lengths, at))
    keep = size > 0
    return first[keep], size[keep], place[keep]


def _chunk(entry: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    # The hint is right in every plan that DCP makes from our metadata.
    if index.index is not None and index.index < len(entry.chunks):
        hinted = entry.chunks[index.index]
        if hinted.offsets == index.offset:
            return hinted
    for chunk in entry.chunks:
        if chunk.offsets == index.offset:
            return chunk
    raise CheckpointFailed(f"the plan wants a chunk of {index.fqn!r} that was never saved")


def rows_of_items(items: Sequence[Wanted]) -> U64:
    """uint64[n, 3]: object, first byte, end of every range of these items, item after item."""
    if not items:
        return np.zeros((0, 3), np.uint64)
    starts = np.concatenate([one.starts for one in items])
    number = np.repeat(np.array([one.object for one in items], np.uint64), [len(one.starts) for one in items])
    return np.stack([number, starts, starts + np.concatenate([one.lengths for one in items])], axis=1)


@dataclass
class _Batch:
    """A read under way."""

    transfer: VolumeTransfer
    #: What wants its bytes.
    items: list[Wanted]
    #: Blocks that several ranges touch, and what is copied out of them: item, bytes in its buffer, in `common`, length.
    common: U8
    copies: list[tuple[Wanted, int, int, int]]


class Reading:
    """The items of one plan.

    Args:
        info: the object of this number, as it was when the plan was made.
    """

    def __init__(
        self,
        volume: Volume,
        info: Callable[[int], ObjectInfo],
        items: Iterable[Wanted],
        planner: LoadPlanner,
        timeout_s: float,
    ) -> None:
        self._volume = volume
        self._info = info
        self._planner = planner
        self._timeout_s = timeout_s
        # By place, so that neighbours on the media are neighbours in a batch.
        self.items = sorted(items, key=lambda one: (one.object, int(one.starts[0]) if len(one.starts) else 0))
        ranges = rows_of_items(self.items)
        owner = np.repeat(np.arange(len(self.items)), [len(one.starts) for one in self.items])
        self._rest = (ranges, owner, np.concatenate([one.at for one in self.items] or [np.zeros(0, np.uint64)]))
        self._copies: dict[int, list[tuple[Wanted, int, int, int]]] = {}
        #: Bytes that the volume was asked for here, without the rest of blocks.
        self.read_bytes = 0

    # ---- messages --------------------------------------------------------------------------------------------------

    def leave_to(self, share: Share) -> None:
        """What these messages have is not read by `run`; `arrived` takes it."""
        ranges, owner, at = self._rest
        message = np.repeat(np.arange(len(share)), np.diff(share.bounds))
        length = (share.rows[:, 2] - share.rows[:, 1]).astype(np.int64)
        place = np.cumsum(length) - length
        place -= place[share.bounds[:-1]][message] if len(share) else 0
        order = np.lexsort((share.rows[:, 1], share.rows[:, 0]))
        found = cut(ranges, share.rows[order])
        piece = order[found.piece]
        columns = (
            message[piece],
            owner[found.range],
            at[found.range] + found.start - ranges[found.range, 1],
            place[piece] + (found.start - share.rows[piece, 1]).astype(np.int64),
            found.end - found.start,
        )
        for number, item, to, source, size in zip(*(column.tolist() for column in columns), strict=True):
            one = self.items[item]
            one.left += 1
            one.shared_bytes += size
            self._copies.setdefault(number, []).append((one, to, source, size))
        rest = np.stack([ranges[found.rest_range, 0], found.rest_start, found.rest_end], axis=1)
        self._rest = (
            rest,
            owner[found.rest_range],
            at[found.rest_range] + found.rest_start - ranges[found.rest_range, 1],
        )

    def read_message(self, rows: U64, into: U8, number: int) -> _Named:
        """Start to read these rows, one after another."""
        suspects = [one for one, *_ in self._copies.get(number, [])]
        length = rows[:, 2] - rows[:, 1]
        at = np.cumsum(length) - length
        transfers = []
        try:
            for number_of in np.unique(rows[:, 0]).tolist():
                mine = rows[:, 0] == number_of
                transfers.append(
                    self._volume.submit_read(self._info(number_of), rows[mine, 1], length[mine], [into], at[mine])
                )
        except BaseException:
            self._settle(transfers)
            raise
        self.read_bytes += int(length.sum())
        return _Named(self, transfers, suspects)

    def arrived(self, number: int, data: U8) -> None:
        for one, to, source, size in self._copies.pop(number, []):
            one.put(to, data[source : source + size], self._planner)
            one.left -= 1
            # What is still to be read here closes it.
            if not one.left:
                one.close(self._planner)

    # ---- what is this rank's alone -----------------------------------------------------------------------------------

    def count(self) -> None:
        """Before any message or read: what each item waits for."""
        for item in self._rest[1].tolist():
            self.items[item].left += 1

    def run(self) -> None:
        before: list[_Batch] = []
        under_way: list[_Batch] = []
        try:
            for lot in self._lots():
                under_way = self._submit(lot)
                self._finish(before)
                before, under_way = under_way, []
            self._finish(before)
        except BaseException:
            # The caller gets its tensors back with the error: nothing may still be read into them.
            self._settle([batch.transfer for batch in [*before, *under_way]])
            raise
        for one in self.items:
            if not one.wanted_bytes:
                one.close(self._planner)

    def _lots(self) -> Iterable[npt.NDArray[np.int64]]:
        """Numbers of rows, of lots whose bounce buffers stay within half of BOUNCE_BYTES (two lots are under way), or
        hold one item. The first is short."""
        owner = self._rest[1]
        edges = np.flatnonzero(np.diff(owner, prepend=-1))
        lot_from, bounced, so_far = 0, 0, 0
        for edge, item in zip(edges.tolist(), owner[edges].tolist(), strict=True):
            one = self.items[item]
            size = 0 if one.resolve(self._planner) else one.buffer_bytes
            first = not lot_from and so_far >= FIRST_LOT_BYTES
            if edge > lot_from and (first or bounced + size > BOUNCE_BYTES // 2):
                yield np.arange(lot_from, edge)
                lot_from, bounced = edge, 0
            bounced += size
            so_far += one.buffer_bytes
        if len(owner) > lot_from:
            yield np.arange(lot_from, len(owner))

    def _submit(self, lot: npt.NDArray[np.int64]) -> list[_Batch]:
        rows, owner, at = (column[lot] for column in self._rest)
        batches: list[_Batch] = []
        try:
            for number in np.unique(rows[:, 0]).tolist():
                mine = rows[:, 0] == number
                batches.append(self._submit_object(number, rows[mine], owner[mine], at[mine]))
        except BaseException:
            self._settle([batch.transfer for batch in batches])
            raise
        return batches

    def _submit_object(self, number: int, rows: U64, owner: npt.NDArray[np.int64], at: U64) -> _Batch:
        info = self._info(number)
        numbers = np.unique(owner)
        items = [self.items[item] for item in numbers.tolist()]
        buffers = [one.open(self._planner) for one in items]
        twice = met_twice(rows, info.checksum_block_bytes or CHECKSUM_BLOCK_BYTES)
        twice[:, 2] = np.minimum(twice[:, 2], np.uint64(info.length_bytes))
        found = cut(rows, twice)
        size = twice[:, 2] - twice[:, 1]
        place = np.cumsum(size) - size
        common = np.empty(int(size.sum()), np.uint8)
        alone = found.rest_range
        transfer = self._volume.submit_read(
            info,
            np.concatenate([found.rest_start, twice[:, 1]]),
            np.concatenate([found.rest_end - found.rest_start, size]),
            [*buffers, common],
            np.concatenate([at[alone] + found.rest_start - rows[alone, 1], place]),
            np.concatenate([np.searchsorted(numbers, owner[alone]), np.full(len(twice), len(items))]).astype(np.uint32),
        )
        length = found.end - found.start
        self.read_bytes += int((found.rest_end - found.rest_start).sum() + length.sum())
        columns = (
            np.searchsorted(numbers, owner[found.range]),
            at[found.range] + found.start - rows[found.range, 1],
            place[found.piece] + found.start - twice[found.piece, 1],
            length,
        )
        copies = [
            (items[item], to, source, bytes_)
            for item, to, source, bytes_ in zip(*(column.tolist() for column in columns), strict=True)
        ]
        for one, count in zip(items, np.bincount(np.searchsorted(numbers, owner)).tolist(), strict=True):
            # All rows of an item are in one lot, and end with it.
            one.left -= count
        return _Batch(transfer, items, common, copies)

    def _finish(self, batches: Sequence[_Batch]) -> None:
        for batch in batches:
            _Named(self, [batch.transfer], batch.items).wait()
        for batch in batches:
            for one, to, source, size in batch.copies:
                one.open(self._planner)[to : to + size] = batch.common[source : source + size]
            for one in batch.items:
                if not one.left:
                    one.close(self._planner)

    def _settle(self, transfers: Sequence[VolumeTransfer]) -> None:
        """Wait until no read is under way, whatever became of it: the error that brought us here is the one to tell.

        For as long as the devices wait, since nothing ends a read but they: one that is left behind comes later, and
        over what the next load has brought."""
        for transfer in transfers:
            with contextlib.suppress(HeadraceError):
                transfer.wait()

    def name_the_damage(self, suspects: Sequence[Wanted], error: ChecksumMismatch) -> ChecksumMismatch:
        """The batch says which object and where; people think in tensors. So read one by one and see which fails."""
        for one in suspects:
            scratch = np.empty(int(one.lengths.sum()), np.uint8)
            at = np.cumsum(one.lengths) - one.lengths
            again = self._volume.submit_read(self._info(one.object), one.starts, one.lengths, [scratch], at)
            try:
                again.wait(self._timeout_s)
            except ChecksumMismatch as found:
                kind = "item" if one.dtype is None else "tensor"
                return ChecksumMismatch(
                    f"{kind} {one.item.storage_index.fqn!r} of a checkpoint is damaged: {found.what}",
                    where=found.where,
                    expected=found.expected,
                    found=found.found,
                    next_step="load the checkpoint before it",
                )
        # The second reading was good: the damage was on the way, not at rest.
        return ChecksumMismatch(
            f"bytes of a checkpoint were damaged on the way, a second reading was good: {error.what}",
            where=error.where,
            next_step="try again; if it stays, look at the network and enable digests (hdgst=1, ddgst=1)",
        )


class _Named:
    """Reads under way whose damage is told by the name of a tensor."""

    def __init__(self, reading: Reading, transfers: Sequence[VolumeTransfer], suspects: Sequence[Wanted]) -> None:
        self._reading = reading
        self._transfers = transfers
        self._suspects = suspects

    def done(self) -> bool:
        return all(transfer.done() for transfer in self._transfers)

    def wait(self) -> None:
        try:
            for transfer in self._transfers:
                transfer.wait(self._reading._timeout_s)
        except ChecksumMismatch as error:
            self._reading._settle(self._transfers)
            raise self._reading.name_the_damage(self._suspects, error) from error
        except BaseException:
            self._reading._settle(self._transfers)
            raise


__all__ = ["BOUNCE_BYTES", "Reading", "Wanted", "rows_of_items", "wanted"]
