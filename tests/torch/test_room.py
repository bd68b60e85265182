"""Room for a job's checkpoints, before its first step: real ranks are told what one of them finds out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import CheckpointFailed, UsageError, VolumeFull
from headrace.torch import VolumeWriter, WriterOptions
from headrace.units import MIB
from headrace.volume import Volume
from tests.torch.crew import Crew, Rank

#: Of the state below: what both ranks have is written once.
SHARED, OWN = 500_000, 250_000


def state_of(rank: Rank) -> dict[str, Any]:
    return {
        "shared": torch.zeros(SHARED, dtype=torch.uint8),
        f"own-{rank.rank}": torch.zeros(OWN, dtype=torch.uint8),
        "step": 1,
    }


def reserve(rank: Rank, uri: str) -> list[Any]:
    found: list[Any] = []
    for count in (40, 3):
        with VolumeWriter(uri, "run", options=WriterOptions(keep_last=count)) as writer:
            try:
                found.append(writer.reserve(state_of(rank)))
                assert writer.save(state_of(rank), "run/step-1").ranks == rank.world
            except VolumeFull as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_all_ranks_hear_that_the_volume_is_too_small(tmp_path: Path, world: int) -> None:
    uri = f"file:{tmp_path}/member"
    Volume.create(f"{uri}?create=32MiB").close()
    for told, size in Crew(world, reserve, uri).join():
        assert "keep_last=40 checkpoints and one in the making" in told and "are missing" in told
        # The counter is a pickle of some hundred bytes.
        assert 0 < size - SHARED - world * OWN < 2000


def test_what_is_kept_is_kept_from_others(tmp_path: Path) -> None:
    uri = f"file:{tmp_path}/member"
    Volume.create(f"{uri}?create=32MiB").close()
    with Volume.open(uri, write=True) as volume, volume.session(run_id="run") as session:
        writer = VolumeWriter(volume, "run", session=session)
        writer.reserve({"w": torch.zeros(5 * MIB, dtype=torch.uint8)})
        assert 5 * MIB < session.reserved_bytes < 6 * MIB
        with pytest.raises(VolumeFull, match="too small for one more checkpoint"):
            writer.reserve({"w": torch.zeros(64 * MIB, dtype=torch.uint8)})
        with pytest.raises(CheckpointFailed, match=r"rank 0: this state cannot be saved"):
            writer.reserve({"f": lambda: 0})
        writer.close()
    with pytest.raises(UsageError, match="keep_every without keep_last"):
        WriterOptions(keep_every=5)
