"""Commands that are ended at any moment: two of them, others each time; many by `python -m tests.volume.commands`."""

from __future__ import annotations

import random
from pathlib import Path

from tests.volume.commands.rounds import KINDS, Rounds


def test_commands_that_are_ended_anywhere_leave_nothing_half(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    with Rounds(tmp_path, seed) as rounds:
        try:
            for kind in random.Random(seed).sample(KINDS, 2):
                rounds.run(kind)
        except AssertionError as error:
            raise AssertionError("\n".join([f"seed {seed}", *rounds.log[-8:]])) from error
