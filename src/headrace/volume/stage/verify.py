"""What is staged, read back from the medium."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.errors import HeadraceError
from headrace.volume.stage.cache import forget
from headrace.volume.stage.fill import PIECE_BYTES
from headrace.volume.stage.plan import Plan
from headrace.volume.stage.read import Sources
from headrace.volume.stage.store import Held

if TYPE_CHECKING:
    from headrace.volume.volume import Volume

#: Places at which it is seen whether the kernel has let go of a stage.
_PROBES = 64


@dataclass(frozen=True)
class Verified:
    #: Chunks that did not match.
    bad: list[int]
    #: It came from the medium, and not from what the kernel had of it in memory.
    past_memory: bool


def verify(
    volume: Volume,
    plan: Plan,
    held: Held,
    *,
    progress: Callable[[int, int], None] | None = None,
    stop: threading.Event | None = None,
) -> Verified:
    """Read what is there back, and hold it against the volume's checksums. Chunks that do not match are not marked any
    more. As far as it has come when `stop` is set. DeviceError."""
    held.flush()
    there = np.flatnonzero(held.there & plan.wanted)
    forgot = forget(held.address.path, _places(plan, there))
    sources = Sources(volume, held.device, plan.facts)
    bad: list[int] = []
    buffer = np.empty(PIECE_BYTES, np.uint8)
    for done, chunk in enumerate(plan.chunks(held.there)):
        if stop is not None and stop.is_set():
            break
        for at in range(0, chunk.length, PIECE_BYTES):
            count = min(PIECE_BYTES, chunk.length - at)
            try:
                sources.read(plan.parts[chunk.blob][2], chunk.start + at, buffer[:count])
            except HeadraceError:
                bad.append(chunk.number)
                break
        if progress is not None:
            progress(done + 1, len(there))
    if bad:
        held.mark(bad, there=False)
    return Verified(bad=bad, past_memory=forgot)


def _places(plan: Plan, chunks: npt.NDArray[Any]) -> list[int]:
    """The first bytes of some of these chunks, in the stage."""
    some = chunks[:: max(1, len(chunks) // _PROBES)]
    blobs = plan.facts.blobs
    blob = np.searchsorted(blobs["first_chunk"], some, side="right") - 1
    within = (some - blobs["first_chunk"][blob]) * plan.facts.chunk_bytes
    found: list[int] = (plan.facts.base + blobs["data_at"][blob] + within).tolist()
    return found
