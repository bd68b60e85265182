"""One rank on a node of its own: it restores the latest step, and saves some, in one of which its node is cut off."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from headrace.errors import HeadraceError
from headrace.torch import VolumeReader, VolumeWriter, WriterOptions

#: Elements of each rank.
ELEMENTS = 500_000
STALL_S, DEADLINE_S = 8.0, 30.0


def content(step: int, rank: int) -> torch.Tensor:
    return torch.arange(ELEMENTS, dtype=torch.float32) + 1000.0 * step + 0.5 * rank


def say(**what: Any) -> None:
    print("said", json.dumps(what), flush=True)


class Planner(DefaultSavePlanner):
    """Says when this rank is about to write, and waits until its owner must have seen to it."""

    pause_s = 0.0

    def resolve_data(self, write_item: Any) -> Any:
        if self.pause_s:
            say(rank=dist.get_rank(), writing=True)
            time.sleep(self.pause_s)
        return super().resolve_data(write_item)


def save(uris: list[str], steps: list[int], victim: int) -> None:
    """The victim is cut off in the middle of the last of the steps; -1: nobody is."""
    rank = dist.get_rank()
    local = torch.zeros(ELEMENTS)
    state = {"w": DTensor.from_local(local, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])}
    writer = VolumeWriter(uris, "run", options=WriterOptions(stall_s=STALL_S, deadline_s=DEADLINE_S))
    for step in steps:
        local.copy_(content(step, rank))
        planner, began = Planner(), time.monotonic()
        planner.pause_s = 5.0 if (step, rank) == (steps[-1], victim) else 0.0
        try:
            writer.save(state, f"run/step-{step}", planner=planner)
        except HeadraceError as error:
            say(rank=rank, step=step, failed=str(error), kind=type(error).__name__, seconds=time.monotonic() - began)
            # As a job that ends: its session is left as it is.
            os._exit(0)
        say(rank=rank, step=step, saved=True)
    writer.close()


def restore(uris: list[str]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    local = torch.zeros(ELEMENTS)
    state = {"w": DTensor.from_local(local, init_device_mesh("cpu", (world,)), [Shard(0)])}
    with VolumeReader(uris, "run") as reader:
        report = reader.load(state)
    say(rank=rank, restored=report.step, exact=bool(torch.equal(local, content(report.step, rank))))


def main() -> None:
    uris, steps, victim, restores = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    if restores:
        restore(uris)
    save(uris, steps, victim)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
