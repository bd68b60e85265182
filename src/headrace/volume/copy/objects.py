"""The end of a copy that is in a volume."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.device import crc32c, flush_all
from headrace.device.reference import U8
from headrace.errors import ChecksumMismatch, DeviceError, HeadraceError, ObjectNotFound, VolumeDamaged
from headrace.volume import layout
from headrace.volume.copy.files import ItemError
from headrace.volume.copy.plan import CopyOptions, CopyReport, Item, Plan, comes_last, place_of
from headrace.volume.data.durable import ATTEMPTS, lost_since
from headrace.volume.many import read_many
from headrace.volume.writing.grant import Receipt
from headrace.volume.writing.write import members_of, write_extents, write_table

if TYPE_CHECKING:
    from headrace.volume.volume import Volume
    from headrace.volume.writing.session import Session
    from headrace.volume.writing.transaction import Transaction

#: Bytes with one checksum, of packed files: a reader of one of them reads little else.
_PACKED_BLOCK = 4096
#: What is wrong with one object, and says nothing about others.
_OF_ONE_OBJECT = (ChecksumMismatch, VolumeDamaged, ObjectNotFound)


class ObjectReader:
    """One large object."""

    def __init__(self, volume: Volume, item: Item) -> None:
        self._volume = volume
        self._item = item

    def read_into(self, offset: int, buffer: U8) -> None:
        try:
            self._volume.submit_read(self._item.what, [offset], [len(buffer)], [buffer], [0]).wait()
        except _OF_ONE_OBJECT as error:
            raise ItemError(self._item, str(error)) from error

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class ObjectSource:
    """Committed objects; every block is verified."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume

    def open(self, item: Item) -> ObjectReader:
        return ObjectReader(self._volume, item)

    def read_pack(self, items: Sequence[Item], offsets: Sequence[int], buffer: U8) -> list[ItemError | None]:
        try:
            read_many(self._volume, [item.what for item in items], offsets, buffer)
            return [None] * len(items)
        except _OF_ONE_OBJECT:
            # One by one, to find out which.
            pass
        under_way: list[Any] = []
        for item, offset in zip(items, offsets, strict=True):
            part = buffer[offset : offset + item.length]
            try:
                under_way.append(self._volume.submit_read(item.what, [0], [item.length], [part], [0]))
            except _OF_ONE_OBJECT as error:
                under_way.append(ItemError(item, str(error)))
        result: list[ItemError | None] = []
        trouble: HeadraceError | None = None
        for item, one in zip(items, under_way, strict=True):
            if isinstance(one, ItemError):
                result.append(one)
                continue
            try:
                one.wait()
            except _OF_ONE_OBJECT as error:
                result.append(ItemError(item, str(error)))
            except HeadraceError as error:
                trouble = trouble or error
            else:
                result.append(None)
        if trouble is not None:
            raise trouble
        return result


