"""In which order the checkpoints of a run were committed, and which of them its last one goes on from.

The order is that of commits: the sequence that the volume notes with each object, here the manifest. It needs no
clock, and the number of a step does not matter: a job that went back to step 500, because step 1000 had diverged, and
has saved step 510, goes on from that. What one commit brought together (a copy out of another volume) is in the order
in which it was saved, as the manifests say.

Nothing says which checkpoint a save goes on from. Steps of one training only grow, so what was committed before, with
the same step or a higher one, was left behind: the *line* of a checkpoint is what remains.

    committed   500   1000   510   520           line of 520: 500, 510, 520
                        left behind by 510
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.checkpoint.manifest import SUMMARY_END, decode_summary
from headrace.checkpoint.names import CheckpointId, check_run, parse_manifest_name, parse_pin_name
from headrace.checkpoint.ranges import DAMAGES
from headrace.errors import CheckpointFailed, ObjectNotFound
from headrace.volume import ObjectInfo, Volume


@dataclass(frozen=True, kw_only=True)
class Found:
    """The committed checkpoints of a run (or of all runs), by run and in the order of their commits."""

    ids: Sequence[CheckpointId]
    pinned: frozenset[CheckpointId]


def find(volume: Volume, run: str | None = None) -> Found:
    """One look at the names of a volume; and at 4 KiB of each manifest that came in one commit with others."""
    prefix = "" if run is None else f"{check_run(run)}/step-"
    ids, pins = [], []
    for entry in volume.list(prefix):
        manifest, pin = parse_manifest_name(entry.name), parse_pin_name(entry.name)
        if manifest is not None and run in (None, manifest.run):
            ids.append((manifest, entry))
        elif pin is not None and run in (None, pin.run):
            pins.append(pin)
    ordered = in_order(volume, ids)
    return Found(ids=ordered, pinned=frozenset(pins).intersection(ordered))


def in_order(volume: Volume, found: Sequence[tuple[CheckpointId, ObjectInfo]]) -> list[CheckpointId]:
    """By run, and as they were committed. `found`: with the manifest's object."""
    together = Counter((id.run, entry.sequence) for id, entry in found)

    def key(one: tuple[CheckpointId, ObjectInfo]) -> tuple[str, int, float, int]:
        id, entry = one
        alone = together[id.run, entry.sequence] == 1
        return id.run, entry.sequence, 0.0 if alone else _saved_unix(volume, entry), id.step

    return [id for id, _ in sorted(found, key=key)]


def _saved_unix(volume: Volume, manifest: ObjectInfo) -> float:
    try:
        data = volume.read(manifest.name, 0, min(manifest.length_bytes, SUMMARY_END))
        return decode_summary(data).created_unix
    except (CheckpointFailed, ObjectNotFound, *DAMAGES):
        # Behind the others: who asks for the latest hears that it is damaged, instead of getting another one.
        return manifest.created_s


def line(ids: Sequence[CheckpointId]) -> list[CheckpointId]:
    """Those of one run, in the order of their commits, that the last of them goes on from, and itself."""
    found: list[CheckpointId] = []
    for id in reversed(ids):
        if not found or id.step < found[-1].step:
            found.append(id)
    return found[::-1]
