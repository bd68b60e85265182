"""A volume: named, immutable objects on a set of block devices."""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.device import BlockDevice, lanes
from headrace.device.protocol import Buffer
from headrace.errors import ObjectNotFound, UsageError, VolumeDamaged, VolumeTooOld
from headrace.settings import check_text
from headrace.units import MIB
from headrace.volume import layout
from headrace.volume.catalog.catalog import Catalog
from headrace.volume.catalog.commit import LogWriter
from headrace.volume.catalog.listing import Listing, listing_of
from headrace.volume.catalog.log import Cursor, Followed, LogReader
from headrace.volume.catalog.tables import TableDamaged
from headrace.volume.create import create as create_on
from headrace.volume.data.absent import absent, present
from headrace.volume.data.checksums import ChecksumCache
from headrace.volume.data.extents import I64, U32
from headrace.volume.data.objects import ObjectInfo, StoredBlob, StoredObject, info_of, objects_of
from headrace.volume.info import VolumeInfo, members_of, quarantined_bytes, unreachable_bytes, writer_of
from headrace.volume.layout import ObjectValue, Superblock
from headrace.volume.media import epochs, members
from headrace.volume.read import leaves, submit
from headrace.volume.transfer import VolumeTransfer
from headrace.volume.writing import fence
from headrace.volume.writing.fence import Ticket
from headrace.volume.writing.grant import Grant, Receipt
from headrace.volume.writing.heartbeat import INTERVAL_S, MISSED_BEATS, HeartbeatBlock
from headrace.volume.writing.session import Session
from headrace.volume.writing.write import buffer_bytes, write_grant

#: `Volume.list` hides the builtin inside of the class.
Addresses: TypeAlias = list[str]
ObjectList: TypeAlias = list[ObjectInfo]
Result = TypeVar("Result")
Devices: TypeAlias = list[BlockDevice]

#: A reader that is overtaken by so many rounds of merges gives up.
_LOOKS = 8
#: Objects of one piece of a listing, or some more.
_LISTED = 4096
#: Objects, and blobs with their extents, that are kept decoded.
_DECODED = 1024


_open_volumes: weakref.WeakSet[Volume] = weakref.WeakSet()


