"""Groups of our own do not depend on how many others a rank has made: one that failed in between joins the next."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import CheckpointFailed, DeviceError, UsageError
from headrace.volume import Volume
from tests.torch.crew import Crew, Rank

WORLD = 3


def one_by_one(rank: Rank, uris: list[str]) -> list[Any]:
    """Rank 2 is in fewer groups than the others, and rank 1 does not come where they make one of ours. Then all save,
    load and follow together."""
    import torch
    import torch.distributed as dist

    from headrace.torch import Checkpointer, Follower, VolumeWriter, WriterOptions
    from headrace.torch.ranks.agreement import Ranks

    two = dist.new_group([0, 1])
    all_of_them = dist.new_group([0, 1, 2])
    if rank.rank == 1:
        # It fails in its own way, while the others make their group.
        rank.hear()
    else:
        with pytest.raises(CheckpointFailed) as caught:
            VolumeWriter(uris, "run", options=WriterOptions(stall_s=1.0, deadline_s=1.0))
        assert rank.rank or re.search(r"ranks? 1\b.* did not finish within 1.0 s", str(caught.value))
        with pytest.raises(DeviceError, match=r"did not finish within 1\.0 s"):
            Ranks(deadline_s=1.0, purpose="follow", failure=DeviceError)
        rank.say("alone")
    if rank.rank == 2:
        with pytest.raises(UsageError, match="not one of process_group"):
            Ranks(two)
    found: list[Any] = []
    for group in (None, all_of_them):
        model = torch.nn.Linear(3, 3)
        with Checkpointer(uris, "run", process_group=group) as checkpointer:
            checkpointer.save(len(found) + 1, model, wait=True)
            found.append(checkpointer.restore("latest", model))
    with Volume.open(uris) as volume:
        follower = Follower(volume, group=all_of_them)
        found.append(follower.look())
        # Each leaves when it likes.
        follower.close()
    assert isinstance(dist.new_group(backend="gloo"), dist.ProcessGroup)
    return found


def test_a_rank_that_failed_between_two_groups_joins_the_next(tmp_path: Path) -> None:
    uris = [f"file:{tmp_path}/member"]
    Volume.create([f"{uris[0]}?create=64MiB"]).close()
    crew = Crew(WORLD, one_by_one, uris)
    for rank in (0, 2):
        crew.hear(rank, "alone")
    crew.say(1, "go on")
    found = crew.join()
    with Volume.open(uris) as volume:
        assert found == [[1, 2, volume.sequence]] * WORLD
