"""Which checkpoints a volume holds. Only committed ones exist here: others were never visible."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.checkpoint.manifest import MANIFEST_LIMIT, SUMMARY_END, Manifest, decode, decode_summary
from headrace.checkpoint.names import CheckpointId
from headrace.checkpoint.order import find
from headrace.checkpoint.retention import not_there
from headrace.errors import CheckpointFailed, ObjectNotFound
from headrace.volume import ObjectInfo, Volume

#: A checkpoint that is replaced while it is looked at is looked at again, so often.
_LOOKS = 5


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """One committed checkpoint."""

    id: CheckpointId
    created_unix: float
    ranks: int
    item_count: int
    #: Bytes of items, without gaps and manifest.
    data_bytes: int
    #: Of the commit that made it visible.
    sequence: int
    #: Nothing deletes or replaces it.
    pinned: bool = False

    @property
    def checkpoint_id(self) -> str:
        """What DCP calls it: `RUN/step-NNNNNNNN`."""
        return str(self.id)

    @property
    def step(self) -> int:
        return self.id.step


def list_checkpoints(volume: Volume, run: str | None = None) -> list[CheckpointInfo]:
    """All committed checkpoints of a run (or of all runs), by run and in the order of their commits: the
    last of a run is its latest. Reads at most 4 KiB of each.

    Follows the volume's log first. CheckpointFailed where a manifest is not one.
    """
    volume.refresh()
    found = find(volume, run)
    return [_info(volume, id, id in found.pinned) for id in found.ids]


def latest(volume: Volume, run: str) -> CheckpointInfo | None:
    """The checkpoint of this run that was committed last, whatever its step, or None (`headrace.checkpoint.order`)."""
    volume.refresh()
    found = find(volume, run)
    return _info(volume, found.ids[-1], found.ids[-1] in found.pinned) if found.ids else None


def latest_id(volume: Volume, run: str) -> CheckpointId | None:
    """Which one that is; nothing of it is read."""
    volume.refresh()
    found = find(volume, run)
    return found.ids[-1] if found.ids else None


def read_info(volume: Volume, id: CheckpointId) -> CheckpointInfo:
    """Of one committed checkpoint; reads at most 4 KiB. ObjectNotFound where there is none."""
    return _info(volume, id, id.pin in volume)


def _info(volume: Volume, id: CheckpointId, pinned: bool) -> CheckpointInfo:
    entry = volume.stat(id.manifest)
    try:
        summary = decode_summary(volume.read(id.manifest, 0, min(entry.length_bytes, SUMMARY_END)))
    except CheckpointFailed as error:
        error.where = error.where or id.manifest
        raise
    return CheckpointInfo(
        id=id,
        created_unix=summary.created_unix,
        ranks=summary.ranks,
        item_count=summary.item_count,
        data_bytes=summary.data_bytes,
        sequence=entry.sequence,
        pinned=pinned,
    )


@dataclass(frozen=True, kw_only=True)
class Committed:
    """A checkpoint as one commit made it."""

    id: CheckpointId
    sequence: int
    manifest: Manifest
    #: The manifest as it lies there.
    encoded: bytes
    #: Those of the manifest, in its order.
    objects: tuple[ObjectInfo, ...]


def read_manifest(volume: Volume, id: CheckpointId) -> Manifest:
    """The manifest of a committed checkpoint, checked against the objects that it speaks of.

    ObjectNotFound where there is no such checkpoint; CheckpointFailed where its manifest cannot be used.
    """
    return read_committed(volume, id).manifest


def read_committed(volume: Volume, id: CheckpointId) -> Committed:
    """The same, and which objects these are: of one commit, though another thread may follow the log meanwhile."""
    if id.manifest not in volume:
        volume.refresh()
    for _ in range(_LOOKS):
        try:
            entry = volume.stat(id.manifest)
        except ObjectNotFound:
            raise not_there(volume, id) from None
        try:
            found = _committed(volume, id, entry)
        except (CheckpointFailed, ObjectNotFound):
            if volume.sequence_of(id.manifest) == entry.sequence:
                raise
            continue
        if volume.sequence_of(id.manifest) == entry.sequence:
            return found
    raise CheckpointFailed("this checkpoint is replaced faster than it can be read", where=str(id))


def _committed(volume: Volume, id: CheckpointId, entry: ObjectInfo) -> Committed:
    if entry.length_bytes > MANIFEST_LIMIT:
        raise CheckpointFailed(
            "this manifest cannot be used: it is too long",
            where=id.manifest,
            expected=f"{MANIFEST_LIMIT} bytes",
            found=f"{entry.length_bytes} bytes",
        )
    data = bytearray(entry.length_bytes)
    volume.submit_read(entry, [0], [entry.length_bytes], [data], [0]).wait()
    encoded = bytes(data)
    try:
        manifest = decode(encoded)
        if manifest.summary.id != id:
            raise CheckpointFailed("this manifest is of another checkpoint", found=str(manifest.summary.id))
        objects = tuple(volume.stat(item.name) for item in manifest.objects)
        for item, info in zip(manifest.objects, objects, strict=True):
            if info.length_bytes != item.length_bytes:
                raise CheckpointFailed(
                    f"object {item.name} is not what the manifest says",
                    expected=f"{item.length_bytes} bytes",
                    found=f"{info.length_bytes} bytes",
                )
    except CheckpointFailed as error:
        error.where = error.where or id.manifest
        raise
    return Committed(id=id, sequence=entry.sequence, manifest=manifest, encoded=encoded, objects=objects)
