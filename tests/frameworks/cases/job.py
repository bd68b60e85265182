"""What the cases share: a job of real ranks that train a tiny GPT from a volume, are killed, and go on; and what its
inputs were.

A scenario is a function of a rank and a `Job`. It trains with its framework, saves every `SAVE_EVERY` steps, and hands
its model to `watched`, which writes a hash of every row that the model gets as input.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.torch import TokenDataset, TokenLoader
from headrace.torch.save.one_save import OneSave
from headrace.volume import Volume
from tests.torch import crew
from tests.torch.crew import Crew, Rank

LENGTH, BATCH, SEED, SAVE_EVERY = 32, 12, 7, 3

# The first ones wait for all that is imported.
crew.LIMIT_S = 240.0
# What ranks would import each by itself.
crew.preload(
    "accelerate", "headrace.torch.feed.epochs", "headrace.torch.huggingface", "headrace.torch.feed.iterable",
    "headrace.torch.huggingface_checkpoints", "headrace.torch.lightning", "pytorch_lightning",
    "megatron.core.datasets.indexed_dataset", "torchdata.stateful_dataloader",
    "transformers.models.gpt2.modeling_gpt2", "transformers.trainer",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    uri: str
    folder: Path
    steps: int
    #: Forward passes after which a rank waits to be killed.
    halt_after: int = 0
    #: The commit, counted from one, before which rank 0 waits to be killed: all that it would show is written.
    halt_in_commit: int = 0
    resume: bool = False
    #: Name of what is written.
    phase: str = "first"
    accumulation: int = 1

    @contextmanager
    def volume(self) -> Iterator[Volume]:
        with Volume.open(self.uri) as volume:
            yield volume

    def loader(self, volume: Volume) -> TokenLoader:
        return TokenLoader(
            volume, "corpus", sequence_length=LENGTH, global_batch=BATCH, seed=SEED, accumulation=self.accumulation
        )

    def dataset(self, volume: Volume, **options: Any) -> TokenDataset:
        return TokenDataset(volume, "corpus", sequence_length=LENGTH, seed=SEED, **options)


def as_torchrun(rank: Rank) -> None:
    """The variables that `torchrun` would set, and a process group of the system to be killed by."""
    os.setpgid(0, 0)
    if rank.world > 1:
        told = {"RANK": rank.rank, "LOCAL_RANK": rank.rank, "WORLD_SIZE": rank.world, "LOCAL_WORLD_SIZE": rank.world}
        os.environ.update({name: str(value) for name, value in told.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")


def tiny_gpt() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=512, n_positions=64, bos_token_id=0, eos_token_id=0,
        # Losses do not depend on which rank has which sample.
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    model: torch.nn.Module = GPT2LMHeadModel(config)
    return model


def watched(model: torch.nn.Module, rank: Rank, job: Job) -> torch.nn.Module:
    """Whatever the framework does: what comes to the model is written before it is computed with, and the loss of it
    afterwards."""
    file, losses = (
        os.open(job.folder / f"{job.phase}-{rank.rank}{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for kind in ("", ".losses")
    )
    passes = 0

    def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal passes
        inputs = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        os.write(file, (json.dumps(hashes(inputs)) + "\n").encode())
        passes += 1
        if passes == job.halt_after:
            rank.say("halted")
            rank.hear()

    def note_loss(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())
        os.write(losses, f"{float(loss)}\n".encode())

    model.register_forward_pre_hook(note, with_kwargs=True)
    model.register_forward_hook(note_loss, with_kwargs=True)
    if job.halt_in_commit and rank.rank == 0:
        _halt_in_commit(rank, job.halt_in_commit)
    return model


def _halt_in_commit(rank: Rank, which: int) -> None:
    commit, commits = OneSave.commit, 0

    def halting(*args: Any) -> Any:
        nonlocal commits
        commits += 1
        if commits == which:
            rank.say("halted")
            rank.hear()
        return commit(*args)

    OneSave.commit = halting  # type: ignore[method-assign]


def losses(job: Job, world: int) -> list[float]:
    """Of each batch, over the samples of all ranks."""
    ranks = [(job.folder / f"{job.phase}-{rank}.losses").read_text().splitlines() for rank in range(world)]
    return [sum(map(float, each)) / world for each in zip(*ranks, strict=False)]


def hashes(rows: torch.Tensor) -> list[str]:
    return [hashlib.sha256(row.to(torch.int64).numpy().tobytes()).hexdigest()[:16] for row in rows.contiguous()]


@dataclass
class Order:
    """Hashes of the samples by place in the global order."""

    rows: list[str]
    #: Samples an epoch.
    epoch: int

    @classmethod
    def of(cls, uri: str, places: int) -> Order:
        options: dict[str, Any] = {"sequence_length": LENGTH, "global_batch": BATCH, "seed": SEED}
        with Volume.open(uri) as volume, TokenLoader(volume, "corpus", rank=0, world=1, **options) as loader:
            batches = islice(loader, -(-places // BATCH))
            return cls([each for batch in batches for each in hashes(batch)], loader.sample_count)

    def endless(self, sample: int) -> int:
        return sample

    def with_short_ends(self, sample: int) -> int:
        """Place of a sample where each epoch leaves out what does not fill a step."""
        whole = self.epoch // BATCH * BATCH
        return sample // whole * self.epoch + sample % whole

    def check(self, job: Job, world: int, begun: int, place: Callable[[int], int], passes: int) -> None:
        """That ranks have seen, from sample `begun` on, what is theirs in this order, at least so many batches."""
        local = BATCH // world // job.accumulation
        for rank in range(world):
            lines = (job.folder / f"{job.phase}-{rank}").read_text().splitlines()
            assert len(lines) >= passes, f"{job.phase}: rank {rank} had {len(lines)} batches of {passes}"
            for number, line in enumerate(lines):
                first = begun + number * local * world + rank * local
                expected = [self.rows[place(sample)] for sample in range(first, first + local)]
                assert json.loads(line) == expected, f"{job.phase}: rank {rank}, batch {number}"


def killed_and_resumed(
    job: Job,
    scenario: Callable[[Rank, Job], int],
    order: Order,
    *,
    world: int,
    accumulation: int = 1,
    place: Callable[[int], int] | None = None,
) -> None:
    """Two ranks are killed in the middle of their eighth batch, and `world` others go on from the last checkpoint.

    `scenario` returns the step from which it went on.
    """
    place = place or order.endless
    first = replace(job, halt_after=8)
    running = Crew(2, scenario, first)
    for rank in range(2):
        running.hear(rank, "halted")
    _kill(running)
    order.check(first, 2, 0, place, passes=8)
    second = replace(job, resume=True, phase="second", accumulation=accumulation)
    begun = Crew(world, scenario, second).join()
    saved = 8 // SAVE_EVERY * SAVE_EVERY
    assert begun == [saved] * world
    order.check(second, world, saved * BATCH, place, passes=(job.steps - saved) * accumulation)


def killed_in_save_and_resumed(
    job: Job, scenario: Callable[[Rank, Job], int], order: Order, *, world: int, commit: int
) -> None:
    """Two ranks are killed when all of the second checkpoint is written but its commit, the one that coordinates first;
    `world` others go on from the first one. Losses are those of a job that nothing happened to."""
    first, second = replace(job, halt_in_commit=commit), replace(job, resume=True, phase="second")
    running = Crew(2, scenario, first)
    running.hear(0, "halted")
    _kill(running)
    order.check(first, 2, 0, order.endless, passes=2 * SAVE_EVERY)
    begun = Crew(world, scenario, second).join()
    assert begun == [SAVE_EVERY] * world
    order.check(second, world, SAVE_EVERY * BATCH, order.endless, passes=job.steps - SAVE_EVERY)
    whole = replace(job, phase="whole")
    Crew(1, scenario, whole).join()
    expected = losses(whole, 1)
    assert len(expected) == job.steps and abs(expected[-1] - expected[0]) > 0.01
    assert losses(first, 2) == pytest.approx(expected[: len(losses(first, 2))], rel=1e-4)
    assert losses(second, world) == pytest.approx(expected[SAVE_EVERY:], rel=1e-4)


def _kill(running: Crew) -> None:
    for pid in running.pids:
        os.killpg(pid, signal.SIGKILL)
    running.join(dead=(0, 1))
