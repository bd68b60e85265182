"""Some rounds of `python -m tests.torch.kills`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch.kills.rounds import History, Rounds


@pytest.mark.timeout(400)
def test_rounds_of_kills(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path, seed=6, worlds=(2,))
    try:
        happened(rounds, "target and job are killed", "target and job are killed")
        happened(rounds, "another job takes over", "taken over")
    except BaseException:
        print("\n".join(rounds.log))
        raise
    finally:
        rounds.close()
    assert rounds.counts["commits acknowledged"] >= 3 and rounds.counts["checkpoints compared"] >= 2


def happened(rounds: Rounds, accident: str, what: str) -> None:
    """A job may give up before, on a machine that stands still for longer than a save waits; not every one."""
    for _ in range(3):
        rounds.run(accident, mode="checkpointer")
        if rounds.counts[what]:
            return
    raise AssertionError(f"not once in three rounds: {what}; {dict(rounds.counts)}")


def test_what_may_be_restored() -> None:
    history = History()
    for save in ((1, 1), (2, 1)):
        history.begun(save)
    history.was_acknowledged((1, 1))
    for wrong in ((1, 2), (3, 1), (0, 0)):
        with pytest.raises(AssertionError, match="was restored"):
            history.restored(wrong)
    history.restored((2, 1))
    history.begun((3, 2))
    history.was_acknowledged((3, 2))
    with pytest.raises(AssertionError, match="was restored"):
        history.restored((2, 1))
