"""Structures whose checksums are right, and whose fields make no sense. More: `python -m tests.volume.forged`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.volume.forged import Wish, forge, hurried, made, run, tried

CASES = 10


@pytest.mark.parametrize(
    ("kind", "wishes"),
    [
        # The number of a session, which is half of a birth number.
        ("payload", [[(197, 8, 1 << 62)]]),
        # A window on a member that is not there.
        ("payload", [[(103, 1, 254), (450, 8, 22680), (326, 8, 16990)]]),
        # Counters near the end of 64 bits, and a session that the log does not know.
        ("header", [[(0, 8, (1 << 64) - 1)], [(16, 8, (1 << 64) - 1)], [(32, 8, 1 << 63)], [(32, 8, 255)]]),
        ("heartbeat", [[(16, 8, (1 << 64) - 1)], [(40, 8, (1 << 64) - 1)]]),
        ("record", [[(at, 8, (1 << 64) - 1)] for at in range(5)]),
        ("superblock", [[(48, 8, (1 << 64) - 1)], [(112, 4, (1 << 32) - 1)]]),
    ],
)
def test_what_makes_no_sense_is_one_error(kind: str, wishes: list[Wish]) -> None:
    with hurried():
        image = made(2)
        for wish in wishes:
            assert tried(forge(image, kind, wish), f"{kind} {wish}", Counter()) == []


def test_nobody_believes_a_checksum_alone() -> None:
    counts: Counter[str] = Counter()
    with hurried():
        assert run(CASES, 3, counts) == []
    assert sum(counts.values()) == 5 * CASES
