"""Processes that save: one that is killed, one that is told nonsense by the storage, time that is up."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from headrace.bench.patterns import checkpoint
from headrace.bench.patterns.options import Options
from headrace.bench.places import Shard, open_place
from headrace.bench.ranks import RankFailed, Ranks
from headrace.errors import DeviceTimeout, HeadraceError
from headrace.units import MIB


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_rank_that_is_killed_ends_the_run_and_leaves_nothing(folder: Path) -> None:
    with open_place(str(folder)) as place, Ranks(2) as ranks:
        pids = ranks.pids

        def kill(fraction: float, text: str) -> None:
            os.kill(pids[1], signal.SIGKILL)

        # At the first word of how far it is: there is enough to be written that it comes.
        with pytest.raises(HeadraceError, match=r"rank 1 ended.*SIGKILL"):
            checkpoint.run(place, Options(ranks=2, scale=0.01), kill, ranks)
        # At once: nobody waits for the one that goes on saving.
        assert not any(map(alive, pids))
    assert not [*folder.iterdir()]


def test_what_a_rank_is_told_by_the_storage_is_said(folder: Path) -> None:
    with open_place(str(folder)) as place, place.room([Shard("a", MIB)]) as room, Ranks(1) as ranks:
        pids = ranks.pids
        ranks.open(room.for_writer())
        (Path(room.for_writer()["folder"]) / "a").mkdir()
        with pytest.raises(RankFailed, match=r"rank 0: .+ at .*/a"):
            ranks.save([[0]], lambda moved: None)
        # What others still do is not waited for, and no late answer is taken for another one.
        assert not any(map(alive, pids))


def test_time_that_is_up_ends_a_save(folder: Path) -> None:
    with open_place(str(folder)) as place, place.room([Shard("a", MIB)]) as room, Ranks(1) as ranks:
        ranks.open(room.for_writer())
        ranks.deadline = time.monotonic() - 1
        with pytest.raises(DeviceTimeout, match="time of the run is up"):
            ranks.save([[0]], lambda moved: None)
