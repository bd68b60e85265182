"""Many new values at once, as they come: keys in order, values one after another in one piece of memory.

A transaction of 100,000 packed objects changes nothing else, or little. As entries of a dict each of them would cost
more than its part of a leaf; so they stay what they are, beside the loose changes, until whole leaves are cut out of
them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headrace.volume.data.extents import I64

#: A key's value from now on; None: it has none any more.
Loose = dict[bytes, bytes | None]


class Keys(NamedTuple):
    """Keys as objects, to look one up, and as one text, to write whole leaves of them: key i is
    `text[ends[i - 1]:ends[i]]`."""

    each: Sequence[bytes]
    text: bytes
    ends: I64

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> Keys:
        return cls(keys, b"".join(keys), np.cumsum(np.fromiter(map(len, keys), np.int64, len(keys))))


class Bulk(NamedTuple):
    """Value i of `keys`, which ascend, is `data[ends[i - 1]:ends[i]]`."""

    all_keys: Keys
    data: bytes
    #: int64.
    ends: I64

    @property
    def keys(self) -> Sequence[bytes]:
        return self.all_keys.each

    def starts(self, index: int) -> tuple[int, int]:
        """Where key and value of an entry begin."""
        return (int(self.all_keys.ends[index - 1]), int(self.ends[index - 1])) if index else (0, 0)

    def value(self, index: int) -> bytes:
        return self.data[int(self.ends[index - 1]) if index else 0 : int(self.ends[index])]

    def values(self, start: int, end: int) -> list[bytes]:
        """Of keys `start` to `end`."""
        return [self.value(index) for index in range(start, end)]

    def find(self, key: bytes) -> int | None:
        """Its index; None where it is not there."""
        index = bisect_left(self.keys, key)
        return index if index < len(self.keys) and self.keys[index] == key else None


NOTHING = Bulk(Keys.of(()), b"", np.zeros(0, np.int64))


class Changed(Mapping[bytes, bytes | None]):
    """What a commit changes: loose changes and one bulk, which have no key in common."""

    def __init__(self, loose: Loose, bulk: Bulk = NOTHING) -> None:
        self.loose = loose
        self.bulk = bulk

    def __getitem__(self, key: bytes) -> bytes | None:
        index = self.bulk.find(key)
        return self.loose[key] if index is None else self.bulk.value(index)

    def __iter__(self) -> Iterator[bytes]:
        yield from self.loose
        yield from self.bulk.keys

    def __len__(self) -> int:
        return len(self.loose) + len(self.bulk.keys)

    def over(self, older: Mapping[bytes, bytes | None]) -> Changed:
        """These changes, and of others that came before them those that still hold."""
        if not older:
            return self
        # The few that are older are looked for among the many, not the other way round.
        held = {key: value for key, value in older.items() if self.bulk.find(key) is None}
        return Changed({**held, **self.loose}, self.bulk)

    def size_bytes(self) -> int:
        """Of all keys and values together."""
        values = sum(map(len, filter(None, self.loose.values())))
        return sum(map(len, self.loose)) + len(self.bulk.all_keys.text) + values + len(self.bulk.data)
