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

import math
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
    #: Came in one commit with others, and the manifest cannot be read: where among these they belong nobody knows. They
    #: are behind them, so that who asks for the latest hears of the damage instead of getting another one.
    unplaced: frozenset[CheckpointId] = frozenset()


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
    together = Counter((id.run, entry.sequence) for id, entry in ids)
    keys: dict[CheckpointId, tuple[str, int, float, int]] = {}
    unplaced = set()
    for id, entry in ids:
        saved_unix: float | None = 0.0
        if together[id.run, entry.sequence] > 1:
            saved_unix = _saved_unix(volume, entry)
            if saved_unix is None:
                unplaced.add(id)
        keys[id] = id.run, entry.sequence, math.inf if saved_unix is None else saved_unix, id.step
    return Found(
        ids=sorted(keys, key=keys.__getitem__),
        pinned=frozenset(pins).intersection(keys),
        unplaced=frozenset(unplaced),
    )


def _saved_unix(volume: Volume, manifest: ObjectInfo) -> float | None:
    try:
        data = volume.read(manifest.name, 0, min(manifest.length_bytes, SUMMARY_END))
        return decode_summary(data).created_unix
    except (CheckpointFailed, ObjectNotFound, *DAMAGES):
        return None


def line(ids: Sequence[CheckpointId]) -> list[CheckpointId]:
    """Those of one run, in the order of their commits, that the last of them goes on from, and itself."""
    found: list[CheckpointId] = []
    for id in reversed(ids):
        if not found or id.step < found[-1].step:
            found.append(id)
    return found[::-1]


def back_from(found: Found, id: CheckpointId) -> list[CheckpointId]:
    """This one, and where a run may go back to from it, in that order: its line."""
    before = found.ids[: found.ids.index(id)]
    if id not in found.unplaced:
        return line([*(one for one in before if one not in found.unplaced), id])[::-1]
    # What came with it may have come before it or behind it: what has lower steps did so more likely.
    placed = line([one for one in before if one not in found.unplaced])[::-1]
    return [id, *sorted(placed, key=lambda one: one.step > id.step)]
