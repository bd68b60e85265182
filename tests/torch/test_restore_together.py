"""Ranks that load together: what several of them want is read once, and what befalls one of them all are told."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import ChecksumMismatch, HeadraceError
from headrace.volume import Volume
from tests.stopping import stopped
from tests.torch.crew import Crew, Rank, run

MIB = 1 << 20
STALL_S = 10.0
#: Nobody waits so long for a rank that gives no sign of life.
TIMEOUT_S = 300.0
WORLD = 3


def values() -> dict[str, np.ndarray]:
    """Two large tensors, and so many small ones that several are in a block."""
    chance = np.random.default_rng(1)
    large = {name: chance.standard_normal((1021, 1536)).astype(np.float32) for name in ("embed", "head")}
    return large | {f"norm.{n}": chance.standard_normal(1000).astype(np.float32) for n in range(70)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    import torch

    from headrace.torch import VolumeWriter

    folder = tmp_path_factory.mktemp("volume")
    uris = [f"file:{folder}/member{i}" for i in range(2)]
    Volume.create([f"{uri}?create=64MiB" for uri in uris]).close()
    with VolumeWriter(uris) as writer:
        writer.save(
            {name: torch.from_numpy(value) for name, value in values().items()} | {"note": "x" * 999}, "run/step-1"
        )
    return uris


def loading(rank: Rank, argument: tuple[list[str], str, int]) -> Any:
    """Loads twice; in the first time the victim says its fate at its first tensor, and meets it there. Returns the
    reports, or the error."""
    import torch
    from torch.distributed.checkpoint import DefaultLoadPlanner

    from headrace.torch import VolumeReader

    uris, fate, victim = argument

    class Planner(DefaultLoadPlanner):
        met = False

        def commit_tensor(self, read_item: Any, tensor: Any) -> None:
            if rank.rank == victim and fate and not self.met:
                self.met = True
                rank.say(fate)
                if fate == "raise":
                    raise OSError("no more memory, say")
                rank.hear()
            super().commit_tensor(read_item, tensor)

    reports = []
    with VolumeReader(uris, "run", timeout_s=TIMEOUT_S, stall_s=STALL_S) as reader:
        for _ in range(2):
            into: dict[str, Any] = {name: torch.zeros(value.shape) for name, value in values().items()}
            # One of another dtype, and one that is not contiguous: through a bounce buffer.
            into |= {"note": "", "norm.7": torch.zeros(1000, dtype=torch.float64), "head": torch.zeros(1536, 1021).t()}
            try:
                reports.append(vars(reader.load(into, planner=Planner() if fate else None)))
            except HeadraceError as error:
                rank.say("failed")
                return type(error).__name__, str(error)
            for name, value in values().items():
                assert np.array_equal(into[name].numpy(), value), name
            assert into["note"] == "x" * 999
    return reports


def test_what_all_ranks_want_is_read_once_and_by_each_an_equal_part(saved: list[str]) -> None:
    found = run(WORLD, loading, (saved, "", 0))
    total = sum(value.nbytes for value in values().values())
    for reports in found:
        assert len(reports) == 2
        for report in reports:
            assert report["ranks"] == WORLD
            assert report["wanted_bytes"] >= total
            assert total < report["job_unique_bytes"] < total + 8000
            # Whole blocks, with the gaps between tensors.
            assert report["job_read_bytes"] <= report["job_unique_bytes"] + 64 * 80
            # In messages of several MiB, of which each rank reads as many.
            assert total / WORLD * 0.7 < report["read_bytes"] < total / WORLD * 1.4
            assert report["read_bytes"] + report["received_bytes"] == report["job_read_bytes"]


def test_ranks_hear_by_name_what_one_of_them_met(saved: list[str]) -> None:
    for kind, text in run(WORLD, loading, (saved, "raise", 1)):
        assert kind == "CheckpointFailed"
        assert "rank 1" in text and "no more memory, say" in text


def unready(rank: Rank, uris: list[str]) -> list[str]:
    """Rank 1 fails between the round of plans and the exchange; with a planner that sees all plans, too."""
    import torch
    from torch.distributed.checkpoint import DefaultLoadPlanner

    from headrace.torch import VolumeReader
    from headrace.torch.load import reader as reader_module

    class Planner(DefaultLoadPlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            if rank.rank == 1:
                raise OSError("no plan, say")
            return super().finish_plan(new_plan)

    class Global(Planner):
        def create_global_plan(self, global_plan: list[Any]) -> list[Any]:
            assert len(global_plan) == WORLD
            return super().create_global_plan(global_plan)

    class Every(DefaultLoadPlanner):
        def create_global_plan(self, global_plan: list[Any]) -> list[Any]:
            return super().create_global_plan(global_plan)

    found = []
    with VolumeReader(uris, "run", timeout_s=TIMEOUT_S, stall_s=STALL_S) as reader:
        for planner in (Planner(), Global()):
            with pytest.raises(HeadraceError) as caught:
                reader.load({name: torch.zeros(value.shape) for name, value in values().items()}, planner=planner)
            found.append(str(caught.value))
        for planner in (None, Every()):
            into = {"norm.1": torch.zeros(1000)}
            reader.load(into, planner=planner)
            assert np.array_equal(into["norm.1"].numpy(), values()["norm.1"])
    # What two of them want and the third does not, what each wants alone, and a manifest that goes from rank to rank.
    alone = f"norm.{20 * rank.rank}"
    for names, along in ((["norm.1"] if rank.rank < 2 else ["embed"], None), ([alone], None), (["head", alone], 0)):
        if along is not None:
            reader_module.ALONG_BYTES = along
        with VolumeReader(uris, "run", timeout_s=TIMEOUT_S, stall_s=STALL_S) as reader:
            into = {name: torch.zeros(values()[name].shape) for name in names}
            report = reader.load(into)
        assert all(np.array_equal(into[name].numpy(), values()[name]) for name in names)
        assert (report.received_bytes > 0) == ("head" in names or (names == ["norm.1"] and not report.read_bytes))
    return found


def test_a_rank_that_fails_before_it_reads_keeps_nobody_waiting(saved: list[str]) -> None:
    for texts in run(WORLD, unready, saved):
        for text in texts:
            assert "rank 1" in text and "no plan, say" in text


def test_a_killed_rank_is_named(saved: list[str]) -> None:
    crew = Crew(WORLD, loading, (saved, "kill", 1))
    crew.hear(1, "kill")
    os.kill(crew.pids[1], signal.SIGKILL)
    outcomes = crew.join(dead=(1,))
    for survivor in (0, 2):
        kind, text = outcomes[survivor]
        assert kind == "CheckpointFailed" and "rank 1 gave no sign of life" in text, text


def test_a_stopped_rank_is_named_within_the_deadline(saved: list[str]) -> None:
    crew = Crew(WORLD, loading, (saved, "stop", 2))
    crew.hear(2, "stop")
    with stopped(crew.pids[2]):
        for rank in (0, 1):
            crew.hear(rank, "failed")
    crew.say(2, "go on")
    outcomes = crew.join()
    for kind, text in outcomes[:2]:
        assert kind == "CheckpointFailed" and "rank 2 gave no sign of life" in text, text
    # It finds that it was given up, or that the others are gone.
    assert outcomes[2][0] == "CheckpointFailed"


def not_coming(rank: Rank, uris: list[str]) -> str:
    import torch

    from headrace.torch import VolumeReader

    if rank.rank == 1:
        rank.hear()
        return ""
    with VolumeReader(uris, "run", timeout_s=1.0) as reader, pytest.raises(HeadraceError) as caught:
        reader.load({"embed": torch.zeros(1021, 1536)})
    rank.say("failed")
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named(saved: list[str]) -> None:
    crew = Crew(2, not_coming, saved)
    crew.hear(0, "failed")
    crew.say(1, "end")
    assert "rank 1 did not finish within 1.0 s" in crew.join()[0]


def damaged_on_the_way(rank: Rank, uris: list[str]) -> str:
    """What rank 1 sends is changed behind its back."""
    import torch

    from headrace.torch import VolumeReader
    from headrace.torch.load.together import Together

    send = Together.send

    def changed(self: Together, tensor: torch.Tensor, *where: int) -> Any:
        tensor[len(tensor) // 2] ^= 1
        return send(self, tensor, *where)

    if rank.rank == 1:
        Together.send = changed  # type: ignore[method-assign, assignment]
    into = {name: torch.zeros(value.shape) for name, value in values().items()}
    with VolumeReader(uris, "run", timeout_s=TIMEOUT_S, stall_s=STALL_S) as reader:
        with pytest.raises(ChecksumMismatch) as caught:
            reader.load(into)
        Together.send = send  # type: ignore[method-assign]
        reader.load(into)
    for name, value in values().items():
        assert np.array_equal(into[name].numpy(), value), name
    return str(caught.value)


def test_bytes_that_another_rank_read_are_compared_when_they_come(saved: list[str]) -> None:
    for text in run(WORLD, damaged_on_the_way, saved):
        assert "damaged on their way from rank 1" in text


def behind_one_that_was_given_up(rank: Rank, _: None) -> bytes:
    from headrace.torch.load.together import Together
    from headrace.torch.ranks import aside
    from headrace.torch.ranks.coordination import PeerFailed

    # Who has given up waits no longer than this.
    aside.LOOK_S = aside.GRACE_S = 0.05
    ranks = Together(None, timeout_s=TIMEOUT_S, stall_s=STALL_S)
    ranks._give_up(PeerFailed("of the load before"))
    ranks.close()
    with ranks.meeting():
        ranks.group()
        if rank.rank == 0:
            time.sleep(1.0)
        return ranks.broadcast(b"manifest" if rank.rank == 0 else None, 8)


def test_what_was_given_up_in_a_load_is_waited_for_in_the_next() -> None:
    assert run(WORLD, behind_one_that_was_given_up, None) == [b"manifest"] * WORLD


def some_and_then_all(rank: Rank, uris: list[str]) -> list[float]:
    """Rank 2 is in fewer groups than the others, and has made fewer."""
    import torch
    import torch.distributed as dist

    from headrace.torch import VolumeReader

    two = dist.new_group([0, 1])
    found = []
    for ranks in (two, None, None):
        if ranks is two and rank.rank == 2:
            continue
        with VolumeReader(uris, "run", timeout_s=TIMEOUT_S, stall_s=STALL_S) as reader:
            into = {"norm.1": torch.zeros(1000)}
            reader.load(into, process_group=ranks)
            found.append(float(into["norm.1"].sum()))
    # Nor do the job's own groups notice.
    assert dist.get_world_size(dist.new_group(backend="gloo")) == WORLD
    return found


def test_ranks_load_together_though_some_of_them_have_before(saved: list[str]) -> None:
    expected = pytest.approx(float(values()["norm.1"].sum()), rel=1e-3, abs=1e-3)
    assert run(WORLD, some_and_then_all, saved) == [[expected] * 3, [expected] * 3, [expected] * 2]


def damaged(rank: Rank, uris: list[str]) -> tuple[str, str]:
    import torch

    from headrace.torch import VolumeReader

    into = {name: torch.zeros(value.shape) for name, value in values().items()}
    with VolumeReader(uris, "run", timeout_s=30) as reader, pytest.raises(HeadraceError) as caught:
        reader.load(into)
    return type(caught.value).__name__, str(caught.value)


def test_damage_that_one_rank_reads_is_named_to_all(tmp_path: Path) -> None:
    import torch

    from headrace.torch import VolumeWriter

    path = tmp_path / "member"
    Volume.create([f"file:{path}?create=64MiB"]).close()
    with VolumeWriter(f"file:{path}") as writer:
        writer.save({name: torch.from_numpy(value) for name, value in values().items()}, "run/step-1")
    pattern = values()["head"][500:510].tobytes()
    with path.open("r+b") as file:
        at = file.read().index(pattern)
        file.seek(at)
        file.write(bytes([pattern[0] ^ 1]))
    found = run(WORLD, damaged, [f"file:{path}"])
    assert {kind for kind, _ in found} == {"ChecksumMismatch"}
    for _, text in found:
        assert "'head'" in text
    # Who read it tells it without its own number.
    assert sum(text.startswith("rank ") for _, text in found) >= WORLD - 1


def test_a_load_that_fails_prints_no_traceback(saved: list[str], caplog: pytest.LogCaptureFixture) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from headrace.torch import VolumeReader

    with (
        VolumeReader(saved, "run/step-7") as reader,
        pytest.raises(CheckpointException, match="no committed checkpoint"),
    ):
        dcp.load({}, storage_reader=reader, no_dist=True)
    # What DCP says to people goes to the root logger; those of its own name print nothing.
    assert not [record for record in caplog.records if record.name == "root"]
