"""What a volume holds, as a reader sees it: one committed state after another, looked up or listed.

It follows the log, and looks into the catalogue behind it. What was decoded last is kept.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from headrace.device import BlockDevice
from headrace.errors import DeviceTimeout, MemberMissing, ObjectNotFound, UsageError, VolumeDamaged
from headrace.volume import layout
from headrace.volume.catalog.catalog import Catalog
from headrace.volume.catalog.commit import LogWriter
from headrace.volume.catalog.listing import Listing, listing_of
from headrace.volume.catalog.log import Cursor, Followed, LogReader
from headrace.volume.catalog.sides import recognise
from headrace.volume.catalog.tables import TableDamaged
from headrace.volume.data.absent import present
from headrace.volume.data.checksums import ChecksumCache
from headrace.volume.data.objects import ObjectInfo, StoredBlob, StoredObject, info_of, objects_of, replaced
from headrace.volume.data.patience import left_s
from headrace.volume.follow import INTERVAL_S, LONGEST_S, Deadline, Pace, Watch, follow, wait_for
from headrace.volume.layout import Blob, ObjectValue, Superblock
from headrace.volume.media import epochs, members

if TYPE_CHECKING:
    from headrace.volume.writing.session import Session

#: `Contents.list` hides the builtin inside of the class.
Addresses: TypeAlias = list[str]
ObjectList: TypeAlias = list[ObjectInfo]
Result = TypeVar("Result")

#: A reader that is overtaken by so many rounds of merges gives up.
_LOOKS = 8
#: Objects of one piece of a listing, or some more.
_LISTED = 4096
#: Objects, and blobs with their extents, that are kept decoded.
_DECODED = 1024


class Contents:
    """The part of a `Volume` that knows what is there. Thread-safe."""

    def __init__(self, found: members.Members, *, degraded: bool, keep: int | None) -> None:
        #: In order; an `AbsentMember` where one is missing.
        self.devices: list[BlockDevice] = found.devices
        self.superblock: Superblock = found.superblock
        #: Members may be missing.
        self.degraded = degraded
        #: The member whose history goes on, where members went on without each other.
        self.keep = keep
        #: Guards catalog and cursor; never held while waiting for a session.
        self.lock = threading.RLock()
        self.log = LogReader(self.superblock, self.devices, found.copies)
        self._closed = False
        self._warnings = found.warnings
        self._notes = found.notes
        #: Members that were away when the current epoch of the log began.
        self.lagging = epochs.lagging(found.superblock, found.blocks)
        #: There is another history: that of a member whose side is given up.
        self.other_side = bool(found.given_up)
        self._checksums = ChecksumCache(self.devices, self.superblock.volume_id)
        self._decoded: OrderedDict[str, StoredObject] = OrderedDict()
        self._watch = Watch()
        #: Another epoch was met, and its log could not be read yet: what this reader has may be of another history.
        self._adrift = False
        #: By birth, so not stale as long as there is one history (`_go_on_from`).
        self._blobs: OrderedDict[int, StoredBlob] = OrderedDict()
        #: Dropped without `close`, it ends: so nothing here keeps it.
        self._begun: weakref.ref[Session] | None = None
        self._catalog: Catalog
        self._cursor: Cursor
        self._catalog, self._cursor = self._load()

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

    def __repr__(self) -> str:
        return f"<volume {self.name or self.id} at {', '.join(self.uris)}>"

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
            before = self._catalog.sequence, self._cursor.header.epoch
            self.log.forget_chunks()
            followed = Followed.MOVED if self._adrift else self.log.follow(self._cursor, self._catalog)
            if followed is Followed.MOVED:
                self._go_on_from(*self._load())
            # Another history may have come as far.
            changed = (self._catalog.sequence, self._cursor.header.epoch) != before
            if changed:
                self._decoded.clear()
            return changed

    def poll(self) -> bool:
        """`refresh`, for who looks often: as long as nothing happens it costs two small reads."""
        self._check_open()
        with self.lock:
            quiet = self._session is None and not self._adrift
            if quiet and self._watch.quiet(self.log, self._cursor, self._catalog.session):
                return False
            return self.refresh()

    def follow(
        self, *, timeout_s: float | None = None, interval_s: float = INTERVAL_S, longest_s: float = LONGEST_S
    ) -> Iterator[int]:
        """The sequence of each state that this reader comes to, as they come: `for sequence in volume.follow(): ...`.

        Looks after about `interval_s`, ever more rarely while nothing happens, up to about `longest_s`; each wait is up
        to half shorter or longer, by chance, so that many readers do not come at once. States in between may be passed
        over. Ends when nothing came for `timeout_s` (None: never), and raises what `refresh` does; it may be called
        again then, and misses nothing.
        """
        return follow(self, self.sequence, Pace(interval_s, longest_s), Deadline(timeout_s))

    def wait_for(
        self,
        name: str,
        *,
        timeout_s: float | None = None,
        interval_s: float = INTERVAL_S,
        longest_s: float = LONGEST_S,
    ) -> ObjectInfo:
        """The object `name`, once it is committed: looks as `follow` does. ObjectNotFound after `timeout_s`."""
        return wait_for(self, name, Pace(interval_s, longest_s), Deadline(timeout_s))

    def _load(self) -> tuple[Catalog, Cursor]:
        """The log from its snapshot on. Where it is of an epoch that this reader does not know, the superblocks say
        which copies count now."""
        catalog, cursor = self.log.load()
        if self._adrift or cursor.header.epoch > self.superblock.log_epoch:
            self._adrift = True
            self.look_again(self.devices, degraded=True, met=cursor)
            catalog, cursor = self.log.load()
            self._adrift = False
        return catalog, cursor

    def _go_on_from(self, catalog: Catalog, cursor: Cursor) -> None:
        """Holds the lock."""
        if cursor.header.epoch != self._cursor.header.epoch:
            # Where this was the side that is given up, the numbers of blobs and tables are those of others now.
            self._blobs.clear()
            self._checksums.clear()
            self.log.nodes.clear()
        self._catalog, self._cursor = catalog, cursor
        self._decoded.clear()

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
        """An object with its blobs: where every byte of it lies. ObjectNotFound; DeviceTimeout where this thread waits
        no longer (`headrace.volume.data.patience`)."""
        name = what if isinstance(what, str) else what.name
        if not self.lock.acquire(timeout=left_s()):
            raise DeviceTimeout(
                "another thread looks into the catalogue, and does not come to its end", where=repr(self)
            )
        try:
            stored = self._decoded.get(name)
            if stored is None:
                stored = self._decoded[name] = self._whole(name)
                while len(self._decoded) > _DECODED:
                    self._decoded.popitem(last=False)
        finally:
            self.lock.release()
        if not isinstance(what, str) and what.sequence != stored.value.sequence:
            raise replaced(name)
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

    def blob(self, birth: int) -> Blob:
        """One that has a key of its own. VolumeDamaged where there is none."""
        with self.lock:
            return self._blob(birth).entry

    def forget_objects(self) -> None:
        """The catalog changed. For the session."""
        self._decoded.clear()

    # ---- for the session ----

    @property
    def _session(self) -> Session | None:
        return None if self._begun is None else self._begun()

    def catalog_session(self) -> int:
        with self.lock:
            return self._catalog.session

    def mend_superblocks(self, devices: Sequence[BlockDevice]) -> None:
        if self._warnings:
            members.mend_superblocks(devices)
            self._warnings = []

    def look_again(
        self, devices: Sequence[BlockDevice], *, degraded: bool | None = None, met: Cursor | None = None
    ) -> members.Members:
        """Read the superblocks again: which copies of the log count now? `met`: so far a log has come. MemberMissing
        where those that can be read were left behind by that, and their log was, too."""
        degraded = self.degraded if degraded is None else degraded
        found = recognise(devices, degraded=degraded, keep=self.keep)
        if met is not None and found.superblock.log_epoch < met.header.epoch:
            # A copy that was being rebuilt when the one that it was rebuilt from was lost has that log.
            _, there = LogReader(found.superblock, devices, found.copies).load()
            if (there.header.epoch, there.sequence) < (met.header.epoch, met.sequence):
                raise MemberMissing(
                    "the log went on without those members that can be read now",
                    where=", ".join(self.uris),
                    expected=f"a superblock of epoch {met.header.epoch}, as the log is",
                    found="; ".join([f"epoch {found.superblock.log_epoch}", *found.notes]),
                    next_step="look again when the others are back",
                )
        with self.lock:
            self.superblock, self.lagging = found.superblock, epochs.lagging(found.superblock, found.blocks)
            self._warnings, self._notes = found.warnings, found.notes
            self.other_side = bool(found.given_up)
            self.log.use(found.superblock, found.copies)
        return found

    def adopt_state(self, catalog: Catalog, writer: LogWriter, session: Session) -> None:
        """From now on the session moves this volume's state."""
        self._go_on_from(catalog, writer.cursor)
        self._begun = weakref.ref(session)

    def end_session(self, writer: LogWriter) -> None:
        """The session is over: follow the log again from where it stopped."""
        with self.lock:
            self._cursor = writer.cursor
            self._begun = None
