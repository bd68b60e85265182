"""What the log adds up to: an ordered map from keys to values, the sessions and their windows, as of one record.

    recent changes     in memory: what the log said since the last table        newest
    tables             newest first, each read where it is looked into             |
                                                                                   v
The first that says something of a key is right. So opening a volume reads the end of the log and no table, a look-up
one path of nodes in each table, and a listing the leaves of its range. Whoever writes loads all tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from headrace.device import BlockDevice
from headrace.errors import VolumeDamaged
from headrace.volume import layout
from headrace.volume.catalog.columns import Columns, live
from headrace.volume.catalog.tables import NodeStore, Table, merged
from headrace.volume.catalog.tables.merge import Batch, batches
from headrace.volume.catalog.tables.table import Image
from headrace.volume.data.objects import Range
from headrace.volume.layout import Operation, Record, Root, SessionEntry, Tables, TablesChanged, Totals

#: Entries of one SNAPSHOT record together; bounds what is held encoded at a time.
SNAPSHOT_RECORD_BYTES = 1 << 20

#: Tables of at most this, both copies together, are read and compared by every session that opens.
CHECKED_BYTES = 16 << 20

#: What the log said since the last table; None: deleted.
Recent = dict[bytes, bytes | None]


def merge(ranges: list[Range]) -> list[Range]:
    """The same space, sorted, without overlaps."""
    result: list[Range] = []
    for member, offset, length in sorted(ranges):
        if result and result[-1][0] == member and offset <= result[-1][1] + result[-1][2]:
            end = max(result[-1][1] + result[-1][2], offset + length)
            result[-1] = (member, result[-1][1], end - result[-1][1])
        else:
            result.append((member, offset, length))
    return result


def cover(ranges: Sequence[Range], limit: int) -> list[Range]:
    """At most `limit` ranges (or one a member) that have all of these in them, and as little else as can be."""
    merged_ranges = merge(list(ranges))
    if len(merged_ranges) <= limit:
        return merged_ranges
    rows = np.array(merged_ranges, np.int64)
    ends = rows[:, 1] + rows[:, 2]
    gaps = np.where(rows[1:, 0] == rows[:-1, 0], rows[1:, 1] - ends[:-1], np.iinfo(np.int64).max)
    # The smallest gaps are closed.
    many = min(len(rows) - limit, int(np.count_nonzero(gaps < np.iinfo(np.int64).max)))
    kept = np.ones(len(rows), bool)
    kept[1 + np.argsort(gaps, kind="stable")[:many]] = False
    first = np.flatnonzero(kept)
    last = np.concatenate((first[1:], [len(rows)])) - 1
    return [
        (int(rows[low, 0]), int(rows[low, 1]), int(ends[high] - rows[low, 1]))
        for low, high in zip(first, last, strict=True)
    ]


class Catalog:
    """The state behind the log, advanced record by record. It does not look into keys and values. Not thread-safe: its
    volume's lock guards it.
    """

    def __init__(self, version: int = layout.VERSION, store: NodeStore | None = None) -> None:
        self.version = version
        self.store = NodeStore((), b"") if store is None else store
        self.recent: Recent = {}
        #: Bytes of `recent`, encoded.
        self.recent_bytes = 0
        #: Newest first.
        self.tables: list[Table] = []
        #: Tables that are on their way into the catalogue, as the writer has them in memory.
        self.images: dict[int, Image] = {}
        self.totals = Totals(0, 0)
        #: Number of the last commit.
        self.sequence = 0
        #: Number of the last session that opened.
        self.session = 0
        self.last_session: SessionEntry | None = None
        #: Session -> the space that a command of it may still be on its way to.
        self.windows: dict[int, list[Range]] = {}

    # ---- looking ----

    def get(self, key: bytes) -> bytes | None:
        """The value of a key; None where there is none. TableDamaged, DeviceError."""
        if key in self.recent:
            return self.recent[key]
        for table in self.tables:
            known, value = table.get(key)
            if known:
                return value
        return None

    def scan(self, first: bytes, end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Keys from `first` on, below `end`, in order, with their values, as of now. Only the range is read, and only
        as far as somebody asks."""
        for keys, values in self.batches(first, end):
            for key, value in zip(keys, values, strict=True):
                if end is not None and key >= end:
                    return
                if value is not None:
                    yield key, value

    def layers(self, first: bytes = b"", end: bytes | None = None) -> list[Iterator[Batch]]:
        """Everything from `first` on, newest first, deletions included; what is beyond `end` may come."""
        keys = sorted(key for key in self.recent if key >= first and (end is None or key < end))
        recent: Batch = keys, [self.recent[key] for key in keys]
        return [iter([recent]), *(batches(table.leaves(first, end), first) for table in self.tables)]

    def batches(self, first: bytes, end: bytes | None = None) -> Iterator[Batch]:
        """As `layers`, as one."""
        return merged(self.layers(first, end))

    def columns(self) -> Iterator[Columns]:
        """All entries, in no order, as arrays."""
        return live(self.tables, self.recent)

    def load_tables(self, copy: int = 0) -> None:
        """All tables into memory, verified, from this copy where it is good: for whoever writes."""
        for table in self.tables:
            if table.image is None:
                table.image = table.load(copy)

    def mend_tables(self, devices: Sequence[BlockDevice], *, everything: bool = False) -> None:
        """Write what a copy of a table lacks again. Both copies of all tables are read where they are small, or
        `everything` is asked for; else of those that are known to be bad.
        """
        everything |= self.table_bytes <= CHECKED_BYTES
        for table in self.tables:
            if table.image is not None and (everything or self.store.suspect(table.birth)):
                table.mend(devices)

    @property
    def births(self) -> list[int]:
        """Of the tables: which they are."""
        return [table.birth for table in self.tables]

    @property
    def table_bytes(self) -> int:
        """Space of the tables on the members."""
        return sum(table.root.stored_bytes for table in self.tables)

    def table_space(self) -> list[Range]:
        return [one for table in self.tables for one in table.root.space()]

    # ---- following the log ----

    def apply(self, record: Record) -> None:
        """Raises VolumeDamaged, with the catalog unchanged, where the record makes no sense."""
        where = f"log record {record.sequence}"
        if record.kind in (layout.COMMIT, layout.SNAPSHOT):
            self._change(record, where)
        elif record.kind == layout.TABLES:
            sequence, objects, used, roots = Tables.decode(record.payload, where)
            self.tables = self._open(roots, where)
            self.sequence, self.totals = sequence, Totals(objects, used)
        elif record.kind == layout.TABLES_CHANGED:
            self._replace(TablesChanged.decode(record.payload, where), where)
        elif record.kind == layout.SESSION:
            session = SessionEntry.decode(record.payload, where)
            if session.flags & layout.UNCLEAN_PREDECESSOR:
                self.windows = self.suspects
            elif session.flags & layout.EARLIER_UNSETTLED:
                self.windows = self.earlier
            else:
                self.windows = {}
            self.session = session.number
            self.last_session = session
        elif record.kind == layout.WINDOW:
            rows = layout.decode_extents(record.payload, where)
            ranges = [(int(row["member"]), int(row["offset"]), int(row["length"])) for row in rows]
            if len(rows) and int(rows[0]["flags"]) & layout.INSTEAD:
                self.windows[record.session] = ranges
            else:
                self.windows.setdefault(record.session, []).extend(ranges)

    def _change(self, record: Record, where: str) -> None:
        totals = self.totals
        if self.version == 1:
            sequence, operations = layout.decode_version1(record.payload, where)
            if record.kind == layout.COMMIT:
                sequence = record.sequence
        else:
            sequence, totals, operations = layout.decode_operations(record.payload, where)
        adopted = [operation for operation in operations if operation.kind == layout.ADOPT]
        if adopted and len(operations) > 1:
            raise VolumeDamaged("a record of the log makes no sense", where=where, found="a table among other changes")
        for operation in adopted:
            [table] = self._open([Root.decode(operation.value, where)], where)
            self.flushed(table)
        for operation in operations:
            if operation.kind != layout.ADOPT:
                self._note(operation)
        self.sequence, self.totals = sequence, totals
        if self.version == 1:
            self.totals = _count(self.recent)

    def _note(self, operation: Operation) -> None:
        if operation.key in self.recent:
            self.recent_bytes -= _encoded(operation.key, self.recent.pop(operation.key)).encoded_bytes
        # Where there is no table, a deletion has nothing to hide.
        if operation.kind == layout.PUT or self.tables:
            self.recent[operation.key] = operation.value if operation.kind == layout.PUT else None
            self.recent_bytes += operation.encoded_bytes

    def _open(self, roots: Sequence[Root], where: str) -> list[Table]:
        births = [root.birth for root in roots]
        if len(set(births)) != len(births):
            raise VolumeDamaged("a record of the log makes no sense", where=where, found="a table twice")
        return [Table(root, self.store, self.images.pop(root.birth, None)) for root in roots]

    def flushed(self, table: Table | None) -> None:
        """All recent changes are in `table` now (None: they added up to nothing), which is the newest."""
        if table is not None:
            self.tables = [table, *self.tables]
        self.recent, self.recent_bytes = {}, 0

    def _replace(self, changed: TablesChanged, where: str) -> None:
        births, removed = self.births, changed.removed
        first = births.index(removed[0]) if removed and removed[0] in births else -1
        if first < 0 or births[first : first + len(removed)] != removed or len(changed.added) > 1:
            raise VolumeDamaged(
                "a record of the log makes no sense", where=where, found="tables are replaced that are not there"
            )
        self.tables = [
            *self.tables[:first], *self._open(changed.added, where), *self.tables[first + len(removed) :]
        ]  # fmt: skip

    @property
    def suspects(self) -> dict[int, list[Range]]:
        """Windows that late writes may still hit where the last session is of unknown fate. One successor waits for
        them; after that they are taken for gone (docs/volume-format.md, "Ghosts"). One that was lost before it had a
        window of its own has hardly waited, and where it went on without a member, not there: it does not count.
        """
        own = self.windows.get(self.session)
        return dict(self.windows) if own is None else {self.session: own}

    @property
    def earlier(self) -> dict[int, list[Range]]:
        """Windows that late writes may still hit where nothing of the last session can land, and it was too short to
        say that of those before it."""
        return {number: ranges for number, ranges in self.windows.items() if number != self.session}

    # ---- moving the log ----

    def snapshot(
        self, tables: Sequence[Root] | None = None, recent: Mapping[bytes, bytes | None] | None = None
    ) -> Iterator[tuple[int, int, bytes]]:
        """(kind, session, payload) of the records that rebuild this state in an empty area; with other tables and
        recent changes, where they are given."""
        roots = [table.root for table in self.tables] if tables is None else list(tables)
        changes = self.recent if recent is None else recent
        yield layout.TABLES, self.session, Tables(self.sequence, *self.totals, roots).encode()
        batch: list[Operation] = []
        size = 0
        for key, value in changes.items():
            operation = _encoded(key, value)
            if batch and size + operation.encoded_bytes > SNAPSHOT_RECORD_BYTES:
                yield layout.SNAPSHOT, self.session, layout.encode_operations(batch, self.sequence, self.totals)
                batch, size = [], 0
            batch.append(operation)
            size += operation.encoded_bytes
        if batch:
            yield layout.SNAPSHOT, self.session, layout.encode_operations(batch, self.sequence, self.totals)
        if self.last_session is not None:
            yield layout.SESSION, self.session, self.last_session.encode()
        for number, ranges in self.windows.items():
            rows = [(member, 0, offset, length) for member, offset, length in ranges]
            yield layout.WINDOW, number, np.array(rows, layout.EXTENT).tobytes()

    def snapshot_bytes(self) -> int:
        """Upper bound of the blocks that `snapshot` takes, in bytes."""
        windows = sum(len(ranges) for ranges in self.windows.values()) * layout.EXTENT.itemsize
        roots = sum(table.root.encoded_bytes for table in self.tables)
        # A block for each record's head and rest; no record of entries is less than half full, but for the last.
        records = 5 + 2 * self.recent_bytes // SNAPSHOT_RECORD_BYTES + len(self.windows)
        return self.recent_bytes + roots + windows + records * layout.ALIGN


def _encoded(key: bytes, value: bytes | None) -> Operation:
    return Operation(layout.DELETE, key, b"") if value is None else Operation(layout.PUT, key, value)


def _count(values: Mapping[bytes, bytes | None]) -> Totals:
    """What the log of version 1 does not say."""
    blobs = [
        layout.ObjectValue.decode(value, layout.name_of(key)).blob for key, value in values.items() if value is not None
    ]
    return Totals(len(values), sum(blob.stored_bytes for blob in blobs if blob is not None))
