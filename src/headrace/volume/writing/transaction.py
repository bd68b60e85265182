"""Transactions: everything or nothing, over any number of objects, ranks and members."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headrace.device import BlockDevice
from headrace.device.protocol import Buffer
from headrace.device.reference import U8
from headrace.errors import ObjectNotFound, UsageError, VolumeError
from headrace.volume import layout
from headrace.volume.catalog.bulk import Keys
from headrace.volume.catalog.changes import Changes, already_exists, check_none_exists, values_of
from headrace.volume.data.durable import Unflushed
from headrace.volume.data.extents import I64
from headrace.volume.data.names import check_checksum_block, check_length, check_name
from headrace.volume.data.objects import ObjectInfo, StoredObject, objects_of
from headrace.volume.layout import Blob, Rows
from headrace.volume.writing.allocation import Allocation, may_still_be_written
from headrace.volume.writing.compose import Composition, Part, whole_objects
from headrace.volume.writing.grant import Grant, Receipt
from headrace.volume.writing.names import Names
from headrace.volume.writing.pack import Pack, Packed, keys_of, ranges_of
from headrace.volume.writing.parts import Parts
from headrace.volume.writing.stream import write_stream
from headrace.volume.writing.write import BlobWriter, contiguous, members_of, write_grant

if TYPE_CHECKING:
    from headrace.volume.writing.session import Session

DEFAULT_CHECKSUM_BLOCK = 64 << 10
#: Bytes that a transaction keeps until its objects are flushed together.
KEPT_BYTES = 16 << 20


class Transaction:
    """Made by `Session.transaction`. Several threads may put objects at once. Its end is one thread's: from then on the
    others are refused, and what becomes of the space that they write to is settled when the last of them has come back.
    """

    def __init__(self, session: Session, number: int) -> None:
        self._session = session
        self.number = number
        #: By birth.
        self.allocations: dict[int, Allocation] = {}
        #: Blobs of committed objects that this transaction refers to, and the object that each was found in.
        self.sources: dict[int, tuple[Blob, str]] = {}
        self._deleted: list[str] = []
        #: New name -> old name.
        self._renamed: dict[str, str] = {}
        self._composed: dict[str, tuple[Rows, int]] = {}
        self._packs: list[Pack] = []
        self._unflushed = Unflushed()
        self.committing = False
        #: Its end has begun: nothing more is taken.
        self._ended = False
        #: The thread whose commit nothing stops any more.
        self._committer: int | None = None
        #: It is committed, or will not be.
        self._decided = False
        self._settled = False
        #: Calls of threads that are under way.
        self._calls = 0
        #: Guards these five, and is told when it is decided. Nothing else is taken while it is held.
        self._gate = threading.Condition(threading.Lock())
        self._sequence: int | None = None
        self._lock = threading.Lock()
        self._names = Names()
        #: Names that have no object any more, unless one is put.
        self._gone: set[str] = set()
        #: Bytes of the commit record so far.
        self._record_bytes = 0

    @property
    def sequence(self) -> int:
        """Of the durable commit record. UsageError before the commit."""
        if self._sequence is None:
            raise UsageError("the transaction is not committed")
        return self._sequence

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    @property
    def session(self) -> Session:
        return self._session

    def _open(self) -> None:
        if self._ended:
            raise UsageError("the transaction has ended")

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Something that changes it, on whichever thread: until that has come back, its space is nobody else's."""
        with self._gate:
            self._open()
            self._calls += 1
        try:
            yield
        finally:
            self._leave(1)

    def _leave(self, calls: int) -> None:
        with self._gate:
            self._calls -= calls
            last = self._decided and not self._calls and not self._settled
            self._settled |= last
        if last:
            self._settle()

    # ---- what it does ----

    def allocate(self, name: str, length_bytes: int, *, checksum_block_bytes: int = DEFAULT_CHECKSUM_BLOCK) -> Grant:
        """Space for one object that somebody else writes, with `Volume.write_grant`; `accept` takes the answer.

        VolumeFull before anything is written; ObjectExists; UsageError for a bad name or checksum block.
        """
        check_name(name)
        self.check_block(checksum_block_bytes)
        length_bytes = check_length(length_bytes)
        with self._call(), self._lock:
            self._check_new(name)
            allocation = self._session.allocate(self, name, length_bytes, checksum_block_bytes)
            grant = allocation.grant
            assert grant is not None
            self._register(allocation, 4 * grant.root_count + len(grant.runs) + len(grant.columns))
        return grant

    def check_block(self, checksum_block_bytes: int) -> None:
        """UsageError where blobs of this volume cannot have such checksum blocks."""
        check_checksum_block(checksum_block_bytes, self._session.volume.superblock.stripe_bytes)

    def begin(self, name: str, *, own: bool = True, pack: Packed | None = None) -> Allocation:
        """A blob without space yet. `own`: it is all of a new object; else objects get slices of it: `pack`, or `name`
        alone."""
        with self._lock:
            if own:
                self._check_new(name)
            allocation = Allocation(name, self._session.new_birth(), own, pack)
            self._register(allocation, 0)
        return allocation

    def _take_back(self, allocation: Allocation) -> None:
        """A blob that got no space: the transaction is as it was before `begin`."""
        with self._lock:
            del self.allocations[allocation.birth]
            if allocation.own:
                self._names.discard(allocation.name)
            self._record_bytes -= _entry_bytes(allocation.name)

    def _check_new(self, name: str, *, replace: bool = False) -> None:
        self._open()
        if name in self._names:
            raise UsageError("the transaction has this object already", where=f"object {name!r}")
        if not replace and name not in self._gone and name in self._session.volume:
            raise already_exists(name)
        self._session.check_room(self._record_bytes + len(name) * 4 + 4096)

    def _register(self, allocation: Allocation, entry_bytes: int) -> None:
        self.allocations[allocation.birth] = allocation
        if allocation.own:
            self._names.add(allocation.name)
        self._record_bytes += _entry_bytes(allocation.name) + entry_bytes

    def write(self, allocation: Allocation, data: U8, checksum_block_bytes: int, *, keep: Buffer | None = None) -> None:
        """All of a blob from this process's memory. It is flushed with others, until when its bytes are kept: `keep`,
        which nobody changes, or a copy; where they are too many for that, it is flushed at once.
        """
        session = self._session
        try:
            extents, tables = session.take_blob(allocation, len(data), checksum_block_bytes)
        except BaseException:
            self._take_back(allocation)
            raise
        kept = contiguous(keep, "") if keep is not None else data.copy() if len(data) <= KEPT_BYTES else data
        volume_id = session.volume.superblock.volume_id
        writer = BlobWriter(session.writing, extents, tables, kept, birth=allocation.birth, volume_id=volume_id)
        self.write_part(allocation, members_of(session.writing, extents, *tables), writer, len(data))
        allocation.written(data=extents, tables=tables, roots=writer.roots)
        if kept is data:
            # The caller's own bytes: also a flush that another thread has begun may need them once more.
            self._flush()
        self.bound_kept()

    def bound_kept(self) -> None:
        """Flush now, where more bytes are kept for it than may be."""
        if self._unflushed.kept_bytes > KEPT_BYTES:
            self._flush()

    def _flush(self) -> None:
        with self._session.lost_if_fenced():
            self._unflushed.flush()

    def write_part(
        self, allocation: Allocation, devices: Sequence[BlockDevice], write: Callable[[], None], kept_bytes: int
    ) -> None:
        """Run `write` now, and again where a lost association may have taken it along, until the next flush."""
        with self._session.lost_if_fenced():
            self._unflushed.write(allocation, devices, write, kept_bytes=kept_bytes)

    def withdraw(self, grant: Grant) -> None:
        """The grant was handed to nobody, and never will be: if the transaction aborts, its space is free at once."""
        with self._lock:
            allocation = self.allocations.get(grant.birth)
            if allocation is not None:
                allocation.granted = False

    def give_up(self, grant: Grant) -> None:
        """What this grant is for is not wanted any more, written or not: another object may have its name. Its space is
        free when the transaction has ended."""
        with self._call(), self._lock:
            allocation = self.allocations.get(grant.birth)
            if allocation is not None and allocation.own:
                allocation.own, allocation.given_up = False, True
                self._names.discard(allocation.name)

    def write_grant(self, grant: Grant, buffer: Buffer | Parts) -> Receipt:
        """On a thread of the session's own process. Nothing there refuses it when the session has become another host,
        so it keeps the transaction, and with that the host, until it has come back."""
        with self._call(), self._session.lost_if_fenced():
            return write_grant(self._session.writing, grant, buffer)

    def accept(self, receipt: Receipt) -> None:
        """A rank's answer: the bytes of its grant are durable. UsageError where it does not belong here."""
        with self._call(), self._lock:
            allocation = self.allocations.get(receipt.birth)
            grant = None if allocation is None else allocation.grant
            if (
                allocation is None
                or grant is None
                or (receipt.session, receipt.transaction) != (self._session.number, self.number)
                or (receipt.name, receipt.length_bytes) != (grant.name, grant.length_bytes)
                or len(receipt.roots) != 4 * grant.root_count
            ):
                raise UsageError(
                    "the receipt belongs to no grant of this transaction", where=f"object {receipt.name!r}"
                )
            data, tables = grant.data_extents(), grant.table_extents()
            allocation.written(data=data, tables=tables, roots=np.frombuffer(receipt.roots, "<u4"))
            if receipt.haunted:
                self._session.haunt(allocation.space)

    def put(self, name: str, data: Buffer, *, checksum_block_bytes: int = DEFAULT_CHECKSUM_BLOCK) -> None:
        """One object from this process's memory, which is the caller's again when this returns.

        Small objects of a transaction share one flush, at the commit: until then it keeps copies of their bytes, 16 MiB
        at most (`bytes` need no copy). UsageError, before space is taken, where the bytes are not in one piece.
        """
        check_name(name)
        self.check_block(checksum_block_bytes)
        view = contiguous(data, f"object {name!r}")
        keep = data if isinstance(data, bytes) else None
        with self._call():
            self.write(self.begin(name), view, checksum_block_bytes, keep=keep)

    def put_many(
        self,
        names: Iterable[str],
        data: Buffer,
        lengths: npt.ArrayLike,
        offsets: npt.ArrayLike | None = None,
        *,
        checksum_block_bytes: int = 4096,
    ) -> None:
        """Any number of objects at once, packed into one blob: object i is `data[offsets[i]:][:lengths[i]]`.

        `lengths`: whole numbers [n], or one for all; `offsets`: [n]; by default the objects lie one after another.
        All of `data` is written as it is, and takes space until the last of the objects is deleted; ranges may overlap.
        A read of one object reads whole checksum blocks: choose them no larger than the objects. UsageError for names,
        ranges and buffers that cannot be, ObjectExists and VolumeFull, before anything is written.
        """
        self.check_block(checksum_block_bytes)
        view = contiguous(data, "the data of put_many")
        listed = [*names]
        if not listed:
            return
        starts, sizes = ranges_of(len(listed), lengths, offsets, len(view))
        if not sizes.any():
            # Nothing would refer to the bytes: their space would be nobody's.
            data = b""
            view = contiguous(data, "")
        keys, ordered = keys_of(listed)
        if not ordered:
            order = sorted(range(len(keys.each)), key=keys.each.__getitem__)
            keys = Keys.of([keys.each[i] for i in order])
            starts, sizes = starts[order], sizes[order]
        with self._call():
            self._put_pack(listed, keys, sizes, starts, data, view, checksum_block_bytes)

    def _put_pack(
        self, listed: list[str], keys: Keys, sizes: I64, starts: I64, data: Buffer, view: U8, checksum_block_bytes: int
    ) -> None:
        packed = Packed(keys.each, sizes)
        record_bytes = 72 * len(keys.each) + len(keys.text)
        with self._lock:
            for name in self._names.shared_with(listed, keys.each):
                raise UsageError("the transaction has this object already", where=f"object {name!r}")
            with self._session.lock:
                gone = {layout.object_key(name) for name in self._gone}
                new = [key for key in keys.each if key not in gone] if gone else keys.each
                check_none_exists(self._session.catalog, new)
            self._session.check_room(self._record_bytes + record_bytes)
            self._names.add_many(listed, keys.each)
            self._record_bytes += record_bytes
        try:
            allocation = self.begin(f"{listed[0]} and {len(listed) - 1} more", own=False, pack=packed)
            self.write(allocation, view, checksum_block_bytes, keep=data if isinstance(data, bytes) else None)
        except BaseException:
            with self._lock:
                self._names.discard_many(listed, keys.each)
                self._record_bytes -= record_bytes
            raise
        self._packs.append(Pack(keys, starts, sizes, allocation.birth, time.time_ns()))

    def compose(
        self,
        name: str,
        parts: Iterable[Part],
        *,
        checksum_block_bytes: int = DEFAULT_CHECKSUM_BLOCK,
        replace: bool = False,
    ) -> int:
        """One object of ranges of committed objects, and of new bytes; returns its length.

        A part is `(what, offset, length)`, bytes of an object given by name or `ObjectInfo` (length None: to its end),
        or a buffer, or a function that gives one when its turn comes. Ranges are not copied: their blobs are shared,
        and live until the last object that has bytes of them is deleted. Reading verifies whole checksum blocks of
        them. Names are those of committed objects, also where this transaction deletes them.

        `checksum_block_bytes`: of the new bytes. `replace`: an object that has this name gives way, if nothing is
        raised. ObjectNotFound; UsageError for a range that leaves its object, or too many parts.
        """
        check_name(name)
        self.check_block(checksum_block_bytes)
        composition = Composition(self, name, checksum_block_bytes)
        with self._call():
            with self._lock:
                self._check_new(name, replace=replace)
                self._names.add(name)
            try:
                slices = composition.resolve(parts)
            except BaseException:
                with self._lock:
                    self._names.discard(name)
                raise
            with self._lock:
                if name not in self._gone and name in self._session.volume:
                    self._let_go(name, "replace")
                    self._deleted.append(name)
                self._composed[name] = slices, time.time_ns()
                self._record_bytes += _entry_bytes(name) + slices.nbytes
        return sum(slices["length"].tolist())

    def compose_whole(
        self, objects: Sequence[ObjectInfo], names: Iterable[str], *, replace: Container[str] = frozenset()
    ) -> None:
        """Each of these committed objects under one more name: as `compose` of all of it, for many at once. `replace`:
        names whose objects give way. ObjectNotFound, ObjectExists and UsageError before anything of it is taken.
        """
        listed = [*names]
        if len(listed) != len(objects):
            raise UsageError("one name for each object", expected=str(len(objects)), found=str(len(listed)))
        if not listed:
            return
        keys = sorted(keys_of(listed)[0].each)
        with self._call(), self._lock:
            for name in self._names.shared_with(listed, keys):
                raise UsageError("the transaction has this object already", where=f"object {name!r}")
            with self._session.lock:
                gone = {layout.object_key(name) for name in self._gone}
                there = [key for key in values_of(self._session.catalog, keys) if key not in gone]
                for old in map(layout.name_of, there):
                    if old not in replace:
                        raise already_exists(old)
                slices, blobs = whole_objects(self._session.volume, self._session.catalog, objects)
                record_bytes = sum(map(_entry_bytes, listed)) + sum(rows.nbytes for rows in slices)
                self._session.check_room(self._record_bytes + record_bytes)
                new = {birth: found for birth, found in blobs.items() if birth not in self.sources}
                self._session.pin([blob for blob, _ in new.values()])
                self.sources.update(new)
            for old in map(layout.name_of, there):
                self._let_go(old, "replace")
                self._deleted.append(old)
            self._names.add_many(listed, keys)
            self._composed.update(zip(listed, zip(slices, repeat(time.time_ns())), strict=True))
            self._record_bytes += record_bytes

    def find(self, what: str | ObjectInfo) -> StoredObject:
        """A committed object that is to be shared: its blobs stay where they are until this transaction ends."""
        with self._session.lock:
            self._open()
            stored = self._session.volume.stored(what)
            blobs = [blob.entry for blob in stored.blobs if blob.entry.birth not in self.sources]
            self._session.pin(blobs)
            self.sources.update({blob.birth: (blob, stored.name) for blob in blobs})
        return stored

    def write_stream(
        self,
        name: str,
        buffers: Iterable[Buffer],
        *,
        length_bytes: int | None = None,
        checksum_block_bytes: int = DEFAULT_CHECKSUM_BLOCK,
    ) -> int:
        """One object from buffers that come one after another; returns its length in bytes.

        Memory is bounded by one staging buffer (some stripes for each member), whatever the length. With `length_bytes`
        the space is taken first, so that VolumeFull comes before any data is written, and another length is a
        UsageError.
        """
        check_name(name)
        self.check_block(checksum_block_bytes)
        if length_bytes is not None:
            length_bytes = check_length(length_bytes)
        with self._call():
            allocation = self.begin(name)
            return write_stream(self, allocation, buffers, length_bytes=length_bytes, block_bytes=checksum_block_bytes)

    def delete(self, name: str) -> None:
        """The object ends with this transaction; its space is used again, last, once that is durable, unless other
        objects share it.
        """
        with self._call(), self._lock:
            self._let_go(name, "delete")
            self._deleted.append(name)

    def delete_prefix(self, prefix: str) -> int:
        """Delete every object whose name begins with `prefix`; returns how many. UsageError for an empty one."""
        if not prefix:
            raise UsageError("the prefix of what is to be deleted is empty", next_step="name what to delete")
        with self._call(), self._lock:
            with self._session.lock:
                found = [name for name, _ in objects_of(self._session.catalog, prefix) if name not in self._gone]
            self._gone.update(found)
            self._deleted.extend(found)
            self._record_bytes += sum(24 + len(name.encode()) for name in found)
        return len(found)

    def rename(self, old: str, new: str) -> None:
        """The object `old` is called `new` from this transaction on; no byte of it moves. ObjectNotFound, ObjectExists
        (where `new` is not deleted before).
        """
        check_name(new)
        with self._call(), self._lock:
            self._check_new(new)
            self._let_go(old, "rename")
            self._names.add(new)
            self._renamed[new] = old
            self._record_bytes += 256 + len(new.encode())

    def _let_go(self, name: str, what: str) -> None:
        if name in self._gone or name not in self._session.volume:
            raise ObjectNotFound(
                f"there is no object {name!r} to {what}", next_step="`headrace volume ls` lists what is there"
            )
        self._gone.add(name)
        self._record_bytes += 80 + len(name.encode())

    # ---- its end ----

    def collect(self, changes: Changes, sequence: int) -> None:
        """Tell what is to change. For the session. VolumeError where something is not written yet."""
        changes.delete(self._deleted)
        for new, old in self._renamed.items():
            changes.rename(old, new)
        for blob, holder in self.sources.values():
            changes.offer(blob, holder)
        for allocation in self.allocations.values():
            if allocation.given_up:
                continue
            if allocation.blob is None or may_still_be_written(allocation):
                raise VolumeError(
                    "a grant was not answered" if allocation.grant is not None else "an object was not written",
                    where=f"object {allocation.name!r}",
                    next_step="accept the receipt of every grant before the transaction ends",
                )
            if allocation.own:
                changes.put_blob(allocation.name, allocation.blob, allocation.created_ns)
            else:
                changes.offer(allocation.blob)
        for name, (slices, created_ns) in self._composed.items():
            changes.put_slices(name, slices, created_ns)
        for pack in self._packs:
            changes.put_packed(pack.bulk(sequence), pack.birth, pack.slice_count)

    def commit(self) -> int:
        """Everything becomes visible and durable, or nothing does; returns the sequence. Aborts where it raises.

        UsageError where another thread still puts something: what that would be part of, nobody could say.
        """
        with self._gate:
            self._open()
            self._ended = True
            others = self._calls
            self._calls += 1
        try:
            if others:
                raise UsageError(
                    "another thread still writes in this transaction",
                    found=f"{others} call{'s' if others > 1 else ''} under way",
                    next_step="commit when all of them have come back",
                )
            self._flush()
            self._sequence = self._session.commit(self)
        finally:
            with self._gate:
                self._decided = True
                self._gate.notify_all()
            self._leave(1)
        return self._sequence

    def abort(self) -> None:
        """Nothing of it is ever visible. Space that a command may still reach is not used again by this session.

        Where it has ended, this does nothing. Where another thread is in the middle of its commit, this waits for what
        becomes of it: UsageError where it is committed.
        """
        with self._gate:
            self._ended = True
            late = self._committer is not None and not self._decided
            if late and self._committer == threading.get_ident():
                raise UsageError("the transaction is being committed by this very thread")
            while late and not self._decided:
                self._gate.wait()
            self._decided = True
        self._leave(0)
        if late and self._sequence is not None:
            raise UsageError(
                "the transaction was committed before it could be aborted",
                found=f"commit {self._sequence}",
                next_step="delete what it put in another transaction",
            )

    def abandon(self) -> None:
        """Abort, for who may wait for nothing, as a finaliser: it is done with the session's next call."""
        self._session.abandoned.append(self)

    def check_not_aborted(self) -> None:
        """UsageError where another thread has ended it meanwhile; from then on no other can. For the session, before it
        commits."""
        with self._gate:
            if self._decided:
                raise UsageError("the transaction was aborted while it was committed")
            self._committer = threading.get_ident()

    def _settle(self) -> None:
        """Nobody does anything more in it."""
        if self._sequence is None and self.committing:
            # The record may be durable: its space belongs to whoever reads the log next.
            for allocation in self.allocations.values():
                allocation.begin()
        self._session.ended(self)

    @property
    def growing(self) -> bool:
        """It adds to the catalogue."""
        return bool(self.allocations or self._renamed or self._composed)


def _entry_bytes(name: str) -> int:
    """What an object takes in the record, about, besides its slices or checksums."""
    return 128 + len(name.encode())
