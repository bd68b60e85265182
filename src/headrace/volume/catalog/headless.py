"""An area of the log that was in force, and whose header no copy has any more.

Its generation is only known from its records. Without this look the area before it would be taken for the one in
force, and what was committed since would be gone without a word: its last record says MOVED, but not after a session
whose predecessor did not end (docs/volume-format.md, 4.3).

    snapshot records     written before the header: a move that a crash cut short leaves them, and they prove nothing
    records behind them  written after it: their sequence is above that of the snapshot
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.volume.layout import ALIGN, RECORD_BYTES, RecordHead


def was_in_force(pieces: Iterable[tuple[int, bytes]], volume_id: bytes, generation: int) -> bool:
    """Do the blocks of an area, as any copy has them, hold more than a snapshot of a generation above this one?
    `pieces`: (the first block, bytes)."""
    sequences: dict[int, int] = {}
    for first, data in pieces:
        for at in range(0, len(data), ALIGN):
            head = RecordHead.decode(data[at : at + RECORD_BYTES], volume_id, first + at // ALIGN)
            if head is None or head.generation <= generation:
                continue
            if sequences.setdefault(head.generation, head.sequence) != head.sequence:
                return True
    return False
