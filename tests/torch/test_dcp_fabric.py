"""Over real NVMe/TCP, to a target with a volatile cache that is killed while ranks save: complete, or never seen."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.checkpoint import list_checkpoints
from headrace.errors import HeadraceError
from headrace.testing import MemoryDevice
from headrace.testing.serve import serving
from headrace.torch import VolumeReader, VolumeWriter
from headrace.volume import Volume, VolumeTransfer
from tests.stopping import stop
from tests.torch.crew import Crew, Rank
from tests.torch.target import NQN, Target

ELEMENTS = 3_000_000


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    target = Target(tmp_path)
    yield target
    target.close()


def value(step: int, rank: int) -> np.ndarray:
    return np.random.default_rng([step, rank]).random(ELEMENTS, np.float32)


def training(rank: Rank, argument: tuple[list[str], int]) -> list[dict[str, Any]]:
    """Asynchronous saves, parameters that change meanwhile; says when each begins."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    uris, steps = argument
    local = torch.zeros(ELEMENTS)
    state = {"w": DTensor.from_local(local, init_device_mesh("cpu", (rank.world,)), [Shard(0)]), "step": 0}
    reports = []
    with VolumeWriter(uris, "run") as writer:
        for step in range(steps):
            local.copy_(torch.from_numpy(value(step, rank.rank)))
            state["step"] = step
            future = writer.async_save(state, f"run/step-{step}")
            rank.say(f"saving {step}")
            while not future.done():
                local.add_(1.0)
                time.sleep(0.002)
            reports.append(vars(future.result()))
    return reports


@pytest.mark.timeout(120)
def test_the_target_is_killed_while_ranks_save(target: Target) -> None:
    Volume.create(target.uris()).close()
    steps = 3
    crew = Crew(2, training, (target.uris(), steps))
    for step, delay_s in ((1, 0.03), (2, 0.1)):
        crew.hear(0, f"saving {step}")
        time.sleep(delay_s)
        target.kill()
        target.start()
    reports = crew.join()
    assert [report["sequence"] is not None for report in reports[0]] == [True] * steps
    # What was committed was durable: it is there when the target loses its cache once more.
    target.kill()
    target.start()
    with Volume.open(target.uris()) as volume:
        assert [c.step for c in list_checkpoints(volume, "run")] == list(range(steps))
        for step in range(steps):
            into = {"w": torch.zeros(2 * ELEMENTS), "step": -1}
            VolumeReader(volume, f"run/step-{step}").load(into)
            assert np.array_equal(into["w"].numpy(), np.concatenate([value(step, 0), value(step, 1)])), step
            assert into["step"] == step


def test_a_target_that_was_away_for_too_long_fails_the_save_and_not_the_next(target: Target) -> None:
    uris = target.uris(loss_timeout=1)
    Volume.create(target.uris()).close()
    state = {"w": torch.arange(100_000)}
    with VolumeWriter(uris, "run") as writer:
        writer.save(state, "run/step-0")
        target.kill()
        with pytest.raises(HeadraceError):
            writer.save(state, "run/step-1")
        target.start()
        report = writer.save(state, "run/step-2")
        assert report.total_bytes == 800_000
    with Volume.open(target.uris()) as volume:
        assert [c.step for c in list_checkpoints(volume, "run")] == [0, 2]


class LosesItsCache(MemoryDevice):
    """Loses a controller, and with it every unflushed write, before some flushes: which then succeed."""

    losses = 0

    def flush(self) -> None:
        if self.losses:
            self.losses -= 1
            self.lose_cache()
        super().flush()


def test_a_lost_cache_is_written_again_and_reported() -> None:
    devices = [LosesItsCache(16 << 20, volatile_cache=True, uri=f"memory:{i}") for i in range(2)]
    state = {"w": torch.arange(300_000)}
    with Volume.create(devices=devices) as volume, VolumeWriter(volume, "run") as writer:
        assert writer.save(state, "run/step-0").rewritten_bytes == 0
        devices[1].losses = 2
        report = writer.save(state, "run/step-1")
        assert report.rewritten_bytes >= report.data_bytes == 2_400_000
        for device in devices:
            device.lose_cache()
        into = {"w": torch.zeros(300_000, dtype=torch.int64)}
        VolumeReader(volume, "run").load(into)
        assert torch.equal(into["w"], state["w"])


def test_no_read_is_left_behind_when_a_load_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would come later, over what the caller has put there since."""
    begun: list[VolumeTransfer] = []
    into = {"a": torch.zeros(1 << 20)}
    with serving(NQN, "mem:64MiB") as target:
        uri = target.uri(io_timeout=1, loss_timeout=3)
        Volume.create([target.uri()]).close()
        with VolumeWriter([target.uri()], "run") as writer:
            writer.save({"a": torch.ones(1 << 20)}, "run/step-1")
        with Volume.open([uri]) as volume, VolumeReader(volume, "run/step-1") as reader:
            reader.load(into)
            submit = volume.submit_read

            def of_one_that_stands(*arguments: Any, **options: Any) -> VolumeTransfer:
                stop(target.process.pid)
                begun.append(submit(*arguments, **options))
                return begun[-1]

            monkeypatch.setattr(volume, "submit_read", of_one_that_stands)
            late = VolumeReader(volume, "run/step-1", timeout_s=0.1)
            try:
                with pytest.raises(HeadraceError):
                    late.load(into)
                assert begun and all(transfer.done() for transfer in begun)
            finally:
                os.kill(target.process.pid, signal.SIGCONT)
