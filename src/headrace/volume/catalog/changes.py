"""What a transaction changes in the catalogue: what one commit puts and deletes, and the space that they give up.

An object is either one whole blob, which lies in its value (INLINE), or slices of blobs that have keys of their own. A
blob that is to be shared therefore moves: out of the value of the object whose own it was, which is put again as a
slice of it (a **promotion**), under a key. The other way does not exist. A blob ends with the last object that refers
to it, in the same commit, by a DELETE of its key: so whoever reads the catalogue never has to count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.errors import ObjectExists, ObjectNotFound, UsageError, VolumeDamaged
from headrace.volume import layout
from headrace.volume.catalog.bulk import NOTHING, Bulk, Changed
from headrace.volume.catalog.catalog import Catalog
from headrace.volume.layout import Blob, ObjectValue, Rows, Totals

#: The value of one object is bounded, so that a node of the catalogue's tables is.
MAX_SLICES = 20_000


def already_exists(name: str) -> ObjectExists:
    return ObjectExists(
        "there is an object of this name, and objects never change",
        where=f"object {name!r}",
        next_step="delete it in the same transaction, or choose another name",
    )


def _not_there(name: str) -> ObjectNotFound:
    return ObjectNotFound(f"there is no object {name!r} to delete or rename")


def whole(blob: Blob) -> Rows:
    """All of a blob, as one slice; none where it is empty."""
    rows = [(blob.birth, 0, blob.length_bytes)] if blob.length_bytes else []
    return np.array(rows, layout.SLICE)


def values_of(catalog: Catalog, keys: Sequence[bytes]) -> dict[bytes, bytes]:
    """Of those of these keys that have a value. `keys` ascend."""
    # One look at the range that they span, where that is not mostly others, deleted ones too; else one for each.
    result: dict[bytes, bytes] = {}
    if not keys:
        return result
    # Mostly there is nothing, and then nothing to look for.
    wanted: set[bytes] = set()
    seen, limit = 0, 4 * len(keys) + 64
    for found, values in catalog.batches(keys[0], keys[-1] + b"\0"):
        wanted = wanted or set(keys)
        if not wanted.isdisjoint(found):
            for key, value in zip(found, values, strict=True):
                if value is not None and key in wanted:
                    result[key] = value
        seen += len(found)
        if seen > limit:
            break
    else:
        return result
    return {key: value for key in keys if (value := catalog.get(key)) is not None}


def check_none_exists(catalog: Catalog, keys: Sequence[bytes]) -> None:
    """ObjectExists for one of these objects that there is. `keys` ascend."""
    for key in values_of(catalog, keys):
        raise already_exists(layout.name_of(key))


@dataclass
class Outcome:
    """What `Changes.finish` gives."""

    #: Key -> its value from now on; None: it has none any more.
    changes: Changed
    totals: Totals
    #: Blobs that nothing refers to any more once this is durable.
    gone: list[Blob]
    #: Slices of each blob with a key afterwards; 0: it has none any more. Only those that changed.
    counts: dict[int, int] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> int:
        """Of a record with all of it."""
        return layout.payload_bytes(len(self.changes), self.changes.size_bytes())


class Changes:
    """Collects a transaction's wishes, in any order but deletions first. Changes nothing but itself."""

    def __init__(
        self,
        catalog: Catalog,
        counts: Mapping[int, int],
        totals: Totals,
        sequence: int,
        shared: Container[int] = frozenset(),
    ) -> None:
        """`counts`: slices of every blob that has a key. `sequence`: of the commit. `shared`: births of blobs that an
        open transaction means to refer to: they are not left in a value that moves to another name.
        """
        self._catalog = catalog
        self._get = catalog.get
        self._counts = counts
        self._totals = totals
        self._sequence = sequence
        self._shared = shared
        #: Key -> its state after the commit; None: there is none.
        self._after: dict[bytes, bytes | None] = {}
        #: Of these, some that were there before it.
        self._was: set[bytes] = set()
        #: More of the same, with keys of its own.
        self._bulk = NOTHING
        self._delta: Counter[int] = Counter()
        #: Blobs that lose the value they lie in.
        self._homeless: dict[int, Blob] = {}
        #: Blobs that slices may refer to, and the name of the object whose own each was when it was looked at.
        self._offered: dict[int, tuple[Blob, str | None]] = {}
        self._objects = 0
        self._used = 0

    def _now(self, name: str) -> ObjectValue | None:
        value = self._get(layout.object_key(name))
        return None if value is None else ObjectValue.decode(value, name)

    def delete(self, names: Sequence[str]) -> None:
        """ObjectNotFound."""
        self._loosen()
        slices = []
        found = values_of(self._catalog, sorted(map(layout.object_key, names)))
        for name in names:
            key = layout.object_key(name)
            value = found.get(key)
            if value is None or key in self._after:
                raise _not_there(name)
            if layout.ObjectHead.decode(value, name).flags & layout.INLINE:
                blob = layout.ObjectValue.decode(value, name).blob
                assert blob is not None
                self._homeless[blob.birth] = blob
            else:
                slices.append(layout.peek_slices(value, name))
            self._after[key] = None
            self._was.add(key)
            self._objects -= 1
        if slices:
            self._count(np.frombuffer(b"".join(slices), layout.SLICE), -1)

    def _let_go(self, name: str) -> ObjectValue:
        self._loosen()
        value, key = self._now(name), layout.object_key(name)
        if value is None or key in self._after:
            raise _not_there(name)
        if value.blob is not None:
            self._homeless[value.blob.birth] = value.blob
        self._count(value.slices, -1)
        self._after[key] = None
        self._objects -= 1
        return value

    def _count(self, slices: Rows, sign: int) -> None:
        if len(slices) == 1:
            self._delta[int(slices["birth"][0])] += sign
            return
        births, counts = np.unique(slices["birth"], return_counts=True)
        for birth, count in zip(births.tolist(), counts.tolist(), strict=True):
            self._delta[birth] += sign * count

    def rename(self, old: str, new: str) -> None:
        """The same bytes under another name. ObjectNotFound, ObjectExists."""
        value = self._let_go(old)
        slices = value.slices
        if value.blob is not None:
            if value.blob.birth not in self._shared:
                del self._homeless[value.blob.birth]
                self._put(new, value.created_ns, value.length_bytes, blob=value.blob)
                return
            slices = whole(value.blob)
        self.put_slices(new, slices, value.created_ns)

    def put_blob(self, name: str, blob: Blob, created_ns: int) -> None:
        """An object that is one whole new blob. ObjectExists."""
        self._used += blob.stored_bytes
        self._put(name, created_ns, blob.length_bytes, blob=blob)

    def put_slices(self, name: str, slices: Rows, created_ns: int) -> None:
        """An object of slices of blobs that have keys, were offered, or whose object is deleted. ObjectExists."""
        if len(slices) > MAX_SLICES:
            raise UsageError(
                "the object has too many parts",
                where=f"object {name!r}",
                expected=f"at most {MAX_SLICES}",
                found=str(len(slices)),
                next_step="write it as one object, or as several",
            )
        self._count(slices, 1)
        self._put(name, created_ns, sum(slices["length"].tolist()), slices=slices)

    def _put(
        self, name: str, created_ns: int, length: int, *, slices: Rows = layout.NO_SLICES, blob: Blob | None = None
    ) -> None:
        self._loosen()
        key = layout.object_key(name)
        if self._after.get(key) is not None or (key not in self._after and self._get(key) is not None):
            raise already_exists(name)
        value = ObjectValue(
            sequence=self._sequence, created_ns=created_ns, length_bytes=length, slices=slices, blob=blob
        )
        self._after[key] = value.encode()
        self._objects += 1

    def put_packed(self, bulk: Bulk, birth: int, slices: int) -> None:
        """Many objects whose values are made: `slices` of blob `birth` together. ObjectExists."""
        self._loosen()
        again = {key for key in self._after if bulk.find(key) is not None}
        for key in again:
            if self._after[key] is not None:
                raise already_exists(layout.name_of(key))
        for key in values_of(self._catalog, bulk.keys):
            if key not in again:
                raise already_exists(layout.name_of(key))
        for key in again:
            del self._after[key]
        self._bulk = bulk
        self._delta[birth] += slices
        self._objects += len(bulk.keys)

    def _loosen(self) -> None:
        """Only one bulk stays one, and only while nothing is asked that may be in it."""
        bulk, self._bulk = self._bulk, NOTHING
        self._after.update(zip(bulk.keys, bulk.values(0, len(bulk.keys)), strict=True))

    def offer(self, blob: Blob, holder: str | None = None) -> None:
        """A blob that slices may refer to: a new one, or one that lay in the value of object `holder`."""
        self._offered[blob.birth] = blob, holder

    def finish(self) -> Outcome:
        """All of it together."""
        gone: list[Blob] = []
        counts: dict[int, int] = {}
        for birth, delta in sorted(self._delta.items()):
            before = self._counts.get(birth, 0)
            after = before + delta
            key = layout.blob_key(birth)
            if after < 0:
                raise VolumeDamaged("more slices of a blob end than there were", where=f"blob {birth:#x}")
            if before and not after:
                value = self._get(key)
                if value is None:
                    raise VolumeDamaged("a blob that objects refer to is missing", where=f"blob {birth:#x}")
                gone.append(layout.decode_blob(value, birth))
                self._after[key] = None
                counts[birth] = 0
            elif after and not before:
                counts[birth] = after + self._give_key(birth)
            elif delta:
                counts[birth] = after
        gone += self._homeless.values()
        self._used -= sum(blob.stored_bytes for blob in gone)
        changes = self._after
        if None in changes.values():
            # What was put and is gone again in one commit never was there.
            changes = {k: v for k, v in changes.items() if v is not None or k in self._was or self._get(k) is not None}
        totals = Totals(self._totals.object_count + self._objects, self._totals.used_bytes + self._used)
        return Outcome(Changed(changes, self._bulk), totals, gone, counts)

    def _give_key(self, birth: int) -> int:
        """Put a blob under its key; returns how many slices that adds, of the object whose own it was."""
        blob, holder = self._offered.get(birth, (None, None))
        promoted = 0
        if birth in self._homeless:
            blob = self._homeless.pop(birth)
        elif blob is None:
            raise VolumeDamaged("a slice refers to a blob that there is not", where=f"blob {birth:#x}")
        else:
            promoted = 0 if holder is None else self._promote(holder, blob)
            if not promoted:
                # A new blob; or one whose object another transaction deleted meanwhile.
                self._used += blob.stored_bytes
        self._after[layout.blob_key(birth)] = blob.encode()
        return promoted

    def _promote(self, holder: str, blob: Blob) -> int:
        """Where the blob still lies in the value of its object, put that as a slice: the same object as before."""
        value = self._now(holder)
        if value is None or value.blob is None or value.blob.birth != blob.birth:
            return 0
        again = ObjectValue(
            sequence=value.sequence, created_ns=value.created_ns, length_bytes=value.length_bytes, slices=whole(blob)
        )
        self._after[layout.object_key(holder)] = again.encode()
        return 1


def count_slices(values: Iterable[tuple[str, bytes]]) -> dict[int, int]:
    """Slices of every blob that has a key, of all objects (name, value)."""
    counts: Counter[int] = Counter()
    for name, value in values:
        if not layout.ObjectHead.decode(value, name).flags & layout.INLINE:
            slices = ObjectValue.decode(value, name).slices
            counts.update(slices["birth"].tolist())
    return dict(counts)
