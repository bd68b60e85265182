"""An ingest that is not finished, in the volume: what has been read stays, whatever becomes of who reads.

    NAME.ingest/plan                what is ingested and how: a run that means the same goes on here, no other does
    NAME.ingest/tokenizer.json      and other files that the plan needs
    NAME.ingest/000012.json         slice 12 was read: its parts, what was counted
    NAME.ingest/000012.side         what belongs to it: lengths of documents
    NAME.ingest/000012.000          its bytes, in parts

Everything of a slice appears in one commit, and the plan in the first of those. The last commit makes the dataset out
of the parts, without moving a byte, and deletes all of this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dataset.ingestion.slices import Done
from headrace.dataset.tokens.stream import CHECKSUM_BLOCK_BYTES
from headrace.errors import DatasetError
from headrace.units import MIB, format_bytes
from headrace.volume import ObjectInfo, Session, Transaction

#: Of the descriptions here.
_MAX_JSON_BYTES = 16 * MIB
_READ_BYTES = 16 * MIB


class Work:
    """The unfinished ingest of one dataset."""

    def __init__(self, session: Session, name: str) -> None:
        self._session = session
        self._name = name
        self._plan: Any = None
        self._files: dict[str, bytes] = {}
        #: The plan is in the volume.
        self._begun = False

    @property
    def prefix(self) -> str:
        return prefix_of(self._name)

    def plan(self, plan: dict[str, Any], files: dict[str, bytes]) -> bool:
        """What is to be done; has an earlier run begun it? DatasetError where that began something else.

        `plan`: JSON. `files`: what goes with it, kept once.
        """
        volume = self._session.volume
        self._plan, self._files = json.loads(json.dumps(plan)), files
        if not volume.any(self.prefix):
            return False
        there = f"{self.prefix}plan"
        begun = self._read(volume.stat(there)) if there in volume else None
        if begun != self._plan:
            raise DatasetError(
                "an ingest of this name was not finished, and was of other text or settings",
                where=self.prefix,
                found=_differences(self._plan, begun) if isinstance(begun, dict) else "no plan",
                next_step="take another name, or begin again without what it has done: --restart",
            )
        self._begun = True
        return True

    def file(self, name: str) -> bytes:
        """One that went with the plan."""
        return self._session.volume.read(self.prefix + name)

    def find(self, slices: Sequence[object]) -> dict[int, Done]:
        """Those of these slices that an earlier run of the same plan has read."""
        listed = {info.name[len(self.prefix) :]: info for info in self._session.volume.list(self.prefix)}
        found: dict[int, Done] = {}
        for name, info in listed.items():
            if re.fullmatch(r"[0-9]{6}\.json", name) and int(name[:6]) < len(slices):
                found[int(name[:6])] = self._done(info, listed)
        return found

    def finish(self, transaction: Transaction, index: int, done: Done, side: npt.NDArray[np.uint8]) -> None:
        """A slice was read, and its parts were put. With the plan, where there is none yet."""
        if not self._begun:
            for name, data in {"plan": _encode(self._plan), **self._files}.items():
                transaction.put(self.prefix + name, data)
        transaction.put(self._place(index, "side"), side, checksum_block_bytes=CHECKSUM_BLOCK_BYTES)
        transaction.put(self._place(index, "json"), _encode({**asdict(done), "parts": list(done.parts)}))

    def began(self) -> None:
        """What `finish` was told last is committed."""
        self._begun = True

    def forget(self, transaction: Transaction, index: int) -> None:
        """A slice that was read is to be read again."""
        for info in self._session.volume.list(f"{self.prefix}{index:06}."):
            transaction.delete(info.name)

    def has(self, index: int) -> bool:
        return self._place(index, "json") in self._session.volume

    def drop(self, transaction: Transaction) -> None:
        """All of it goes with this transaction."""
        transaction.delete_prefix(self.prefix)

    def part(self, index: int, part: int) -> str:
        """Name of a part of a slice."""
        return self._place(index, f"{part:03}")

    def parts(self, order: Iterable[tuple[int, Done]]) -> Iterator[tuple[str, int]]:
        """Name and length of all parts of these slices."""
        for index, done in order:
            for part, length in enumerate(done.parts):
                yield self.part(index, part), length

    def side(self, index: int) -> bytes:
        return self._session.volume.read(self._place(index, "side"))

    def blocks(self, name: str, length_bytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes of an object; a block is valid until the next is asked for."""
        buffer = np.empty(min(length_bytes, _READ_BYTES), np.uint8)
        for start in range(0, length_bytes, _READ_BYTES):
            block = buffer[: min(_READ_BYTES, length_bytes - start)]
            self._session.volume.read_into(name, start, block)
            yield block

    def _place(self, index: int, what: str) -> str:
        return f"{self.prefix}{index:06}.{what}"

    def _read(self, info: ObjectInfo) -> Any:
        if info.length_bytes > _MAX_JSON_BYTES:
            raise DatasetError("not of an ingest", where=info.name, found=format_bytes(info.length_bytes))
        try:
            return json.loads(self._session.volume.read(info.name))
        except (ValueError, RecursionError):
            raise DatasetError("not of an ingest", where=info.name, expected="JSON") from None

    def _done(self, info: ObjectInfo, listed: dict[str, ObjectInfo]) -> Done:
        said = self._read(info)
        try:
            done = Done(**{**said, "parts": tuple(said["parts"])})
            if not done.plausible():
                raise ValueError
            stem = info.name[len(self.prefix) : -len("json")]
            lengths = [listed[f"{stem}{part:03}"].length_bytes for part in range(len(done.parts))]
            if [*done.parts] != lengths or listed[f"{stem}side"].length_bytes != done.side_bytes:
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise DatasetError(
                "what an unfinished ingest left does not fit together", where=info.name,
                next_step="begin again without it: --restart",
            ) from None  # fmt: skip
        return done


def prefix_of(name: str) -> str:
    """What the objects of an unfinished ingest of this dataset are called at the beginning."""
    return f"{name}.ingest/"


def _encode(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True) + "\n").encode()


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    return "another " + ", ".join(names[:6])