class ObjectWriter:
    """One large object, from pieces of any thread. `write` begins and ends at checksum blocks, but for the end."""

    def __init__(self, sink: ObjectSink, item: Item) -> None:
        self._sink = sink
        self._item = item
        self._transaction = sink.transaction()
        self._failed = False
        try:
            sink.delete_first(self._transaction, [item.target])
            self._grant = self._transaction.allocate(
                item.target, item.length, checksum_block_bytes=sink.options.checksum_block_bytes
            )
        except BaseException:
            sink.dropped(self._transaction)
            raise
        self._devices = sink.session.writing
        self._data, self._tables = self._grant.data_extents(), self._grant.table_extents()
        self._members = members_of(self._devices, self._data, *self._tables)
        self._before = [device.loss_count() for device in self._members]
        self._checksums = np.zeros(self._grant.block_count, np.uint32)

    def write(self, offset: int, data: U8) -> None:
        first = offset // self._grant.checksum_block_bytes
        count = -(-len(data) // self._grant.checksum_block_bytes)
        sums = self._checksums[first : first + count]
        try:
            with self._sink.session.lost_if_fenced():
                write_extents(
                    self._devices, self._data, data, sums,
                    birth=self._grant.birth, volume_id=self._grant.volume_id, start=offset,
                )  # fmt: skip
        except BaseException:
            self._failed = True
            raise

    def finish(self, reader: Any) -> None:
        """Until it is durable: where an association was lost meanwhile, the same bytes are read and written again."""
        grant = self._grant
        try:
            for attempt in range(ATTEMPTS):
                if attempt:
                    self._before = [device.loss_count() for device in self._members]
                    self._again(reader)
                with self._sink.session.lost_if_fenced():
                    roots = write_table(
                        self._devices, self._tables, self._checksums, birth=grant.birth, volume_id=grant.volume_id
                    )
                    flush_all(self._members)
                if not lost_since(self._members, self._before):
                    break
            else:
                raise DeviceError(
                    "the device lost its connection during every attempt to write",
                    where=", ".join(device.uri for device in self._members),
                )
        except BaseException:
            self._failed = True
            raise
        reader.check()
        self._transaction.accept(
            Receipt(
                session=grant.session,
                transaction=grant.transaction,
                name=grant.name,
                birth=grant.birth,
                length_bytes=grant.length_bytes,
                roots=roots.astype("<u4").tobytes(),
            )
        )
        self._sink.done(self._transaction, self._item)

    def _again(self, reader: Any) -> None:
        """A late write of the first attempt may still land: only the very same bytes may follow it."""
        block = self._grant.checksum_block_bytes
        buffer = np.empty(max(1, (4 << 20) // block) * block, np.uint8)
        for offset in range(0, self._item.length, len(buffer)):
            piece = buffer[: min(len(buffer), self._item.length - offset)]
            reader.read_into(offset, piece)
            for at in range(0, len(piece), block):
                index = (offset + at) // block
                seed = layout.place_seed(self._grant.volume_id, self._grant.birth, index)
                if crc32c(piece[at : at + block].tobytes(), seed) != int(self._checksums[index]):
                    raise ItemError(self._item, "changed while it was copied")
            self.write(offset, piece)

    def abandon(self) -> None:
        if not self._failed:
            # Every write has been answered, so none is under way.
            self._transaction.withdraw(self._grant)
        self._sink.dropped(self._transaction)


class ObjectSink:
    """New objects of a session: in one transaction, or in one for each pack and each large object. Of these, those of
    what comes last are committed when all others are, in their order: the latest checkpoint of a run is the one that
    was committed last."""

    def __init__(self, session: Session, options: CopyOptions, replaced: set[str]) -> None:
        self.session = session
        self.options = options
        self._replaced = replaced
        self._lock = threading.Lock()
        self._shared = None if options.keep_going else session.transaction()
        self._held: list[tuple[tuple[int, str], Transaction]] = []
        self._sequences: list[int] = []

    def transaction(self) -> Transaction:
        return self._shared if self._shared is not None else self.session.transaction()

    def delete_first(self, transaction: Transaction, names: Sequence[str]) -> None:
        for name in names:
            if name in self._replaced:
                transaction.delete(name)

    def done(self, transaction: Transaction, first: Item) -> None:
        """`first`: of the items in it."""
        if transaction is self._shared:
            return
        if comes_last(first, self.options):
            with self._lock:
                self._held.append((place_of(first), transaction))
            return
        sequence = transaction.commit()
        with self._lock:
            self._sequences.append(sequence)

    def dropped(self, transaction: Transaction) -> None:
        if transaction is not self._shared:
            transaction.abort()

    def open(self, item: Item) -> ObjectWriter:
        return ObjectWriter(self, item)

    def write_pack(self, items: Sequence[Item], offsets: Sequence[int], buffer: U8) -> list[ItemError | None]:
        transaction = self.transaction()
        try:
            names = [item.target for item in items]
            self.delete_first(transaction, names)
            transaction.put_many(
                names,
                buffer,
                [item.length for item in items],
                offsets,
                checksum_block_bytes=min(_PACKED_BLOCK, self.options.checksum_block_bytes),
            )
            self.done(transaction, items[0])
        except BaseException:
            self.dropped(transaction)
            raise
        return [None] * len(items)

    def commit(self) -> list[int]:
        if self._shared is not None:
            self._sequences.append(self._shared.commit())
        self._held.sort(key=lambda one: one[0])
        while self._held:
            # One that is committed, or was to be, is not aborted.
            _, transaction = self._held.pop(0)
            self._sequences.append(transaction.commit())
        return self._sequences

    def abort(self) -> None:
        if self._shared is not None:
            self._shared.abort()
        for _, transaction in self._held:
            transaction.abort()


def _shared(transaction: Transaction, plan: Plan, item: Item) -> bool:
    """What is there gives way only to what could be composed."""
    try:
        transaction.compose(item.target, [(item.what, 0, item.length)], replace=item.target in plan.replaced)
        return True
    except _OF_ONE_OBJECT as error:
        plan.refuse(item.source, str(error))
        if not plan.options.keep_going:
            raise
        return False


def share(session: Session, plan: Plan) -> CopyReport:
    """Objects of the session's own volume under more names: slices of the same blobs, in one commit.

    With `keep_going` objects that are gone, or that cannot be composed, are named, and the others are copied.
    """
    started = time.monotonic()
    report = plan.report
    report.shared = True
    if not plan.items:
        return report
    with session.transaction() as transaction:
        try:
            transaction.compose_whole(
                [item.what for item in plan.items], [item.target for item in plan.items], replace=plan.replaced
            )
            shared = plan.items
        except _OF_ONE_OBJECT:
            # One by one, to find out which.
            shared = [item for item in plan.items if _shared(transaction, plan, item)]
        report.files += len(shared)
        report.bytes += sum(item.length for item in shared)
    report.sequences.append(transaction.sequence)
    report.seconds = time.monotonic() - started
    return report
