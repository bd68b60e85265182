"""What `Volume.info` says: one committed state of a volume, its members, and who wrote last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from headrace.device import BlockDevice
from headrace.errors import VolumeDamaged
from headrace.volume import layout
from headrace.volume.catalog.catalog import Catalog, merge
from headrace.volume.catalog.usage import usage_of, usage_of_recent
from headrace.volume.data.absent import AbsentMember
from headrace.volume.layout import Record, Superblock
from headrace.volume.space.allocator import FreeSpace, count_space
from headrace.volume.writing.past import earlier_are_gone

#: Space of the tables of a catalogue that is read where members are missing.
_READ_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class MemberInfo:
    index: int
    uri: str
    id: str
    size_bytes: int
    data_bytes: int
    log_copy: bool
    #: Its copy of the log counts: a commit is acknowledged only when it is there, too.
    log_counts: bool
    missing: bool
    volatile_cache: bool


@dataclass(frozen=True, kw_only=True)
class WriterInfo:
    """Who wrote last, or writes now (`state` "active"; whether its heart beats is not said here)."""

    state: str
    session: int
    run_id: str
    host: str
    pid: int
    started_s: float
    #: When its last beat was due, by its own clock; 0: it does not say. A session that was closed: when.
    last_beat_s: float


@dataclass(frozen=True, kw_only=True)
class VolumeInfo:
    """One committed state of a volume. Sizes in bytes."""

    id: str
    name: str
    version: int
    created_s: float
    members: list[MemberInfo]
    #: Of the log: how often it changed which copies of it count, and 1.
    epoch: int
    stripe_bytes: int
    #: Of an area of the log, and how many there are of it.
    log_bytes: int
    log_areas: int
    #: For objects and their checksum tables, on all members together.
    capacity_bytes: int
    used_bytes: int
    #: Neither used nor free: what late writes may still hit. Of the session that this `Volume` has open; else what the
    #: next session would have to leave alone, at most: the windows of the last one, unless that ended with nothing
    #: under way. What went into a table since they were opened is counted with them: nothing is read to find it out.
    quarantined_bytes: int
    #: Neither used nor free: on members that are missing. Without a session, and where the catalogue is too large to be
    #: read for it, all that they have for data.
    unreachable_bytes: int
    free_bytes: int
    #: Or else these three are bounds: at most so much in quarantine and unreachable, at least so much free.
    exact: bool
    #: Of the free bytes, what is kept for reservations of the session that this `Volume` has open.
    reserved_bytes: int
    object_count: int
    #: Of the last commit.
    sequence: int
    #: What keeps out a writer that was taken over from, now, on the worst member: "persistent", "until-restart",
    #: "node", "machine", "process" or "none" (`headrace.volume.writing.fence`).
    fence: str
    writer: WriterInfo | None
    #: Members and log copies that are missing; copies of structures that are damaged while the other is good: the next
    #: session mends what is there.
    warnings: list[str]


def members_of(superblock: Superblock, devices: Sequence[BlockDevice], copies: Sequence[int]) -> list[MemberInfo]:
    """`copies`: those of the log that count."""
    counting = {superblock.log_member[copy] for copy in copies}
    return [
        MemberInfo(
            index=index,
            uri=device.uri,
            id=member.id.hex(),
            size_bytes=member.size_bytes,
            data_bytes=member.data_end - member.data_offset,
            log_copy=index in superblock.log_member,
            log_counts=index in counting,
            missing=isinstance(device, AbsentMember),
            volatile_cache=device.volatile_cache,
        )
        for index, (device, member) in enumerate(zip(devices, superblock.members, strict=True))
    ]


def writer_of(heartbeat: layout.Heartbeat | None) -> WriterInfo | None:
    if heartbeat is None:
        return None
    return WriterInfo(
        state="active" if heartbeat.state == layout.ACTIVE else "closed",
        session=heartbeat.session,
        run_id=heartbeat.run_id,
        host=heartbeat.host,
        pid=heartbeat.pid,
        started_s=heartbeat.started_ns / 1e9,
        last_beat_s=heartbeat.due_ns / 1e9,
    )


def quarantined_bytes(
    superblock: Superblock,
    catalog: Catalog,
    waiting: Sequence[Record],
    heartbeat: layout.Heartbeat | None,
    absent: Sequence[int],
) -> int:
    """What the next session could not hand out, at most: the last one's windows, unless that ended and left nothing
    under way. `waiting`: records that no marker has followed yet; `absent`: members that do not count here.

    Reads nothing: windows, recent changes and where the tables lie stand in the log.
    """
    as_found = Catalog()
    as_found.session = catalog.session
    as_found.windows = {number: [*ranges] for number, ranges in catalog.windows.items()}
    for record in waiting:
        # No marker follows a window that was opened last; the next session adopts it all the same.
        if record.kind in (layout.SESSION, layout.WINDOW):
            as_found.apply(record)
    windows = as_found.suspects
    if heartbeat is not None and heartbeat.state == layout.CLOSED and heartbeat.session >= as_found.session:
        # Where nobody keeps reservations (no key), one successor waits.
        windows = {} if not heartbeat.key or earlier_are_gone(heartbeat) else as_found.earlier
    spaces = [FreeSpace() for _ in superblock.members]
    for member, offset, length in merge([one for ranges in windows.values() for one in ranges]):
        if member >= len(spaces):
            raise VolumeDamaged("no such member", where="a window of the log", found=str(member))
        spaces[member].add(offset, offset + length)
    blobs = usage_of_recent(catalog, superblock.stripe_bytes).ranges()
    used = zip(*(column.tolist() for column in blobs), strict=True)
    for member, offset, length in chain(used, catalog.table_space()):
        if member < len(spaces):
            spaces[member].remove(offset, offset + length)
    return sum(space.total for index, space in enumerate(spaces) if index not in absent)


def unreachable_bytes(superblock: Superblock, catalog: Catalog, absent: Sequence[int]) -> tuple[int, bool]:
    """What nothing uses on members that are missing, and whether that is exact: a large catalogue is not read for it,
    and then it is all that they have.
    """
    if not absent:
        return 0, True
    if catalog.table_bytes > _READ_BYTES:
        return sum(
            superblock.members[index].data_end - superblock.members[index].data_offset for index in absent
        ), False
    spaces, _ = count_space(superblock, usage_of(catalog, superblock.stripe_bytes).ranges(), (), catalog.table_space())
    return sum(spaces[index].total for index in absent), True
