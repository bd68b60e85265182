"""Members that went on without each other: has one side committed nothing?

Both sides know the epoch that they had in common, and each has one of its own. A side on which one session began, and
committed nothing, has nothing that the other does not know: it is left behind like a member that was away, and the next
session rebuilds it. Strictly, since commits are at stake:

    epochs        of its own it has one, and no history was given up in it
    the log       moved in that epoch once, when the session began: snapshot, that session's SESSION record, and then
                  nothing but windows and markers. A merge of tables is no commit, but its space may be used again
    the session   found nothing in flight (BEGAN_WITH_FACTS): a commit that it had adopted, the other side may not have

What the session wrote to besides was free space, and no window of its predecessor, which the other side may have a
commit in. A second session could have used that: so there was one.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.device import BlockDevice
from headrace.errors import DeviceError, HeadraceError, VolumeDiverged
from headrace.volume import layout
from headrace.volume.catalog.log import LogReader
from headrace.volume.layout import SessionEntry, Superblock
from headrace.volume.media import members
from headrace.volume.media.members import Members


def recognise(devices: Sequence[BlockDevice], *, degraded: bool = False, keep: int | None = None) -> Members:
    """As `members.recognise`. VolumeDiverged only where both sides may have commits that the other does not know."""
    try:
        return members.recognise(devices, degraded=degraded, keep=keep)
    except VolumeDiverged:
        goes_on = _side_with_all(devices, degraded=degraded)
        if goes_on is None:
            raise
    found = members.recognise(devices, degraded=degraded, keep=goes_on)
    found.notes.append("a member went on without the others, and nothing was committed there: it is left behind")
    return found


def _side_with_all(devices: Sequence[BlockDevice], *, degraded: bool) -> int | None:
    """A member with a log copy, of two sides of which the other has no commits of its own."""
    sides: dict[int, Members] = {}
    for index in range(layout.LOG_COPIES):
        try:
            sides[index] = members.recognise(devices, degraded=degraded, keep=index)
        except HeadraceError:
            return None
    for index, other in ((0, 1), (1, 0)):
        if _committed_nothing(sides[other], sides[index].superblock):
            return index
    return None


def _committed_nothing(side: Members, other: Superblock) -> bool:
    own, *before = side.superblock.epochs
    if not before or before[0].flags & layout.GIVEN_UP or not any(before[0].same(epoch) for epoch in other.epochs):
        return False
    try:
        log = LogReader(side.superblock, side.devices, side.copies)
        cursor = log.start()
        header = cursor.header
        if header.epoch != own.number or header.session == header.mover:
            return False
        while cursor.snapshot_left:
            if log.next(cursor) is None:
                return False
        kinds = []
        while (record := log.next(cursor)) is not None:
            kinds.append(record.kind)
            if record.kind == layout.SESSION:
                session = SessionEntry.decode(record.payload, f"log record {record.sequence}")
                if session.number != header.mover or not session.flags & layout.BEGAN_WITH_FACTS:
                    return False
        log.load()
    except (DeviceError, HeadraceError):
        return False
    return kinds[:1] == [layout.SESSION] and set(kinds[1:]) <= {layout.MARKER, layout.WINDOW}
