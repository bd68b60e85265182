"""Which checkpoints a volume holds. Only committed ones exist here: others were never visible."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.checkpoint.manifest import MANIFEST_LIMIT, SUMMARY_END, Manifest, decode, decode_summary
from headrace.checkpoint.names import CheckpointId
from headrace.checkpoint.retention import find, not_there
from headrace.errors import CheckpointFailed, ObjectNotFound
from headrace.volume import Volume


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
    """All committed checkpoints of a run (or of all runs), by run and step. Reads at most 4 KiB of each.

    Follows the volume's log first. CheckpointFailed where a manifest is not one.
    """
    volume.refresh()
    found = find(volume, run)
    return [_info(volume, id, id in found.pinned) for id in found.ids]


def latest(volume: Volume, run: str) -> CheckpointInfo | None:
    """The committed checkpoint of the highest step, or None."""
    volume.refresh()
    found = find(volume, run)
    return _info(volume, found.ids[-1], found.ids[-1] in found.pinned) if found.ids else None


def read_info(volume: Volume, id: CheckpointId) -> CheckpointInfo:
    """Of one committed checkpoint; reads at most 4 KiB. ObjectNotFound where there is none."""
    return _info(volume, id, id in find(volume, id.run).pinned)


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


def read_manifest(volume: Volume, id: CheckpointId) -> Manifest:
    """The manifest of a committed checkpoint, checked against the objects that it speaks of.

    ObjectNotFound where there is no such checkpoint; CheckpointFailed where its manifest cannot be used.
    """
    if id.manifest not in volume:
        volume.refresh()
    try:
        entry = volume.stat(id.manifest)
    except ObjectNotFound:
        raise not_there(volume, id) from None
    if entry.length_bytes > MANIFEST_LIMIT:
        raise CheckpointFailed(
            "this manifest cannot be used: it is too long",
            where=id.manifest,
            expected=f"{MANIFEST_LIMIT} bytes",
            found=f"{entry.length_bytes} bytes",
        )
    try:
        manifest = decode(volume.read(id.manifest))
        if manifest.summary.id != id:
            raise CheckpointFailed("this manifest is of another checkpoint", found=str(manifest.summary.id))
        for item in manifest.objects:
            length = volume.stat(item.name).length_bytes
            if length != item.length_bytes:
                raise CheckpointFailed(
                    f"object {item.name} is not what the manifest says",
                    expected=f"{item.length_bytes} bytes",
                    found=f"{length} bytes",
                )
    except CheckpointFailed as error:
        error.where = error.where or id.manifest
        raise
    return manifest
