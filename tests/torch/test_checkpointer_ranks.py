"""A training job of several real ranks that is killed, told to stop, or finds damage, and goes on as if nothing was."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint import list_checkpoints
from headrace.errors import CheckpointFailed, HeadraceError, UsageError
from headrace.volume import Volume
from tests.dataset.corpora import ingest_texts
from tests.torch.crew import Crew, Rank, preload
from tests.torch.test_dcp_hazards import flip_a_bit

preload("headrace.demo.model", "headrace.torch.job.checkpointer", "headrace.torch.feed.loader", "tests.dataset.corpora")

STEPS = 7
SAVE_EVERY = 2
JOB: dict[str, Any] = {"run": "unbroken"}


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two file members with a corpus on them."""
    folder = tmp_path_factory.mktemp("volume")
    uris = [f"file:{folder}/member{i}" for i in range(2)]
    with Volume.create([f"{uri}?create=48MiB" for uri in uris]) as made:
        ingest_texts(made, folder, count=40)
    return uris


class Fated(Volume):
    """One whose owner says which save it writes for, and writes no further where somebody is waiting for that."""

    fate: Any = None

    def write_grant(self, grant: Any, buffer: Any) -> Any:
        if self.fate is not None:
            self.fate(grant.name)
        return super().write_grant(grant, buffer)


