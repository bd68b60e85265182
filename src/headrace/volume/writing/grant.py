"""What travels between the coordinator and the ranks: where to write, and the proof that it was written."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import numpy as np

from headrace.errors import UsageError
from headrace.volume import layout
from headrace.volume.data.extents import Extents

_T = TypeVar("_T", bound="Message")


@dataclass(frozen=True, kw_only=True)
class Message:
    """Picklable, and JSON-able by `to_json`/`from_json` (bytes as base64)."""

    def to_json(self) -> str:
        return json.dumps(
            {
                key: {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
                for key, value in asdict(self).items()
            }
        )

    @classmethod
    def from_json(cls: type[_T], text: str) -> _T:
        try:
            raw: dict[str, Any] = json.loads(text)
            values = {
                key: base64.b64decode(value["base64"]) if isinstance(value, dict) else value
                for key, value in raw.items()
            }
            if set(values) != {field.name for field in fields(cls)}:
                raise ValueError(f"fields {sorted(values)}")
            return cls(**values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"this is not a {cls.__name__.lower()}", found=str(error)) from error


@dataclass(frozen=True, kw_only=True)
class Grant(Message):
    """Space for one object, given to whoever writes its bytes: `volume.write_grant(grant, buffer)` on any rank.

    Good for the transaction that gave it, once. Never put it where it may be used again (a cached plan): a second write
    there would destroy a committed object.
    """

    volume_id: bytes
    session: int
    transaction: int
    name: str
    birth: int
    length_bytes: int
    checksum_block_bytes: int
    table_page_bytes: int
    stripe_bytes: int
    #: RUN[], COLUMN[] of `headrace.volume.layout`, as bytes; of the table those of all copies, one after another.
    runs: bytes
    columns: bytes
    table_runs: bytes
    table_columns: bytes
    #: How often the checksum table stands; 0: it lies in the object's entry.
    table_copies: int
    #: A `fence.Ticket` as JSON: as which host it is written. Empty: as the one that writes it is.
    ticket: str = ""

    @property
    def block_count(self) -> int:
        return -(-self.length_bytes // self.checksum_block_bytes)

    def data_extents(self) -> Extents:
        return Extents(
            np.frombuffer(self.runs, layout.RUN),
            np.frombuffer(self.columns, layout.COLUMN),
            length_bytes=self.length_bytes,
            block_bytes=self.checksum_block_bytes,
            stripe_bytes=self.stripe_bytes,
        )

    def table_extents(self) -> list[Extents]:
        """Of each copy of the checksum table."""
        runs, columns = np.frombuffer(self.table_runs, layout.RUN), np.frombuffer(self.table_columns, layout.COLUMN)
        each = len(runs) // max(self.table_copies, 1)
        result = []
        for copy in range(self.table_copies):
            mine = runs[copy * each : (copy + 1) * each]
            width = int(mine["width"].sum())
            result.append(
                Extents(
                    mine,
                    columns[:width],
                    length_bytes=self.block_count * 4,
                    block_bytes=self.table_page_bytes,
                    stripe_bytes=self.stripe_bytes,
                )
            )
            columns = columns[width:]
        return result

    @property
    def root_count(self) -> int:
        if not self.table_page_bytes:
            return self.block_count
        return -(-self.block_count * 4 // self.table_page_bytes)


@dataclass(frozen=True, kw_only=True)
class Receipt(Message):
    """A grant's bytes are durable on the members. `roots`: uint32 little-endian, what the object's entry needs."""

    session: int
    transaction: int
    name: str
    birth: int
    length_bytes: int
    roots: bytes
    #: A copy of a write to this place was given up, and may still land: with the bytes that are there now.
    haunted: bool = False
