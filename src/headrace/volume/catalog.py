"""What the log adds up to: the objects, the sessions and their windows, as of one record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headrace.errors import VolumeDamaged
from headrace.volume import layout
from headrace.volume.extents import Extents, used_space
from headrace.volume.layout import Entry, Record, SessionEntry

#: (member, offset, bytes)
Range = tuple[int, int, int]

#: Entries of one SNAPSHOT record together; bounds what is held encoded at a time.
SNAPSHOT_RECORD_BYTES = 1 << 20


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


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """One committed object. `birth` names the allocation: a new object of the same name has another."""

    name: str
    length_bytes: int
    checksum_block_bytes: int
    #: Sequence of the transaction that committed it.
    sequence: int
    #: Wall clock of the writer, seconds since 1970.
    created_s: float
    birth: int
    #: Space it takes on the members, its checksum table included.
    stored_bytes: int


def info_of(entry: Entry) -> ObjectInfo:
    return ObjectInfo(
        name=entry.name,
        length_bytes=entry.length_bytes,
        checksum_block_bytes=entry.checksum_block_bytes,
        sequence=entry.sequence,
        created_s=entry.created_ns / 1e9,
        birth=entry.birth,
        stored_bytes=entry.stored_bytes,
    )


def space_of(entry: Entry, stripe_bytes: int) -> list[Range]:
    """Everything on the members that belongs to the object, its checksum table included."""
    return used_space(entry.runs, entry.columns, stripe_bytes) + used_space(
        entry.table_runs, entry.table_columns, stripe_bytes
    )


class StoredObject:
    """An object with its extents, ready to be read. Immutable."""

    def __init__(self, entry: Entry, stripe_bytes: int) -> None:
        self.entry = entry
        self.data = Extents(
            entry.runs,
            entry.columns,
            length_bytes=entry.length_bytes,
            block_bytes=entry.checksum_block_bytes,
            stripe_bytes=stripe_bytes,
        )
        self.block_count = -(-entry.length_bytes // entry.checksum_block_bytes)
        self.table: Extents | None = None
        if entry.table_page_bytes:
            self.table = Extents(
                entry.table_runs,
                entry.table_columns,
                length_bytes=self.block_count * 4,
                block_bytes=entry.table_page_bytes,
                stripe_bytes=stripe_bytes,
            )
        roots = -(-self.block_count * 4 // entry.table_page_bytes) if entry.table_page_bytes else self.block_count
        if roots != len(entry.roots):
            raise VolumeDamaged(
                "an object's checksums contradict its length",
                where=f"object {entry.name!r}",
                expected=f"{roots} roots",
                found=str(len(entry.roots)),
            )


class Catalog:
    """The state behind the log, advanced record by record. Not thread-safe: its volume's lock guards it."""

    def __init__(self, stripe_bytes: int) -> None:
        self.stripe_bytes = stripe_bytes
        self.entries: dict[str, Entry] = {}
        #: Sequence of the last commit.
        self.sequence = 0
        #: Number of the last session that opened.
        self.session = 0
        self.last_session: SessionEntry | None = None
        #: Session -> the space that a command of it may still be on its way to.
        self.windows: dict[int, list[Range]] = {}
        self.last_birth = 0
        #: Bytes of all entries, encoded.
        self.entry_bytes = 0

    def apply(self, record: Record) -> None:
        """Raises VolumeDamaged, with the catalog unchanged, where the record makes no sense."""
        where = f"log record {record.sequence}"
        if record.kind in (layout.COMMIT, layout.SNAPSHOT):
            sequence, entries = layout.decode_entries(record.payload, where)
            if record.kind == layout.COMMIT:
                sequence = record.sequence
            for entry in entries:
                before = self.entries.pop(entry.name, None)
                if before is not None:
                    self.entry_bytes -= before.encoded_bytes
                if entry.operation == layout.PUT:
                    self.entries[entry.name] = entry
                    self.entry_bytes += entry.encoded_bytes
                    self.last_birth = max(self.last_birth, entry.birth)
            self.sequence = sequence
        elif record.kind == layout.SESSION:
            session = SessionEntry.decode(record.payload, where)
            # One successor waits for late writes; after that they are taken for gone (docs/volume-format.md, "Ghosts").
            keep = {self.session} if session.flags & layout.UNCLEAN_PREDECESSOR else set()
            self.windows = {number: ranges for number, ranges in self.windows.items() if number in keep}
            self.session = session.number
            self.last_session = session
        elif record.kind == layout.WINDOW:
            rows = layout.decode_extents(record.payload, where)
            ranges = [(int(row["member"]), int(row["offset"]), int(row["length"])) for row in rows]
            if len(rows) and int(rows[0]["flags"]) & layout.INSTEAD:
                self.windows[record.session] = ranges
            else:
                self.windows.setdefault(record.session, []).extend(ranges)

    def object(self, name: str) -> StoredObject | None:
        entry = self.entries.get(name)
        return None if entry is None else StoredObject(entry, self.stripe_bytes)

    def snapshot(self) -> Iterator[tuple[int, int, bytes]]:
        """(kind, session, payload) of the records that rebuild this state in an empty area."""
        batch: list[bytes] = []
        size = 0
        for entry in self.entries.values():
            encoded = entry.encode()
            if batch and size + len(encoded) > SNAPSHOT_RECORD_BYTES:
                yield layout.SNAPSHOT, self.session, layout.encode_entries(batch, self.sequence)
                batch, size = [], 0
            batch.append(encoded)
            size += len(encoded)
        yield layout.SNAPSHOT, self.session, layout.encode_entries(batch, self.sequence)
        if self.last_session is not None:
            yield layout.SESSION, self.session, self.last_session.encode()
        for number, ranges in self.windows.items():
            rows = [(member, 0, offset, length) for member, offset, length in ranges]
            yield layout.WINDOW, number, np.array(rows, layout.EXTENT).tobytes()

    def snapshot_bytes(self) -> int:
        """Upper bound of the blocks that `snapshot` takes, in bytes."""
        windows = sum(len(ranges) for ranges in self.windows.values()) * layout.EXTENT.itemsize
        # A block for each record's head and rest; no record of entries is less than half full, but for the last.
        records = 4 + 2 * self.entry_bytes // SNAPSHOT_RECORD_BYTES + len(self.windows)
        return self.entry_bytes + windows + records * layout.ALIGN
