"""The training job of the demo: `torchrun ... -m headrace.demo.train CONFIG.json`. One process a rank.

An ordinary loop. What it owes to storage is three objects: a `TokenLoader`, a `VolumeWriter`, a `VolumeReader`; the
rest is what any job has. What it does for the proof: it hashes every sample that really enters the model (a hook on its
forward), and writes down losses, times and events, one file a rank.

The global batch is fixed; ranks split it, and each works through its part in micro batches. So the samples of a step do
not depend on the number of ranks, and the gradient only by the order of a sum.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from headrace.accidents.processes import die_with_parent
from headrace.checkpoint import latest, parse_checkpoint_id
from headrace.demo.events import EventWriter
from headrace.demo.model import Gpt, GptOptions
from headrace.demo.train_config import TrainConfig
from headrace.device import Buffer
from headrace.errors import UsageError
from headrace.measure import StepClock
from headrace.torch import SaveReport, TokenLoader, VolumeReader, VolumeWriter, WriterOptions
from headrace.volume import Grant, Parts, Receipt, Session, Volume

#: A job of some seconds cannot spend five of them on finding out that its predecessor is dead.
HEARTBEAT_S = 0.25


class ToldVolume(Volume):
    """A volume that says when a rank begins to write its part of a checkpoint, so that things can be broken then."""

    tell: EventWriter

    def write_grant(self, grant: Grant, buffer: Buffer | Parts) -> Receipt:
        checkpoint = parse_checkpoint_id(grant.name.rpartition("/")[0])
        self.tell("write-begun", checkpoint.step)
        return super().write_grant(grant, buffer)


@dataclass
class SampleHashes:
    """A forward hook: SHA-256 of every sample (its int64 tokens) that enters the model, in order."""

    taken: list[str] = field(default_factory=list)

    def __call__(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        tokens = inputs[0].detach().to("cpu", torch.int64).contiguous()
        self.taken += [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in tokens]

    def drain(self) -> list[str]:
        taken, self.taken = self.taken, []
        return taken


@dataclass
class Progress(Stateful):
    """What a checkpoint holds besides tensors: how far training is. In the same commit as the model."""

    loader: TokenLoader
    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "loader": self.loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = int(state_dict["step"])
        self.loader.load_state_dict(state_dict["loader"])


@dataclass
class Learner(Stateful):
    """Model and optimizer under names that do not depend on how they are spread over ranks."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))


