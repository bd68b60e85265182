"""What the log adds up to: the objects, the sessions and their windows, as of one record."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import numpy as np

from headrace.volume import layout
from headrace.volume.layout import Operation, Record, SessionEntry, Totals
from headrace.volume.objects import Range

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


class Catalog:
    """The state behind the log, advanced record by record: an ordered map from keys to values, which it does not look
    into. Not thread-safe: its volume's lock guards it.
    """

    def __init__(self, version: int = layout.VERSION) -> None:
        self.version = version
        self._values: dict[bytes, bytes] = {}
        #: The keys in order; None: to be sorted again.
        self._ordered: list[bytes] | None = None
        self.totals = Totals(0, 0)
        #: Sequence of the last commit.
        self.sequence = 0
        #: Number of the last session that opened.
        self.session = 0
        self.last_session: SessionEntry | None = None
        #: Session -> the space that a command of it may still be on its way to.
        self.windows: dict[int, list[Range]] = {}
        #: Bytes of all entries, encoded.
        self.entry_bytes = 0

    def get(self, key: bytes) -> bytes | None:
        """The value of a key; None where there is none."""
        return self._values.get(key)

    def scan(self, first: bytes, end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Keys from `first` on, below `end`, in order, with their values."""
        if self._ordered is None:
            self._ordered = sorted(self._values)
        ordered = self._ordered
        for index in range(bisect.bisect_left(ordered, first), len(ordered)):
            key = ordered[index]
            if end is not None and key >= end:
                return
            yield key, self._values[key]

    def apply(self, record: Record) -> None:
        """Raises VolumeDamaged, with the catalog unchanged, where the record makes no sense."""
        where = f"log record {record.sequence}"
        if record.kind in (layout.COMMIT, layout.SNAPSHOT):
            if self.version == 1:
                sequence, operations = layout.decode_version1(record.payload, where)
            else:
                sequence, self.totals, operations = layout.decode_operations(record.payload, where)
            for operation in operations:
                before = self._values.pop(operation.key, None)
                if before is not None:
                    self.entry_bytes -= Operation(layout.PUT, operation.key, before).encoded_bytes
                if operation.kind == layout.PUT:
                    self._values[operation.key] = operation.value
                    self.entry_bytes += operation.encoded_bytes
            self._ordered = None
            self.sequence = record.sequence if record.kind == layout.COMMIT else sequence
            if self.version == 1:
                self.totals = _count(self._values)
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

    def snapshot(self) -> Iterator[tuple[int, int, bytes]]:
        """(kind, session, payload) of the records that rebuild this state in an empty area."""
        batch: list[Operation] = []
        size = 0
        for key, value in self._values.items():
            operation = Operation(layout.PUT, key, value)
            if batch and size + operation.encoded_bytes > SNAPSHOT_RECORD_BYTES:
                yield layout.SNAPSHOT, self.session, layout.encode_operations(batch, self.sequence, self.totals)
                batch, size = [], 0
            batch.append(operation)
            size += operation.encoded_bytes
        yield layout.SNAPSHOT, self.session, layout.encode_operations(batch, self.sequence, self.totals)
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


def _count(values: dict[bytes, bytes]) -> Totals:
    """What the log of version 1 does not say."""
    blobs = [layout.ObjectValue.decode(value, layout.name_of(key)).blob for key, value in values.items()]
    return Totals(len(values), sum(blob.stored_bytes for blob in blobs if blob is not None))
