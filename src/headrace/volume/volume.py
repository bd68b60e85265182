"""A volume: named, immutable objects on a set of block devices."""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.device import BlockDevice, lanes
from headrace.device.protocol import Buffer
from headrace.errors import UsageError, VolumeTooOld
from headrace.settings import check_text
from headrace.units import MIB
from headrace.volume import layout
from headrace.volume.catalog.log import LogReader
from headrace.volume.catalog.sides import recognise
from headrace.volume.contents import Addresses, Contents
from headrace.volume.create import create as create_on
from headrace.volume.data.absent import absent, present
from headrace.volume.data.extents import I64, U32
from headrace.volume.data.objects import ObjectInfo, StoredBlob
from headrace.volume.info import VolumeInfo, members_of, quarantined_bytes, unreachable_bytes, writer_of
from headrace.volume.media import members
from headrace.volume.read import leaves, submit
from headrace.volume.transfer import VolumeTransfer
from headrace.volume.writing import fence
from headrace.volume.writing.fence import Ticket
from headrace.volume.writing.grant import Grant, Receipt
from headrace.volume.writing.heartbeat import INTERVAL_S, MISSED_BEATS, HeartbeatBlock
from headrace.volume.writing.parts import Parts
from headrace.volume.writing.session import Session
from headrace.volume.writing.write import buffer_bytes, write_grant

#: `Volume.list` hides the builtin inside of the class.
Devices: TypeAlias = list[BlockDevice]

_open_volumes: weakref.WeakSet[Volume] = weakref.WeakSet()


