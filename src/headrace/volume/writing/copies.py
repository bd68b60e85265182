"""Copies of the log that are missing, and that come back: what a session does about them before it writes a record.

    fence all members that are there
        |
    read the log from the copies that count            (`media/epochs.py` says which)
        |
    rebuild those that do not, and whose member is there: all of the copy, from one that counts, header of the newest
        |                      area behind its records
        |
    other copies than before?  the next epoch, on the superblocks: first of a member with a copy that counted so far,
        |                      then of those that were rebuilt, then of all others
        v
    records; and the log moves, so that its area names the epoch

A crash at any write leaves either the old epoch, or the new one on a member whose copy counts in both: who was not
reached is left behind, and rebuilt once more. So no copy is ever taken for good that lacks a commit, whichever members
are there the next time; but for both being away in turn, each with a session of its own, and that shows when they meet
(`VolumeDiverged`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from headrace.device import BlockDevice
from headrace.errors import DeviceError, ReservationConflict, VolumeDamaged
from headrace.volume import layout
from headrace.volume.catalog.log import Cursor, LogReader
from headrace.volume.data.durable import write_through
from headrace.volume.layout import ALIGN, Epoch, Superblock
from headrace.volume.media import epochs
from headrace.volume.media.members import Members, write_superblocks
from headrace.volume.writing.heartbeat import HeartbeatBlock

#: Read and written at once where a copy is rebuilt.
_PIECE_BYTES = 1 << 20


def usable(found: Members, devices: Sequence[BlockDevice]) -> tuple[int, ...]:
    """Of the copies that count, those that can be read and written, as far as one look at each tells. For a session
    that may go on without the others; DeviceError where none is left."""
    errors: list[DeviceError] = []
    good = _good(found, devices, errors, every_area=True)
    # Where no copy is left without a fault, one is good enough of which the log can be read.
    good = good or _good(found, devices, errors, every_area=False)
    if not good:
        raise errors[-1]
    return tuple(good)


def _good(found: Members, devices: Sequence[BlockDevice], errors: list[DeviceError], *, every_area: bool) -> list[int]:
    block, good = found.superblock, []
    for copy in found.copies:
        device = devices[block.log_member[copy]]
        try:
            for area in range(block.area_count if every_area else 0):
                _read(device, block.area_offset(copy, area), ALIGN)
            # Does it answer where the log has to be read? What is damaged there is told by who reads it.
            with suppress(VolumeDamaged):
                LogReader(block, devices, (copy,)).start()
            # The same bytes: a late write of them does no harm.
            write_through(device, block.log_offset[copy], _read(device, block.log_offset[copy], ALIGN))
        except ReservationConflict:
            raise
        except DeviceError as error:
            errors.append(error)
        else:
            good.append(copy)
    return good


def settle(log: LogReader, found: Members, *, degraded: bool) -> bool:
    """See to it that the epoch says which copies of the log are read and written; True where those are others now.

    `log`: reads the copies that count and can be used; what it has was read through once. `found`: the members as the
    fence found them. `degraded`: a copy that cannot be rebuilt is left out; else DeviceError.
    """
    copies = [*log.copies]
    failed = [copy for copy in found.copies if copy not in copies]
    for copy in range(layout.LOG_COPIES):
        # Nor that of a member whose superblock could not be read: nobody knows what it holds.
        if copy in found.copies or found.superblock.log_member[copy] not in found.blocks:
            continue
        try:
            _rebuild(log, copy)
            copies.append(copy)
        except ReservationConflict:
            raise
        except DeviceError as error:
            if not degraded:
                raise DeviceError(
                    f"copy {copy} of the volume's log cannot be rebuilt",
                    where=log.device(copy).uri,
                    found=str(error),
                    next_step="mend the device, or go on without that copy with degraded=True (--degraded)",
                ) from error
            failed.append(copy)
    # Of a copy that was being rebuilt, and whose source is lost, the log is further on than the superblock.
    begun, members = log.start().header.epoch, found.superblock.log_member
    superblock = next_epoch(found.superblock, copies, found.given_up, begun)
    if superblock == found.superblock and not epochs.lagging(superblock, found.blocks):
        return False
    superblock = replace(superblock, generation=1 + max(block.generation for block in found.blocks.values()))
    order = members_in_order(members, log.copies, copies)
    write_superblocks(log.devices, superblock, order)
    left_out = {members[copy] for copy in failed} - set(order)
    for index in sorted(found.blocks):
        if index in order:
            continue
        try:
            write_superblocks(log.devices, superblock, [index])
        except ReservationConflict:
            raise
        except DeviceError:
            # It is left behind, as a member that was away.
            if index not in left_out:
                raise
    log.use(superblock, sorted(copies))
    return True


def members_in_order(members: Sequence[int], before: Sequence[int], now: Sequence[int]) -> list[int]:
    """Of the members with log copies that count now, first who had one before: whoever knows the new epoch, one of them
    knows it and has all of the log."""
    return list(dict.fromkeys(members[copy] for copy in [*before, *now]))


def first_number(found: Members, devices: Sequence[BlockDevice], number: int) -> int:
    """At least `number`, for a session: above all of a history that is given up, so that births are not used twice."""
    block = found.superblock
    there = [copy for copy in range(layout.LOG_COPIES) if block.log_member[copy] in found.blocks]
    last = HeartbeatBlock(block, devices, there).read() if found.given_up else None
    return number if last is None else max(number, last.session + 1)


def next_epoch(superblock: Superblock, copies: Sequence[int], given_up: Sequence[Epoch], begun: int = 0) -> Superblock:
    """The superblock of the epoch in which these copies count; the same where they do already, and no history is given
    up, and the log is of no later one (`begun`)."""
    counting = sum(1 << copy for copy in copies)
    if counting == superblock.epoch.copies and not given_up and begun <= superblock.epoch.number:
        return superblock
    number = 1 + max(begun, *(epoch.number for epoch in (superblock.epoch, *given_up)))
    epoch = Epoch(number, counting, 0, time.time_ns(), secrets.token_bytes(16))
    # Once each, however many members of the other side there are: the history of this one must not be pushed out.
    others = dict.fromkeys(one._replace(flags=one.flags | layout.GIVEN_UP) for one in given_up)
    known = (epoch, *others, *superblock.epochs)[: layout.MAX_EPOCHS]
    return replace(superblock, epochs=known, incompat=superblock.incompat | layout.EPOCHS)


def _read(device: BlockDevice, offset: int, length: int) -> bytes:
    buffer = np.empty(length, np.uint8)
    device.read_into(offset, buffer)
    return buffer.tobytes()


def _rebuild(log: LogReader, copy: int) -> None:
    """All of a copy, from one that counts. Its member does not say yet that it counts; until then it opens by itself as
    what it was, or as what it will be, since the source may be lost on the way: records first, the header of the newest
    area then, all else last.
    """
    block, source = log.superblock, log.copies[0]
    newest = log.start()
    _copy(log, copy, block.log_offset[source], block.area_offset(source, 0))
    old = _in_force(log, copy)
    if old is not None and old.area == newest.area and old.header.generation != newest.header.generation:
        # Its newest area is the one that has to be overwritten: until that is there, what it says stands in another.
        aside = newest.area ^ 1
        _copy_area(log, copy, newest.area, to=aside)
        header = newest.header.encode(block.volume_id, aside)
        write_through(log.device(copy), block.area_offset(copy, aside), header)
    # A block at a time, where the log goes on in an area that is in force here.
    same = old is not None and old.area == newest.area and old.header.generation == newest.header.generation
    _copy_area(log, copy, newest.area, piece=ALIGN if same else _PIECE_BYTES)
    _copy_header(log, copy, newest.area)
    for area in range(block.area_count):
        if area != newest.area:
            # Older than that: its header first, since a copy of the newest may stand there.
            _copy_header(log, copy, area)
            _copy_area(log, copy, area)


def _in_force(log: LogReader, copy: int) -> Cursor | None:
    """Where a copy that does not count begins by itself; None where it does not."""
    try:
        return LogReader(log.superblock, log.devices, (copy,)).start()
    except (DeviceError, VolumeDamaged):
        return None


def _copy_header(log: LogReader, copy: int, area: int) -> None:
    offset = log.superblock.area_offset(log.copies[0], area)
    _copy(log, copy, offset, offset + ALIGN)


def _copy_area(log: LogReader, copy: int, area: int, *, to: int | None = None, piece: int = _PIECE_BYTES) -> None:
    """An area without its header."""
    block, source = log.superblock, log.copies[0]
    begin = block.area_offset(source, area)
    shift = 0 if to is None else block.area_offset(copy, to) - block.area_offset(copy, area)
    _copy(log, copy, begin + ALIGN, begin + block.area_bytes, shift=shift, piece=piece)


def _copy(log: LogReader, copy: int, begin: int, end: int, *, shift: int = 0, piece: int = _PIECE_BYTES) -> None:
    """These bytes of the copy that counts to the same place of another, or so far behind it."""
    block, source = log.superblock, log.copies[0]
    for offset in range(begin, end, piece):
        data = _whole(log.device(source), offset, min(piece, end - offset))
        write_through(log.device(copy), block.log_offset[copy] + offset - block.log_offset[source] + shift, data)


def _whole(device: BlockDevice, offset: int, length: int) -> bytes:
    """A piece of a copy; a block of it that cannot be read is not needed: the log was read without it."""
    try:
        return _read(device, offset, length)
    except DeviceError:
        if length == ALIGN:
            return bytes(ALIGN)
    return b"".join(_whole(device, at, ALIGN) for at in range(offset, offset + length, ALIGN))