class Trainer:
    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if config.global_batch % (self.world * config.micro_batch):
            raise UsageError(
                "global_batch",
                expected=f"a multiple of ranks x micro batch = {self.world * config.micro_batch}",
                found=str(config.global_batch),
            )
        self.micro_steps = config.global_batch // (self.world * config.micro_batch)
        directory = Path(config.directory)
        self.tell = EventWriter(directory / f"{config.phase}-events-{self.rank}.jsonl", self.rank)
        self.device = torch.device(config.device)
        if config.device == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        torch.manual_seed(config.seed)
        torch.use_deterministic_algorithms(True)
        options = GptOptions(
            vocabulary=config.vocabulary,
            sequence=config.sequence,
            width=config.width,
            heads=config.heads,
            layers=config.layers,
        )
        # Every rank makes the same model from the same seed, on the CPU, so that it does not depend on the device.
        gpt = Gpt(options)
        self.hashes = SampleHashes()
        gpt.register_forward_pre_hook(self.hashes)
        self.parameters = sum(p.numel() for p in gpt.parameters())
        self.model = self._spread(gpt.to(self.device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))
        self.volume = Volume.open(config.uris)
        self.loader = TokenLoader(
            self.volume,
            config.dataset,
            sequence_length=config.sequence,
            global_batch=config.global_batch,
            rank=self.rank,
            world=self.world,
            seed=config.seed,
        )
        self.progress = Progress(self.loader)
        self.state = {"learner": Learner(self.model, self.optimizer), "progress": self.progress}
        self.checkpoints: ToldVolume | None = None
        self.writer: VolumeWriter | None = None
        self.background = ThreadPoolExecutor(1, thread_name_prefix="session")
        self.session: Future[Session] | None = None
        if config.save_every:
            # Connections of its own, so that checkpoints and batches do not queue behind each other.
            volume = ToldVolume.open(config.uris, write=True)
            assert isinstance(volume, ToldVolume)
            volume.tell = self.tell
            self.checkpoints = volume
            if self.rank == 0:
                # To take over from a predecessor that died, its heart must be watched for some seconds: not while
                # training waits.
                self.session = self.background.submit(
                    volume.session, run_id=config.run, takeover="if-dead", heartbeat_s=HEARTBEAT_S
                )
        self.clock = StepClock(
            rank=self.rank,
            path=directory / f"{config.phase}-steps-{self.rank}.jsonl",
            synchronise=torch.cuda.synchronize if config.device == "cuda" else None,
        )

    def _spread(self, gpt: Gpt) -> nn.Module:
        if self.config.parallel == "ddp":
            return DistributedDataParallel(gpt)
        mesh = init_device_mesh(self.device.type, (self.world,))
        for block in gpt.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(gpt, mesh=mesh)
        return gpt

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """From the newest committed checkpoint, whatever number of ranks wrote it."""
        began = time.perf_counter()
        with self.clock.restart():
            # One rank looks, all follow: a commit between two looks must not split them.
            found: list[int | None] = [None]
            if self.rank == 0:
                newest = latest(self.volume, self.config.run)
                found = [None if newest is None else newest.step]
            dist.broadcast_object_list(found, src=0)
            if found[0] is None:
                raise UsageError(
                    "nothing to resume from", expected="a committed checkpoint", found="none", where=self.config.run
                )
            name = f"{self.config.run}/step-{found[0]}"
            load(self.state, checkpoint_id=name, storage_reader=VolumeReader(self.config.uris, self.config.run))
        self.tell("restored", self.progress.step, seconds=time.perf_counter() - began)

    def save(self, pending: Future[SaveReport] | None) -> Future[SaveReport]:
        """Begin a save; returns as soon as the state is copied."""
        assert self.checkpoints is not None
        step = self.progress.step
        self.tell("save-begun", step)
        began = time.perf_counter()
        if pending is not None:
            pending.result()
        if self.writer is None:
            session = None if self.session is None else self.session.result()
            # A checkpoint that was in flight when its job died may become whole only when the next session begins,
            # after `restore` looked: then this run comes by the same step again, and replaces it with the same state.
            options = WriterOptions(overwrite=True)
            self.writer = VolumeWriter(self.checkpoints, self.config.run, session=session, options=options)
        future = self.writer.async_save(self.state, f"{self.config.run}/step-{step}")
        self.tell("save-staged", step, seconds=time.perf_counter() - began)

        def done(finished: Future[SaveReport]) -> None:
            error = finished.exception()
            if error is None:
                report = asdict(finished.result())
                self.tell("save-committed", step, seconds=time.perf_counter() - began, **report)
            else:
                self.tell("save-failed", step, error=str(error))

        future.add_done_callback(done)
        return future

    # ---- steps -----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        config = self.config
        self.tell("started", self.progress.step, ranks=self.world, parameters=self.parameters, device=str(self.device))
        if config.resume:
            self.restore()
        pending: Future[SaveReport] | None = None
        batches = iter(self.loader)
        local = config.global_batch // self.world
        while self.progress.step < config.steps:
            step = self.progress.step
            with self.clock.step(step, tokens=local * config.sequence):
                with self.clock.data_wait():
                    batch = next(batches)
                loss = self._optimise(batch, step)
                self.progress.step = step + 1
                self.clock.note(loss=loss, samples=self.hashes.drain())
                if config.save_every and self.progress.step % config.save_every == 0:
                    with self.clock.checkpoint():
                        pending = self.save(pending)
        if pending is not None:
            with self.clock.checkpoint():
                pending.result()
        self.tell("finished", self.progress.step)

    def _optimise(self, batch: Tensor, step: int) -> float:
        """Forward and backward over the micro batches, one update; the mean loss over the global batch."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        whole = config.global_batch * config.sequence
        total = torch.zeros((), device=self.device)
        for index in range(self.micro_steps):
            tokens = batch[index * config.micro_batch : (index + 1) * config.micro_batch]
            last = index == self.micro_steps - 1
            if config.parallel == "fsdp2":
                self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
            else:
                self.model.require_backward_grad_sync = last  # type: ignore[assignment]
            loss_sum = self.model(tokens.to(self.device, torch.int64))
            # FSDP and DDP divide the sum of gradients by the number of ranks; what is wanted is the mean over `whole`.
            (loss_sum * (self.world / whole)).backward()
            total += loss_sum.detach() / whole
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        return float(total)

    def close(self) -> None:
        self.clock.close()
        if self.writer is not None:
            self.writer.close()
        self.background.shutdown()
        if self.checkpoints is not None:
            # And with it its session.
            self.checkpoints.close()
        self.loader.close()
        self.volume.close()
        self.tell.close()


def main() -> None:
    die_with_parent()
    config = TrainConfig.read(Path(sys.argv[1]))
    shared = config.parallel == "ddp" or config.device == "cpu"
    # Gloo beside NCCL: objects and DCP's plans travel over the CPU.
    dist.init_process_group("gloo" if shared else "cpu:gloo,cuda:nccl")
    trainer = Trainer(config)
    trainer.train()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
