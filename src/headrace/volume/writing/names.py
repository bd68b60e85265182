"""Names that a transaction has given to new objects."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from headrace.volume import layout

#: A pack of more is not made part of the set: the hash of every name would cost more than to look for the others in it.
_MANY = 8192


class Names:
    """A set of names; large packs stay what they are, keys that ascend. There are few of those."""

    def __init__(self) -> None:
        self._few: set[str] = set()
        self._many: list[Sequence[bytes]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._few or any(_has(keys, layout.object_key(name)) for keys in self._many)

    def add(self, name: str) -> None:
        self._few.add(name)

    def discard(self, name: str) -> None:
        self._few.discard(name)

    def shared_with(self, names: Sequence[str], keys: Sequence[bytes]) -> Iterable[str]:
        """Those of `names` that are here. `keys`: theirs, ascending."""
        if len(keys) <= _MANY:
            yield from self._few.intersection(names)
        else:
            yield from (name for name in self._few if _has(keys, layout.object_key(name)))
        for many in self._many:
            if keys[0] <= many[-1] and many[0] <= keys[-1]:
                yield from map(layout.name_of, set(many).intersection(keys))

    def add_many(self, names: Sequence[str], keys: Sequence[bytes]) -> None:
        if len(keys) <= _MANY:
            self._few.update(names)
        else:
            self._many.append(keys)

    def discard_many(self, names: Sequence[str], keys: Sequence[bytes]) -> None:
        """What `add_many` added."""
        if len(keys) <= _MANY:
            self._few.difference_update(names)
        else:
            self._many = [many for many in self._many if many is not keys]


def _has(keys: Sequence[bytes], key: bytes) -> bool:
    index = bisect_left(keys, key)
    return index < len(keys) and keys[index] == key