class Volume:
    """Open with `Volume.open` or `Volume.create`. Thread-safe. Pickles by address: the other side opens it again."""

    def __init__(
        self, found: members.Members, *, write: bool, owned: bool, degraded: bool = False, keep: int | None = None
    ) -> None:
        #: In order; an `AbsentMember` where one is missing.
        self.devices: list[BlockDevice] = found.devices
        self.superblock: Superblock = found.superblock
        self.writable = write
        #: Members may be missing.
        self.degraded = degraded
        #: The member whose history goes on, where members went on without each other.
        self.keep = keep
        #: Guards catalog and cursor; never held while waiting for a session.
        self.lock = threading.RLock()
        self.log = LogReader(self.superblock, self.devices, found.copies)
        self._owned = owned
        self._closed = False
        self._warnings = found.warnings
        self._notes = found.notes
        #: Members that were away when the current epoch of the log began.
        self.lagging = epochs.lagging(found.superblock, found.blocks)
        self._checksums = ChecksumCache(self.devices, self.superblock.volume_id)
        self._decoded: OrderedDict[str, StoredObject] = OrderedDict()
        #: By birth, so not stale as long as there is one history.
        self._blobs: OrderedDict[int, StoredBlob] = OrderedDict()
        #: Dropped without `close`, it ends: so nothing here keeps it.
        self._begun: weakref.ref[Session] | None = None
        #: As which host this process writes for another one's session.
        self._joined: tuple[Ticket, list[BlockDevice]] | None = None
        self._joining = threading.Lock()
        self._catalog: Catalog
        self._cursor: Cursor
        self._catalog, self._cursor = self._load()
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
            found = members.recognise(opened, degraded=degraded, keep=keep)
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

    @property
    def uris(self) -> Addresses:
        """Addresses of the members that are there, in order."""
        return [device.uri for device in present(self.devices)]

    @property
    def id(self) -> str:
        return self.superblock.volume_id.hex()

    @property
    def name(self) -> str:
        return self.superblock.name

    @property
    def stripe_bytes(self) -> int:
        return self.superblock.stripe_bytes

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

    def __repr__(self) -> str:
        return f"<volume {self.name or self.id} at {', '.join(self.uris)}>"

    # ---- what there is ----

    @property
    def sequence(self) -> int:
        """Sequence of the last commit that this reader has seen."""
        with self.lock:
            return self._catalog.sequence

    def refresh(self) -> bool:
        """Follow the log: some small reads. True where there are new commits."""
        self._check_open()
        with self.lock:
            if self._session is not None:
                return False  # This volume's own session is the only writer.
            before = self._catalog.sequence
            self.log.forget_chunks()
            followed = self.log.follow(self._cursor, self._catalog)
            if followed is Followed.MOVED:
                self._catalog, self._cursor = self._load()
            changed = self._catalog.sequence != before
            if changed:
                self._decoded.clear()
            return changed

    def _load(self) -> tuple[Catalog, Cursor]:
        """The log from its snapshot on. Where it is of an epoch that this reader does not know, the superblocks say
        which copies count now."""
        catalog, cursor = self.log.load()
        if cursor.header.epoch > self.superblock.log_epoch:
            self.look_again(self.devices, degraded=True)
            # Where this was the side that is given up, the numbers of blobs and tables are those of others now.
            self._blobs.clear()
            self._checksums.clear()
            self.log.nodes.clear()
            catalog, cursor = self.log.load()
        return catalog, cursor

    def list(self, prefix: str = "") -> ObjectList:
        """Objects whose name begins with `prefix`, by name."""
        self._check_open()
        with self.lock:
            return self._looked(lambda: [info_of(name, value) for name, value in objects_of(self._catalog, prefix)])

    def any(self, prefix: str) -> bool:
        """Is there an object whose name begins with `prefix`? Reads as far as the first."""
        self._check_open()
        with self.lock:
            return self._looked(lambda: next(objects_of(self._catalog, prefix), None) is not None)

    def listing(self, prefix: str = "") -> Listing:
        """Objects whose name begins with `prefix` as arrays, by name: for many at once. Reads only that range."""
        self._check_open()
        with self.lock:
            return self._looked(lambda: listing_of(self._catalog, prefix))

    def listings(self, prefix: str = "") -> Iterator[Listing]:
        """As `listing`, a piece of some thousand objects at a time, each read when it is asked for."""
        after: bytes | None = None
        while True:
            self._check_open()
            with self.lock:
                piece = self._looked(partial(self._piece, prefix, after))
            if not len(piece):
                return
            yield piece
            after = piece.text[piece.starts[-2] :]

    def _piece(self, prefix: str, after: bytes | None) -> Listing:
        return listing_of(self._catalog, prefix, after, _LISTED)

    def stat(self, name: str) -> ObjectInfo:
        """One object. ObjectNotFound."""
        return info_of(name, self._value(name))

    def __contains__(self, name: object) -> bool:
        self._check_open()
        with self.lock:
            return isinstance(name, str) and self._get(layout.object_key(name)) is not None

    def sequence_of(self, name: str) -> int | None:
        """Of the transaction that committed what has this name now; None where nothing has."""
        with self.lock:
            value = self._get(layout.object_key(name))
        return None if value is None else layout.ObjectHead.decode(value, name).sequence

    def _get(self, key: bytes) -> bytes | None:
        """What the catalogue has of a key. Holds the lock."""
        return self._looked(lambda: self._catalog.get(key))

    def _looked(self, look: Callable[[], Result]) -> Result:
        """Look into the catalogue. A table that was replaced and overwritten since it was learned of does not match its
        checksums; then there are other tables now. Holds the lock.
        """
        for _ in range(_LOOKS):
            births = self._catalog.births
            try:
                return look()
            except TableDamaged:
                self.refresh()
                if self._catalog.births == births:
                    raise
        return look()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the volume is closed", where=repr(self))

    def _value(self, name: str) -> bytes:
        self._check_open()
        with self.lock:
            value = self._get(layout.object_key(name))
        if value is None:
            raise ObjectNotFound(
                f"there is no object {name!r} in {self!r}", next_step="`headrace volume ls` lists what is there"
            )
        return value

    def stored(self, what: str | ObjectInfo) -> StoredObject:
        """An object with its blobs: where every byte of it lies. ObjectNotFound."""
        name = what if isinstance(what, str) else what.name
        with self.lock:
            stored = self._decoded.get(name)
            if stored is None:
                stored = self._decoded[name] = self._whole(name)
                while len(self._decoded) > _DECODED:
                    self._decoded.popitem(last=False)
        if not isinstance(what, str) and what.sequence != stored.value.sequence:
            raise ObjectNotFound("the object was replaced", where=f"object {name!r}", next_step="read it by name")
        return stored

    def _whole(self, name: str) -> StoredObject:
        """Holds the lock."""

        def look() -> StoredObject:
            value = ObjectValue.decode(self._value(name), name)
            return StoredObject(name, value, self._blob, self.stripe_bytes)

        return self.of_one_state(look)

    def of_one_state(self, look: Callable[[], Result]) -> Result:
        """An object and its blobs out of one state: looking for the second may make this reader follow the log, where
        neither may be any more. Holds the lock."""
        for _ in range(_LOOKS):
            sequence = self._catalog.sequence
            try:
                return look()
            except VolumeDamaged:
                if self._catalog.sequence == sequence:
                    raise
        raise VolumeDamaged("the log moves faster than it can be read", next_step="try again")

    def _blob(self, birth: int) -> StoredBlob:
        """A blob that has a key. Holds the lock."""
        blob = self._blobs.get(birth)
        if blob is None:
            value = self._get(layout.blob_key(birth))
            if value is None:
                raise VolumeDamaged("a blob that objects refer to is missing", where=f"blob {birth:#x} of {self!r}")
            blob = self._blobs[birth] = StoredBlob(layout.decode_blob(value, birth), self.stripe_bytes)
            while len(self._blobs) > _DECODED:
                self._blobs.popitem(last=False)
        return blob

    def forget_objects(self) -> None:
        """The catalog changed. For the session."""
        self._decoded.clear()

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
            findings = [*self._cursor.findings, *self.log.nodes.findings, *self._checksums.findings]
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
    ) -> VolumeTransfer:
        """Start to read byte ranges of one object, given by name or by its `ObjectInfo` (then it must be that very
        one).

        `offsets`, `lengths`: uint64[n], bytes in the object; `buffer_offsets`: uint64[n], where they go in
        `buffers[buffer_index]` (uint32[n], all 0 by default). Ranges may overlap; no Python runs per range or block.
        Reads are widened to whole checksum blocks and verified; `verify=False` waives that.

        UsageError where a range leaves the object or its buffer; ObjectNotFound; errors of the read come from `wait`.
        """
        return submit(self, self.stored(what), offsets, lengths, buffers, buffer_offsets, buffer_index, verify)

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

    @property
    def _session(self) -> Session | None:
        return None if self._begun is None else self._begun()

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

    def write_grant(self, grant: Grant, buffer: Buffer) -> Receipt:
        """Write an object's bytes where its grant says, until they are durable; any rank may, without a session.

        `buffer` must not change before this returns. The receipt goes back to the transaction that gave the grant.
        SessionLost where the session that gave the grant was taken over from.
        """
        self.check_writable()
        if grant.volume_id != self.superblock.volume_id:
            raise UsageError("the grant belongs to another volume", where=f"object {grant.name!r}")
        session = self._session
        if session is not None and session.number == grant.session:
            with session.lost_if_fenced():
                return write_grant(session.writing, grant, buffer)
        # What was joined is there for writing alone; else it goes beside what is read.
        devices = self._join(Ticket.from_json(grant.ticket)) if grant.ticket else lanes(self.devices, "checkpoint")
        with fence.lost_if_fenced():
            receipt = write_grant(devices, grant, buffer)
        space = [one for extents in (grant.data_extents(), *grant.table_extents()) for one in extents.used()]
        return replace(receipt, haunted=fence.haunted(devices, space))

    def check_writable(self) -> None:
        if self._closed:
            raise UsageError("the volume is closed")
        if not self.writable:
            raise UsageError("the volume is open for reading", next_step="open it with write=True")

    # ---- for the session ----

    def catalog_session(self) -> int:
        with self.lock:
            return self._catalog.session

    def mend_superblocks(self, devices: Sequence[BlockDevice]) -> None:
        if self._warnings:
            members.mend_superblocks(devices)
            self._warnings = []

    def look_again(self, devices: Sequence[BlockDevice], *, degraded: bool | None = None) -> members.Members:
        """Read the superblocks again: which copies of the log count now?"""
        degraded = self.degraded if degraded is None else degraded
        found = members.recognise(devices, degraded=degraded, keep=self.keep)
        with self.lock:
            self.superblock, self.lagging = found.superblock, epochs.lagging(found.superblock, found.blocks)
            self._warnings, self._notes = found.warnings, found.notes
            self.log.use(found.superblock, found.copies)
        return found

    def adopt_state(self, catalog: Catalog, writer: LogWriter, session: Session) -> None:
        """From now on the session moves this volume's state."""
        self._catalog, self._cursor, self._begun = catalog, writer.cursor, weakref.ref(session)
        self._decoded.clear()

    def end_session(self, writer: LogWriter) -> None:
        """The session is over: follow the log again from where it stopped."""
        with self.lock:
            self._cursor = writer.cursor
            self._begun = None

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
