"""An end of a copy that is no destination: what comes must be what is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.device.reference import U8
from headrace.volume.copy.files import ItemError
from headrace.volume.copy.plan import Item

_DIFFERENT = "what is there is not what was to be copied"


class CompareSink:
    """`source` has what there must be; `theirs`: where it has that of an item, by the item's source."""

    def __init__(self, source: Any, theirs: Mapping[str, Item]) -> None:
        self._source = source
        self._theirs = theirs

    def open(self, item: Item) -> _Comparison:
        return _Comparison(item, self._source.open(self._theirs[item.source]))

    def write_pack(self, items: Sequence[Item], offsets: Sequence[int], buffer: U8) -> list[ItemError | None]:
        there = np.empty(len(buffer), np.uint8)
        result: list[ItemError | None] = self._source.read_pack(
            [self._theirs[item.source] for item in items], offsets, there
        )
        for place, (item, offset) in enumerate(zip(items, offsets, strict=True)):
            part = slice(offset, offset + item.length)
            if result[place] is None and not np.array_equal(there[part], buffer[part]):
                result[place] = ItemError(item, _DIFFERENT)
        return result

    def commit(self) -> list[int]:
        return []

    def abort(self) -> None:
        pass


class _Comparison:
    def __init__(self, item: Item, reader: Any) -> None:
        self._item = item
        self._reader = reader

    def write(self, offset: int, data: U8) -> None:
        there = np.empty(len(data), np.uint8)
        self._reader.read_into(offset, there)
        if not np.array_equal(there, data):
            raise ItemError(self._item, _DIFFERENT)

    def finish(self, reader: Any) -> None:
        self._reader.check()
        self._reader.close()

    def abandon(self) -> None:
        self._reader.close()
