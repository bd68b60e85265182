"""An area of the log that was in force, and whose header no copy has any more.

Its generation is only known from its records. Without this look the area before it would be taken for the one in
force, and what was committed since would be gone without a word: its last record says MOVED, but not after a session
whose predecessor did not end (docs/volume-format.md, 4.3).

    snapshot records     written before the header: a move that a crash cut short leaves them, and they prove nothing
    records behind them  written after it: their sequence is above that of the snapshot
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.volume.layout import ALIGN, RecordHead


def was_in_force(copies: Iterable[bytes], volume_id: bytes, generation: int) -> bool:
    """Do the blocks of an area, from block 0 on, as each copy has them, hold more than a snapshot of a generation above
    this one?"""
    sequences: dict[int, set[int]] = {}
    for data in copies:
        for block in range(1, len(data) // ALIGN):
            head = RecordHead.decode(data[block * ALIGN : block * ALIGN + 64], volume_id, block)
            if head is not None and head.generation > generation:
                sequences.setdefault(head.generation, set()).add(head.sequence)
    return any(len(found) > 1 for found in sequences.values())
