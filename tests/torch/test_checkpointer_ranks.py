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
from headrace.volume import Volume
from tests.dataset.corpora import ingest_texts
from tests.torch.crew import Crew, Rank, preload

preload("headrace.demo.model", "headrace.torch.checkpointer", "headrace.torch.loader", "tests.dataset.corpora")

STEPS = 7
SAVE_EVERY = 2


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two file members with a corpus on them."""
    folder = tmp_path_factory.mktemp("volume")
    with Volume.create([f"file:{folder}/member{i}?create=48MiB" for i in range(2)]) as made:
        ingest_texts(made, folder, count=40)
        return list(made.uris)


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
    return said


@pytest.fixture(scope="module")
def unbroken(volume: list[str]) -> list[dict[str, Any]]:
    return Crew(2, train, {"uris": volume, "run": "unbroken"}).join()


def steps_of(uris: list[str], run: str) -> list[int]:
    with Volume.open(uris) as opened:
        return [each.step for each in list_checkpoints(opened, run)]


def test_killed_in_mid_save_and_resumed_by_another_number_of_ranks(
    volume: list[str], unbroken: list[dict[str, Any]], tmp_path: Path
) -> None:
    crew = Crew(2, train, {"uris": volume, "run": "killed", "dies_at": 4})
    for rank in (0, 1):
        crew.hear(rank, "writing")
    for pid in crew.pids:
        os.kill(pid, signal.SIGKILL)
    crew.join(dead=(0, 1))
    assert steps_of(volume, "killed") == [2]

    job = {"uris": volume, "run": "killed", "seed": 7, "kind": "ddp", "certificate": str(tmp_path / "certificate.json")}
    results = Crew(3, train, job).join()
    for result in results:
        assert result["restored"] == 2
        assert result["losses"] == pytest.approx({s: v for s, v in unbroken[0]["losses"].items() if s > 2}, rel=1e-9)
        certificate = result["certificate"]
        assert (certificate.saved_by_ranks, certificate.ranks, certificate.step) == (2, 3, 2)
        assert "NOT restored (saved by 2 ranks, 3 now)" in certificate.rng
        assert certificate.first_step_s > certificate.process_to_restored_s > 0
    # DDP: each of the three wants all of it, and it is read once.
    assert 1.0 <= results[0]["certificate"].read_amplification < 1.5
    assert '"checkpoint": "killed/step-00000002"' in (tmp_path / "certificate.json").read_text()
    assert steps_of(volume, "killed") == [2, 4, 6]


def test_one_rank_is_told_to_stop_and_all_save_and_go_on_later(
    volume: list[str], unbroken: list[dict[str, Any]]
) -> None:
    crew = Crew(2, train, {"uris": volume, "run": "stopped", "told_at": 3})
    crew.hear(1, "tell me to stop")
    os.kill(crew.pids[1], signal.SIGTERM)
    for before in crew.join():
        assert before["stopping"] and list(before["losses"]) == [1, 2, 3]
    assert steps_of(volume, "stopped") == [2, 3]

    after = Crew(2, train, {"uris": volume, "run": "stopped", "seed": 7}).join()
    for rank, result in enumerate(after):
        assert result["restored"] == 3 and not result["stopping"]
        # To the bit, random numbers too.
        for what in ("losses", "drawn"):
            assert result[what] == {s: v for s, v in unbroken[rank][what].items() if s > 3}
        assert result["certificate"].rng == "restored"
    assert unbroken[0]["drawn"] != unbroken[1]["drawn"]