def train(rank: Rank, job: dict[str, Any]) -> dict[str, Any]:
    """From the latest step of the run, if there is one, to step `STEPS`. The loss of each step, with a number drawn by
    this rank's generator, and what the checkpointer had to say."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from headrace.demo.model import Gpt, GptOptions
    from headrace.torch import Checkpointer, Preemption, TokenLoader, WriterOptions

    # Other weights and numbers than any other crew's: what is not restored shows.
    torch.manual_seed(job.get("seed", 1))
    model: Any = Gpt(GptOptions(vocabulary=600, sequence=16, width=16, heads=2, layers=1)).double()
    if job.get("kind") == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (rank.world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    torch.manual_seed(rank.rank + 10 * job.get("seed", 1))

    opened = Fated.open(job["uris"], write=True)
    assert isinstance(opened, Fated)
    if job.get("dies_at") is not None:

        def die(name: str) -> None:
            if f"step-{job['dies_at']:08d}" in name:
                rank.say("writing")
                threading.Event().wait()

        opened.fate = die
    said: dict[str, Any] = {"losses": {}, "drawn": {}}
    loader = TokenLoader(opened, "corpus", sequence_length=16, global_batch=12, seed=5)
    preemption = Preemption(signals=(signal.SIGTERM,), grace_s=60.0)
    with Checkpointer(
        opened,
        job["run"],
        interval=SAVE_EVERY,
        preemption=preemption,
        certificate=job.get("certificate"),
        options=WriterOptions(stall_s=20.0),
    ) as checkpointer:
        done = checkpointer.restore(
            "latest", model, optimizer, loader, {"scheduler": scheduler}, on_damage=job.get("on_damage", "raise")
        )
        said["restored"] = done
        for step, batch in enumerate(loader, (done or 0) + 1):
            loss = model(batch) / (12 * 16)
            (loss * rank.world).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            whole = loss.detach()
            dist.all_reduce(whole)
            said["losses"][step] = float(whole)
            said["drawn"][step] = float(torch.rand(()))
            if step == job.get("told_at") and rank.rank == 1:
                rank.say("tell me to stop")
                while checkpointer._watch is not None and checkpointer._watch.came is None:
                    time.sleep(0.001)
            if checkpointer.step(step) or step == STEPS:
                break
        said["stopping"] = checkpointer.stopping
    said["certificate"] = checkpointer.certificate
    loader.close()
    opened.close()
    if job.get("apart"):
        apart(rank, job["uris"])
    return said


def apart(rank: Rank, uris: list[str]) -> None:
    """What ranks do not have in common. Two ranks save it, and have it back; another number of them does not."""
    import torch

    from headrace.torch import Checkpointer

    class Own:
        at = 10 + rank.rank

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    model, loader = torch.nn.Linear(3, 3), Own()
    with Checkpointer(uris, "apart") as checkpointer:
        if rank.world != 2:
            with pytest.raises(CheckpointFailed, match=r"position of its own.* expected 2 ranks, found 3"):
                checkpointer.restore(1, model, loader=loader)
            assert checkpointer.restore("latest", model) == 9
            return
        checkpointer.save(1, model, loader=loader)
        loader.at = 0
        assert checkpointer.restore(1, model, loader=loader) == 1
        assert loader.at == 10 + rank.rank
        # What one rank cannot save, no rank waits for.
        with pytest.raises(HeadraceError, match="extra 'thing' cannot be saved"):
            checkpointer.save(2, model, extra={"thing": object() if rank.rank == 1 else 1})
    with Checkpointer(uris, "apart", interval="auto", mtbf_s=1e9) as checkpointer:
        with pytest.raises(UsageError, match=r"the ranks are at different steps.* found steps 7 to 8"):
            checkpointer.due(7 + rank.rank)
        # Clocks and costs differ from rank to rank, the answer does not.
        checkpointer.restore("latest", model)
        assert checkpointer.due(9)
        checkpointer.save(9)
        checkpointer.wait()
        assert not checkpointer.due(10)


@pytest.fixture(scope="module")
def unbroken(volume: list[str]) -> list[dict[str, Any]]:
    return Crew(2, train, {**JOB, "uris": volume, "apart": True}).join()


def steps_of(uris: list[str], run: str) -> list[int]:
    with Volume.open(uris) as opened:
        return [each.step for each in list_checkpoints(opened, run)]


def behind(result: dict[str, Any], what: str, step: int) -> dict[int, float]:
    return {s: value for s, value in result[what].items() if s > step}


def test_killed_in_mid_save_then_told_to_stop_then_with_another_number_of_ranks(
    volume: list[str], unbroken: list[dict[str, Any]], tmp_path: Path
) -> None:
    job = {"uris": volume, "run": "broken"}
    crew = Crew(2, train, {**job, "dies_at": 4})
    for rank in (0, 1):
        crew.hear(rank, "writing")
    for pid in crew.pids:
        os.kill(pid, signal.SIGKILL)
    crew.join(dead=(0, 1))
    assert steps_of(volume, "broken") == [2]

    # One rank alone is told to stop: both save that step, and end.
    crew = Crew(2, train, {**job, "seed": 7, "told_at": 5})
    crew.hear(1, "tell me to stop")
    os.kill(crew.pids[1], signal.SIGTERM)
    for rank, result in enumerate(crew.join()):
        assert result["restored"] == 2 and result["stopping"]
        assert list(result["losses"]) == [3, 4, 5]
        # To the bit, random numbers, too.
        for what in ("losses", "drawn"):
            assert {**behind(unbroken[rank], what, 2), **result[what]} == behind(unbroken[rank], what, 2)
        assert result["certificate"].rng == "restored"
    assert unbroken[0]["drawn"] != unbroken[1]["drawn"]
    assert steps_of(volume, "broken") == [2, 4, 5]

    job |= {"seed": 8, "kind": "ddp", "certificate": str(tmp_path / "certificate.json"), "apart": True}
    results = Crew(3, train, job).join()
    for result in results:
        assert result["restored"] == 5 and not result["stopping"]
        assert result["losses"] == pytest.approx(behind(unbroken[0], "losses", 5), rel=1e-9)
        certificate = result["certificate"]
        assert (certificate.saved_by_ranks, certificate.ranks, certificate.step) == (2, 3, 5)
        assert "NOT restored (saved by 2 ranks, 3 now)" in certificate.rng
        assert certificate.first_step_s > certificate.process_to_restored_s > 0
    # DDP: each of the three wants all of it, and it is read once.
    certificate = results[0]["certificate"]
    assert certificate.wanted_bytes > 2.9 * certificate.unique_bytes
    assert 1.0 <= certificate.read_amplification < 1.5
    assert '"checkpoint": "broken/step-00000005"' in (tmp_path / "certificate.json").read_text()
    assert steps_of(volume, "broken") == [2, 4, 5, 6]


def test_damage_that_one_rank_finds_takes_all_of_them_back(volume: list[str], unbroken: list[dict[str, Any]]) -> None:
    with Volume.open(volume) as opened:
        data = opened.read("unbroken/step-00000006/rank-00001.data")
    # Bytes of this rank's shards that lie nowhere else: weights that are only decayed are the same in every run.
    members = [Path(uri.removeprefix("file:")) for uri in volume]
    media = [path.read_bytes() for path in members]
    pieces = (data[at : at + 64] for at in range(0, len(data), 1024))
    flip_a_bit(members, next(piece for piece in pieces if sum(each.count(piece) for each in media) == 1))
    for rank, result in enumerate(Crew(2, train, {**JOB, "uris": volume, "seed": 9, "on_damage": "previous"}).join()):
        assert result["restored"] == 4
        for what in ("losses", "drawn"):
            assert result[what] == behind(unbroken[rank], what, 4)
        [damage] = result["certificate"].damaged
        assert damage.checkpoint == "unbroken/step-00000006" and "rank-00001.data" in damage.error
        assert "rank 1: " in damage.error and ("tensor '" in damage.error or "item '" in damage.error)
