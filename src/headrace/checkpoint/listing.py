"""Which checkpoints a volume holds, and deleting them. Only committed ones exist here: others were never visible."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.checkpoint.manifest import MANIFEST_LIMIT, SUMMARY_END, Manifest, decode, decode_summary
from headrace.checkpoint.names import CheckpointId, check_run, parse_manifest_name
from headrace.errors import CheckpointFailed, ObjectNotFound, UsageError
from headrace.volume import Session, Volume


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

    @property
    def checkpoint_id(self) -> str:
        """What DCP calls it: `RUN/step-NNNNNNNN`."""
        return str(self.id)

    @property
    def step(self) -> int:
        return self.id.step


def _ids(volume: Volume, run: str | None) -> list[CheckpointId]:
    prefix = "" if run is None else f"{check_run(run)}/step-"
    found = (parse_manifest_name(entry.name) for entry in volume.list(prefix))
    return sorted(id for id in found if id is not None and (run is None or id.run == check_run(run)))


def list_checkpoints(volume: Volume, run: str | None = None) -> list[CheckpointInfo]:
    """All committed checkpoints of a run (or of all runs), by run and step. Reads at most 4 KiB of each.

    Follows the volume's log first. CheckpointFailed where a manifest is not one.
    """
    volume.refresh()
    return [_info(volume, id) for id in _ids(volume, run)]


def latest(volume: Volume, run: str) -> CheckpointInfo | None:
    """The committed checkpoint of the highest step, or None."""
    volume.refresh()
    ids = _ids(volume, run)
    return _info(volume, ids[-1]) if ids else None


def _info(volume: Volume, id: CheckpointId) -> CheckpointInfo:
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
        near = [str(other) for other in _ids(volume, id.run)]
        raise ObjectNotFound(
            f"there is no committed checkpoint {id}",
            found=f"{len(near)} of this run, the last {near[-1]}" if near else "none of this run",
        ) from None
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


def objects_of(volume: Volume, id: CheckpointId) -> list[str]:
    """Names of all committed objects of a checkpoint."""
    return [entry.name for entry in volume.list(f"{id}/")]


def steps_beyond(volume: Volume, newest: CheckpointId, keep_last: int) -> list[CheckpointId]:
    """Committed checkpoints of the run that go when `keep_last` remain, `newest` (perhaps not committed) counted."""
    others = [id for id in _ids(volume, newest.run) if id != newest]
    return others[: max(0, len(others) - (keep_last - 1))]


def delete_checkpoints(session: Session, ids: Iterable[CheckpointId]) -> int | None:
    """Delete these checkpoints in one commit, all or none; its sequence number, None where there was nothing to do.

    ObjectNotFound, before anything is deleted, where one does not exist.
    """
    names: list[str] = []
    for id in ids:
        found = objects_of(session.volume, id)
        if id.manifest not in found:
            raise ObjectNotFound(f"there is no committed checkpoint {id}")
        names += found
    if not names:
        return None
    with session.transaction() as tx:
        for name in names:
            tx.delete(name)
    return tx.sequence


def keep_last(session: Session, run: str, count: int) -> list[CheckpointId]:
    """Delete the oldest checkpoints of a run, in one commit, until `count` remain; those that went."""
    if count < 1:
        raise UsageError("keep_last", expected="at least 1", found=str(count))
    ids = _ids(session.volume, run)
    gone = ids[: max(0, len(ids) - count)]
    delete_checkpoints(session, gone)
    return gone
