"""Ranks that follow a volume together: one looks, and all see what it saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ObjectNotFound, UsageError
from headrace.volume import Volume
from tests.torch.crew import Crew, Rank


def following(rank: Rank, uris: list[str]) -> dict[str, Any]:
    from headrace.errors import HeadraceError
    from headrace.torch import Follower

    said: dict[str, Any] = {}
    with Volume.open(uris) as volume:
        looks = 0
        poll, refresh = volume.poll, volume.refresh

        def counted(look: Any) -> Any:
            def call() -> Any:
                nonlocal looks
                looks += 1
                return look()

            return call

        volume.poll, volume.refresh = counted(poll), counted(refresh)  # type: ignore[method-assign]
        follower = Follower(volume)
        said["first"] = follower.look()
        # By then it knows how the end of each copy of the log looks.
        follower.look()
        quiet = looks
        for _ in range(5):
            follower.look()
        said["quiet"] = looks - quiet
        rank.say("looked")
        said["shard"] = follower.wait_for("shard", interval_s=0.01, timeout_s=50).length_bytes
        said["then"] = follower.look()
        try:
            follower.wait_for("never", interval_s=0.01, timeout_s=0.05)
        except ObjectNotFound as error:
            said["never"] = str(error)
        # What the one that looks meets, all hear.
        if rank.rank == 0:
            volume.close()
        try:
            follower.look()
        except HeadraceError as error:
            said["closed"] = str(error)
        follower.close()
    return said


def test_one_rank_looks_for_all(tmp_path: Path) -> None:
    uris = [f"file:{tmp_path}/{name}" for name in "ab"]
    with Volume.create([f"{uri}?create=16MiB" for uri in uris]) as volume, volume.session("job") as session:
        with session.transaction() as tx:
            tx.put("first", b"1")
        crew = Crew(3, following, uris)
        for rank in range(3):
            crew.hear(rank, "looked")
        first = volume.sequence
        with session.transaction() as tx:
            tx.put("shard", bytes(5000))
        found = crew.join()
        assert [one["first"] for one in found] == [first] * 3
        assert [one["quiet"] for one in found] == [5, 0, 0], "only rank 0 asked the members"
        assert [one["shard"] for one in found] == [5000] * 3
        assert [one["then"] for one in found] == [volume.sequence] * 3
        assert all("no object 'never' came" in one["never"] for one in found)
        assert all("the volume is closed" in one["closed"] for one in found)


def test_one_process_alone() -> None:
    from headrace.torch import Follower

    with Volume.create("mem:16MiB") as volume, volume.session("job") as session:
        follower = Follower(volume)
        with session.transaction() as tx:
            tx.put("x", b"1")
        assert follower.look() == volume.sequence and follower.wait_for("x", timeout_s=0).name == "x"
        follower.close()
        with pytest.raises(UsageError, match="patience_s"):
            Follower(volume, patience_s=0)
