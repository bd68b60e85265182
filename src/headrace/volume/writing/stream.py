"""An object from buffers that come one after another, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from headrace.device.protocol import Buffer
from headrace.device.reference import U8, as_bytes
from headrace.errors import UsageError
from headrace.volume.data.extents import U32, Extents, column_bytes, make_runs
from headrace.volume.layout import Rows
from headrace.volume.writing.write import members_of, write_extents, write_table

if TYPE_CHECKING:
    from headrace.volume.writing.allocation import Allocation
    from headrace.volume.writing.transaction import Transaction

#: At least so much is written at a time; and a stripe of every member.
_STAGE_BYTES = 16 << 20


def staged(buffers: Iterable[Buffer], stage: U8) -> Iterator[U8]:
    """The same bytes, cut into pieces that fill `stage`, all but the last. A piece is valid until the next is asked
    for.
    """
    filled = 0
    for buffer in buffers:
        view = as_bytes(buffer)
        while len(view):
            part = view[: len(stage) - filled]
            stage[filled : filled + len(part)] = part
            filled += len(part)
            view = view[len(part) :]
            if filled == len(stage):
                yield stage
                filled = 0
    if filled:
        yield stage[:filled]


def join_runs(parts: list[Extents], stripe_bytes: int) -> tuple[Rows, Rows]:
    """Runs and columns of the parts in a row; runs that go on where the one before ended become one."""
    rows: list[tuple[int, list[tuple[int, int]]]] = []
    for part in parts:
        position = 0
        for length, width, _ in part.runs.tolist():
            columns = [(m, o) for m, _, o in part.columns[position : position + width].tolist()]
            position += width
            if rows and _goes_on(rows[-1], columns, stripe_bytes):
                rows[-1] = (rows[-1][0] + length, rows[-1][1])
            else:
                rows.append((length, columns))
    return make_runs(rows)


def _goes_on(before: tuple[int, list[tuple[int, int]]], columns: list[tuple[int, int]], stripe_bytes: int) -> bool:
    length, old = before
    unit = stripe_bytes if len(old) > 1 else length
    if len(old) != len(columns) or length % (unit * len(old)) or length % stripe_bytes:
        return False
    return all(
        member == old_member and offset == old_offset + column_bytes(length, len(old), unit, i)
        for i, ((old_member, old_offset), (member, offset)) in enumerate(zip(old, columns, strict=True))
    )


def write_stream(
    transaction: Transaction,
    allocation: Allocation,
    buffers: Iterable[Buffer],
    *,
    length_bytes: int | None,
    block_bytes: int,
) -> int:
    """See `Transaction.write_stream`. Each full stage is durable before the next is filled, which is what bounds the
    memory; the rest and the checksum table wait for the transaction's flush.
    """
    session = transaction.session
    devices, superblock = session.writing, session.volume.superblock
    stripe = superblock.stripe_bytes
    birth = allocation.birth
    row = stripe * len(devices)
    stage = np.empty(-(-max(_STAGE_BYTES, row) // row) * row, np.uint8)
    whole = None if length_bytes is None else session.take(allocation, length_bytes, block_bytes)
    parts: list[Extents] = [] if whole is None else [whole]
    checksums: list[U32] = []
    written = 0
    for piece in staged(buffers, stage):
        last = len(piece) < len(stage)
        if length_bytes is not None:
            end = written + len(piece)
            if end > length_bytes or (last and end != length_bytes):
                raise _wrong_length(allocation.name, length_bytes, str(end) if last else f"at least {end}")
        sums = np.zeros(-(-len(piece) // block_bytes), np.uint32)
        if whole is None:
            part = session.take(allocation, len(piece), block_bytes)
            parts.append(part)
            start, first_block = 0, written // block_bytes
        else:
            part, start, first_block = whole, written, 0
        data: Buffer = piece.copy() if last else piece

        def write(
            part: Extents = part, data: Buffer = data, sums: U32 = sums, start: int = start, first: int = first_block
        ) -> None:
            write_extents(
                devices, part, data, sums, birth=birth, volume_id=superblock.volume_id, start=start, first_block=first
            )

        if last:
            transaction.write_part(allocation, members_of(devices, part), write, len(piece))
        else:
            with session.lost_if_fenced():
                allocation.run(members_of(devices, part), write)
        checksums.append(sums)
        written += len(piece)
    if length_bytes is not None and written != length_bytes:
        raise _wrong_length(allocation.name, length_bytes, str(written))

    runs, columns = join_runs(parts, stripe)
    joined = Extents(runs, columns, length_bytes=written, block_bytes=block_bytes, stripe_bytes=stripe)
    sums = np.concatenate(checksums) if checksums else np.zeros(0, np.uint32)
    tables = session.take_tables(allocation, len(sums))
    roots = sums

    def write_its_table() -> None:
        nonlocal roots
        roots = write_table(devices, tables, sums, birth=birth, volume_id=superblock.volume_id)

    if tables:
        transaction.write_part(allocation, members_of(devices, *tables), write_its_table, sums.nbytes)
    allocation.written(data=joined, tables=tables, roots=roots)
    transaction.bound_kept()
    return written


def _wrong_length(name: str, expected: int, found: str) -> UsageError:
    return UsageError(
        "the stream has another length than was said",
        where=f"object {name!r}",
        expected=f"{expected} bytes",
        found=f"{found} bytes",
    )
