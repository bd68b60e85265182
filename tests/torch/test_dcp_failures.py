"""A rank that dies, stops or fails in mid-save: the others hear of it in time, by name, and nothing is seen."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from headrace.checkpoint import latest
from headrace.errors import CheckpointFailed
from headrace.volume import Volume
from tests.torch.crew import Crew, Rank

MIB = 1 << 20
STALL_S = 6.0


@pytest.fixture
def volume(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("volume")
    uris = [f"file:{folder}/member{i}" for i in range(2)]
    Volume.create([f"{uri}?create=64MiB" for uri in uris]).close()
    return uris


def saving_with_a_victim(rank: Rank, argument: tuple[list[str], int, dict[int, str]]) -> list[tuple[str, str, float]]:
    """Saves one step after another; in the steps named, the victim tells the test in the middle of its write, and then
    meets its fate. Returns for each step the error, or "saved", and the seconds it took."""
    import torch
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from headrace.torch import VolumeWriter, WriterOptions

    uris, victim, steps = argument

    class Planner(DefaultSavePlanner):
        fate = ""

        def resolve_data(self, write_item: Any) -> Any:
            if rank.rank == victim and self.fate and write_item.index.fqn == "b":
                rank.say(self.fate)
                if self.fate == "raise":
                    raise OSError("no more memory, say")
                rank.hear()
            return super().resolve_data(write_item)

    mesh = init_device_mesh("cpu", (rank.world,))
    state = {name: DTensor.from_local(torch.full((5000,), float(rank.rank)), mesh, [Shard(0)]) for name in "abc"}
    outcomes = []
    with VolumeWriter(uris, "run", options=WriterOptions(stall_s=STALL_S, deadline_s=60)) as writer:
        exchange: Any = writer._exchange
        whole_round = exchange.round

        def telling_round(*arguments: Any) -> bytes:
            # Behind it DCP waits for the victim, so the save itself cannot say so yet.
            try:
                return bytes(whole_round(*arguments))
            except CheckpointFailed:
                rank.say("gave up")
                raise

        exchange.round = telling_round
        for step, fate in steps.items():
            planner = Planner()
            planner.fate = fate
            rank.say(f"begin {step}")
            began = time.monotonic()
            try:
                report = writer.save(state, f"run/step-{step}", planner=planner)
                outcomes.append(("saved", str(report.sequence), time.monotonic() - began))
            except CheckpointFailed as error:
                outcomes.append(("CheckpointFailed", str(error), time.monotonic() - began))
    return outcomes


def saving_alone(rank: Rank, uris: list[str]) -> list[tuple[str, str, float]]:
    import torch

    from headrace.torch import VolumeWriter

    with VolumeWriter(uris, "run") as writer:
        report = writer.save({"a": torch.ones(5000)}, "run/step-1")
    return [("saved", str(report.sequence), report.write_seconds)]


def last_step(uris: list[str]) -> int:
    with Volume.open(uris) as opened:
        found = latest(opened, "run")
        names = [entry.name for entry in opened.list("")]
    assert found is not None
    assert {name.split("/")[1] for name in names} == {f"step-{step:08d}" for step in range(found.step + 1)}, names
    return found.step


def comes_back_and_goes_on(uris: list[str]) -> None:
    """The job again, with another number of ranks: it takes over from the dead one and saves the step that failed."""
    [[(outcome, _, _)]] = Crew(1, saving_alone, uris).join()
    assert outcome == "saved"
    assert last_step(uris) == 1


def test_a_rank_is_killed_while_it_writes(volume: list[str]) -> None:
    crew = Crew(3, saving_with_a_victim, (volume, 1, {0: "", 1: "kill"}))
    crew.hear(1, "kill")
    os.kill(crew.pids[1], signal.SIGKILL)
    outcomes = crew.join(dead=(1,))
    for survivor in (0, 2):
        (first, *_), (second, text, seconds) = outcomes[survivor]
        assert (first, second) == ("saved", "CheckpointFailed")
        assert "rank 1 gave no sign of life" in text
        assert STALL_S / 2 < seconds < 60
    assert last_step(volume) == 0
    comes_back_and_goes_on(volume)


def test_a_rank_is_stopped_for_longer_than_it_may(volume: list[str]) -> None:
    crew = Crew(2, saving_with_a_victim, (volume, 1, {0: "", 1: "stop", 2: ""}))
    crew.hear(1, "stop")
    os.kill(crew.pids[1], signal.SIGSTOP)
    crew.hear(0, "gave up")
    os.kill(crew.pids[1], signal.SIGCONT)
    crew.say(1, "go on")
    for rank, outcomes in enumerate(crew.join()):
        assert [outcome for outcome, _, _ in outcomes] == ["saved", "CheckpointFailed", "saved"], outcomes
        assert "rank 1 gave no sign of life" in outcomes[1][1], rank
    with Volume.open(volume) as opened:
        assert {entry.name.split("/")[1] for entry in opened.list("")} == {"step-00000000", "step-00000002"}


def test_a_rank_fails_and_all_hear_its_reason(volume: list[str]) -> None:
    crew = Crew(2, saving_with_a_victim, (volume, 1, {0: "", 1: "raise"}))
    for outcomes in crew.join():
        assert outcomes[1][0] == "CheckpointFailed"
        assert "rank 1" in outcomes[1][1]
        assert "no more memory, say" in outcomes[1][1]
    assert last_step(volume) == 0


def failing_again_and_again(rank: Rank, uris: list[str]) -> int:
    """Rank 1 fails in every save when rank 0 has written; returns what waits for late writes at the end."""
    import torch
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from headrace.torch import VolumeWriter

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if rank.rank == 1:
                raise OSError("no more memory, say")
            return super().resolve_data(write_item)

    mesh = init_device_mesh("cpu", (rank.world,))
    mine = torch.ones(6 if rank.rank == 0 else 5, 500_000)
    state = {"a": DTensor.from_local(mine, mesh, [Shard(0)], shape=torch.Size((11, 500_000)), stride=(500_000, 1))}
    with VolumeWriter(uris, "run") as writer:
        for step in range(3):
            with pytest.raises(CheckpointFailed, match="no more memory"):
                writer.save(state, f"run/step-{step}", planner=Planner())
        return writer._attachment.session().quarantined_bytes if rank.rank == 0 else 0


def test_ranks_that_wrote_leave_no_space_waiting_when_another_one_failed(volume: list[str]) -> None:
    share = 5 * 500_000 * 4
    assert Crew(2, failing_again_and_again, volume).join()[0] <= 3 * (share + MIB)


def test_the_coordinator_is_killed_and_the_next_job_takes_over(volume: list[str]) -> None:
    crew = Crew(2, saving_with_a_victim, (volume, 0, {0: "", 1: "kill"}))
    crew.hear(0, "kill")
    os.kill(crew.pids[0], signal.SIGKILL)
    outcomes = crew.join(dead=(0,))
    assert outcomes[1][1][0] == "CheckpointFailed"
    assert last_step(volume) == 0
    comes_back_and_goes_on(volume)


def saving_what_is_not_the_same(rank: Rank, uris: list[str]) -> list[str]:
    """Rank 1 cannot copy its second state, and has another name for the fourth. Rank 2 has nothing of its own to write,
    and another name for the fifth."""
    import torch

    from headrace.torch import VolumeWriter, WriterOptions

    outcomes = []
    with VolumeWriter(uris, "run", options=WriterOptions(stall_s=STALL_S, deadline_s=50)) as writer:
        for step in range(6):
            state = {"all": torch.ones(5000)}
            if rank.rank < 2:
                state[f"own {rank.rank}"] = torch.ones(10)
            if (step, rank.rank) == (1, 1):
                state["bad"] = torch.eye(3).to_sparse()
            name = 90 + rank.rank if (step, rank.rank) in ((3, 1), (4, 2)) else step
            try:
                outcomes.append(writer.async_save(state, f"run/step-{name}").result().checkpoint_id)
            except CheckpointFailed as error:
                outcomes.append(str(error))
    return outcomes


def test_a_rank_that_cannot_copy_or_saves_another_step_fails_that_save_and_no_other(volume: list[str]) -> None:
    for rank, outcomes in enumerate(Crew(3, saving_what_is_not_the_same, volume).join()):
        for step in (0, 2, 5):
            assert outcomes[step] == f"run/step-{step:08d}", (rank, outcomes)
        assert "'bad' is not a dense tensor" in outcomes[1]
        assert rank == 1 or "rank 1 could not copy its state" in outcomes[1]
        for step, guilty in ((3, 1), (4, 2)):
            assert f"different checkpoints at rank {guilty}" in outcomes[step]
            assert f"expected run/step-{step:08d}, as rank 0, found run/step-{90 + guilty:08d}" in outcomes[step]
    with Volume.open(volume) as opened:
        assert {entry.name.split("/")[1] for entry in opened.list("")} == {f"step-{step:08d}" for step in (0, 2, 5)}