class Volume(Contents):
    """Open with `Volume.open` or `Volume.create`. Thread-safe. Pickles by address: the other side opens it again."""

    def __init__(
        self, found: members.Members, *, write: bool, owned: bool, degraded: bool = False, keep: int | None = None
    ) -> None:
        super().__init__(found, degraded=degraded, keep=keep)
        self.writable = write
        self._owned = owned
        #: As which host this process writes for another one's session.
        self._joined: tuple[Ticket, list[BlockDevice]] | None = None
        self._joining = threading.Lock()
        _open_volumes.add(self)

    # ---- opening and closing ----

    @classmethod
    def create(
        cls,
        uris: str | Sequence[str] | None = None,
        *,
        name: str = "",
        stripe_bytes: int = MIB,
        log_bytes: int | None = None,
        force: bool = False,
        devices: Sequence[BlockDevice] | None = None,
    ) -> Volume:
        """Make an empty volume on 1..64 members, given by address or as open devices, and open it for writing.

        `stripe_bytes`: power of two from 64 KiB. `log_bytes`: size of a log area (four on each of two copies); by
        default a 64th of a member, 128 KiB to 1 MiB. UsageError where a device holds a volume,
        unless `force`.
        """
        if (uris is None) == (devices is None):
            raise UsageError("give either addresses or devices")
        opened = [*(devices or ())] if uris is None else members.open_all(members.addresses(uris), read_only=False)
        try:
            create_on(opened, name=name, stripe_bytes=stripe_bytes, log_bytes=log_bytes, force=force)
            return cls(members.recognise(opened), write=True, owned=uris is not None)
        except BaseException:
            if uris is not None:
                members.close_all(opened)
            raise

    @classmethod
    def open(
        cls,
        where: str | Sequence[str] | Sequence[BlockDevice],
        *,
        write: bool = False,
        ticket: Ticket | None = None,
        degraded: bool = False,
        keep: int | None = None,
    ) -> Volume:
        """Open by the addresses of all members, in any order (one text may hold several, separated by commas), or
        devices.

        `write`: needed for `session` and `write_grant`. `ticket`: of the session for which this process writes
        (`Session.ticket`), to connect now what the first grant would connect. `degraded`: go on where members are
        missing, or do not answer: what lies on them is refused by name (MemberMissing), all else works; `info()` says
        what is missing. `keep`: where members went on without each other, the index of one whose history goes on; the
        commits of the other side are given up by the next session, and objects fail their checksums whose bytes it had
        overwritten. Raises NotAVolume, VolumeTooNew, VolumeDamaged, VolumeDiverged, DeviceError; SessionLost where
        the ticket's session was taken over from.
        """
        uris = [where] if isinstance(where, str) else [item for item in where if isinstance(item, str)]
        devices = [] if isinstance(where, str) else [item for item in where if not isinstance(item, str)]
        if uris and devices:
            raise UsageError("give either addresses or devices")
        owned = not devices
        failed: Addresses = []
        opened = devices
        if owned:
            listed = members.addresses(where if isinstance(where, str) else uris)
            opened, failed = members.open_some(listed, read_only=not write, degraded=degraded)
        try:
            found = recognise(opened, degraded=degraded, keep=keep)
            found.notes[:0] = failed
            volume = cls(found, write=write, owned=owned, degraded=degraded, keep=keep)
            if ticket is not None:
                volume._join(ticket)
            return volume
        except BaseException:
            if owned:
                members.close_all(opened)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        session, joined = self._session, self._joined
        ticket = session.ticket if session is not None else None if joined is None else joined[0]
        where: Any = self.uris if self._owned else present(self.devices)
        return (_reopen, (where, self.writable, ticket, self.degraded, self.keep))

    def close(self) -> None:
        """Close the session, if one is open, and the devices that were opened by address."""
        if self._closed:
            return
        self._closed = True
        session = self._session
        try:
            if session is not None:
                session.close()
        finally:
            joined, self._joined = self._joined, None
            if joined is not None:
                members.close_all([device for device in joined[1] if device not in self.devices])
            if self._owned:
                members.close_all(self.devices)

    def __enter__(self) -> Volume:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def info(self) -> VolumeInfo:
        """Sizes, sequence, writer. Reads the heartbeat block and asks who holds the members, and nothing else; where
        members are missing, a catalogue of some MiB, too."""
        superblock, session = self.superblock, self._session
        capacity = sum(member.data_end - member.data_offset for member in superblock.members)
        heartbeat = HeartbeatBlock(superblock, self.devices, self.log.copies).read()
        # In the order in which a commit takes them.
        with nullcontext() if session is None else session.lock, self.lock:
            count, used = self._catalog.totals
            used += self._catalog.table_bytes
            sequence = self._catalog.sequence
            findings = [*self._cursor.findings, *self.log.unread, *self.log.nodes.findings, *self._checksums.findings]
            if session is None:
                waiting = self._cursor.waiting
                quarantined = quarantined_bytes(superblock, self._catalog, waiting, heartbeat, absent(self.devices))
                unreachable, exact = unreachable_bytes(superblock, self._catalog, absent(self.devices))
                unreachable = min(unreachable, capacity - used)
                quarantined = max(0, min(quarantined, capacity - used - unreachable))
                exact = exact and not quarantined
            else:
                quarantined, unreachable, exact = session.quarantined_bytes, session.unreachable_bytes, True
                used += session.building_bytes
        return VolumeInfo(
            id=self.id,
            name=self.name,
            version=superblock.version,
            created_s=superblock.created_ns / 1e9,
            members=members_of(superblock, self.devices, self.log.copies),
            epoch=superblock.log_epoch,
            stripe_bytes=superblock.stripe_bytes,
            log_bytes=superblock.area_bytes,
            log_areas=superblock.area_count,
            capacity_bytes=capacity,
            used_bytes=used,
            quarantined_bytes=quarantined,
            unreachable_bytes=unreachable,
            exact=exact,
            free_bytes=capacity - used - quarantined - unreachable,
            reserved_bytes=0 if session is None else session.reserved_bytes,
            object_count=count,
            sequence=sequence,
            fence=fence.weakest([fence.in_force(device) for device in self.devices]),
            writer=writer_of(heartbeat),
            warnings=[*self._notes, *self._warnings, *findings],
        )

    # ---- reading ----

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of an object, verified; `length` None: to its end."""
        stored = self.stored(name)
        if length is None:
            length = max(0, stored.length_bytes - offset)
        # Checked before memory is taken, and before they are columns: Python's numbers have no end.
        if not 0 <= offset <= stored.length_bytes - length <= stored.length_bytes:
            raise leaves(stored, offset, length)
        buffer = np.empty(length, np.uint8)
        submit(self, stored, [offset], [length], [buffer], [0], None, True).wait()
        return buffer.tobytes()

    def read_into(self, name: str, offset: int, buffer: Buffer) -> None:
        """Fill `buffer` with the object's bytes from `offset` on, verified."""
        self.submit_read(name, [offset], [buffer_bytes(buffer)], [buffer], [0]).wait()

    def submit_read(
        self,
        what: str | ObjectInfo,
        offsets: npt.ArrayLike,
        lengths: npt.ArrayLike,
        buffers: Sequence[Buffer],
        buffer_offsets: npt.ArrayLike,
        buffer_index: npt.ArrayLike | None = None,
        *,
        verify: bool = True,
        room_bytes: int = 0,
    ) -> VolumeTransfer:
        """Start to read byte ranges of one object, given by name or by its `ObjectInfo` (then it must be that very
        one).

        `offsets`, `lengths`: uint64[n], bytes in the object; `buffer_offsets`: uint64[n], where they go in
        `buffers[buffer_index]` (uint32[n], all 0 by default). Ranges may overlap; no Python runs per range or block.
        Reads are widened to whole checksum blocks and verified; `verify=False` waives that. `room_bytes`: around the
        place of each range so much of its buffer, as far as it goes, may be overwritten, too, and those places do not
        meet: where the rest of a range's first and last block has room there, nothing is copied.

        UsageError where a range leaves the object or its buffer; ObjectNotFound; errors of the read come from `wait`.
        """
        return submit(
            self, self.stored(what), offsets, lengths, buffers, buffer_offsets, buffer_index, verify, room_bytes
        )

    def checksums_of(self, blob: StoredBlob, blocks: I64) -> U32:
        """Checksums of these blocks of a blob. TableMismatch, DeviceError."""
        return self._checksums.gather(blob, blocks)

    # ---- writing ----

    def session(
        self,
        run_id: str | None = None,
        *,
        takeover: str = "refuse",
        heartbeat_s: float = INTERVAL_S,
        missed_beats: int = MISSED_BEATS,
        unfenced: bool = False,
    ) -> Session:
        """Become the volume's one writer: a host of its own to the targets, which shut every older one out.

        `run_id` names the job: a restart under the same name takes over by itself once its predecessor is dead, which
        takes `missed_beats` of the predecessor's heartbeat intervals. `takeover="if-dead"` does so for any name;
        `"now"` takes over from a living session too, by hand: whoever asks for it has seen `info().writer`.
        `unfenced`: also where a member's target has no reservations, so that nothing keeps out a writer that was taken
        over from (`docs/volume-format.md`, "Ghosts").
        UsageError where a member can only be read; VolumeTooOld for a volume of an earlier version, which is only read
        any more; WriterActive where another session holds the volume, NotFenced; a session that was closed is followed
        at once.
        """
        if takeover not in ("refuse", "if-dead", "now"):
            raise UsageError("takeover", expected='"refuse", "if-dead" or "now"', found=repr(takeover))
        check_text("run_id", run_id or "")
        if not 0.01 <= heartbeat_s <= 60 or not 1 <= missed_beats <= 1000:
            raise UsageError(
                "a session's heartbeat",
                expected="0.01 s to 60 s, 1 to 1000 beats",
                found=f"{heartbeat_s}, {missed_beats}",
            )
        self.check_writable()
        for device in present(self.devices):
            if device.read_only:
                raise UsageError(
                    "a member can only be read, so nobody can write to the volume", where=device.uri,
                    next_step="read it, or have whoever serves it allow this host to write",
                )  # fmt: skip
        if self.superblock.version < layout.VERSION:
            raise VolumeTooOld(
                "the volume has an older format, which is read and no longer written",
                where=repr(self),
                expected=f"version {layout.VERSION}",
                found=f"version {self.superblock.version}",
                next_step="copy what it holds into a new volume",
            )
        with self.lock:
            if self._session is not None:
                raise UsageError("this volume has a session open", next_step="use it, or close it first")
        self.refresh()
        return Session(
            self,
            run_id=run_id or secrets.token_hex(8),
            takeover=takeover,
            heartbeat_s=heartbeat_s,
            missed_beats=missed_beats,
            unfenced=unfenced,
        )

    def _join(self, ticket: Ticket) -> Devices:
        """What to write with for the session that gave the ticket; connected when first needed. SessionLost."""
        if ticket.volume_id != self.superblock.volume_id:
            raise UsageError("the ticket belongs to another volume", where=", ".join(self.uris))
        with self._joining:
            if self._joined is None or self._joined[0] != ticket:
                before, self._joined = self._joined, None
                if before is not None:
                    # A session that is over, or that has renewed itself: what it still writes is refused anyway.
                    members.close_all([device for device in before[1] if device not in self.devices])
                self._joined = (ticket, fence.join(self.devices, ticket))
            return self._joined[1]

    def write_grant(self, grant: Grant, buffer: Buffer | Parts) -> Receipt:
        """Write an object's bytes where its grant says, until they are durable; any rank may, without a session.

        `buffer` must not change before this returns; it may be several (`Parts`). The receipt goes back to the
        transaction that gave the grant.
        SessionLost where the session that gave the grant was taken over from; UsageError where its transaction has
        ended, if that is a session of this process.
        """
        self.check_writable()
        if grant.volume_id != self.superblock.volume_id:
            raise UsageError("the grant belongs to another volume", where=f"object {grant.name!r}")
        session = self._session
        if session is not None and session.number == grant.session:
            return session.write_grant(grant, buffer)
        # What was joined is there for writing alone; else it goes beside what is read.
        devices = self._join(Ticket.from_json(grant.ticket)) if grant.ticket else lanes(self.devices, "checkpoint")
        with fence.lost_if_fenced():
            receipt = write_grant(devices, grant, buffer)
        space = [one for extents in (grant.data_extents(), *grant.table_extents()) for one in extents.used()]
        return replace(receipt, haunted=fence.haunted(devices, space))

    def writers(self) -> Devices:
        """With what this process writes: the devices of its session, as the host that it is, or of the one whose ticket
        it was given; none where there is neither. For `describe()`, which counts what a target refused."""
        if self._session is not None:
            return self._session.devices
        return [*(self._joined[1] if self._joined is not None else ())]

    def check_writable(self) -> None:
        if self._closed:
            raise UsageError("the volume is closed")
        if not self.writable:
            raise UsageError("the volume is open for reading", next_step="open it with write=True")

    def after_fork(self) -> None:
        """In the child: locks may have been held by threads that it does not have, and the session is not its own."""
        self.lock = threading.RLock()
        self._joining = threading.Lock()
        self._checksums.forget()
        self.log.nodes.after_fork()
        session, self._begun = self._session, None
        if session is not None:
            session.after_fork()
            self.log = LogReader(self.superblock, self.devices, self.log.copies)


def _after_fork() -> None:
    for volume in list(_open_volumes):
        volume.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _reopen(
    where: Any, write: bool, ticket: Ticket | None = None, degraded: bool = False, keep: int | None = None
) -> Volume:
    return Volume.open(where, write=write, ticket=ticket, degraded=degraded, keep=keep)
