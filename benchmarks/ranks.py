"""The ranks of a small job, for figures: processes under torch.distributed (gloo) that do the same at the same time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from headrace.testing.serve import free_port

#: Seconds that one job may take.
LIMIT_S = 300.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "headrace.torch.load.reader",
        "headrace.torch.save.writer",
    ]
)


class Ranks:
    """`world` processes; each carries out the jobs of `all`, one after another."""

    def __init__(self, world: int) -> None:
        self.world = world
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_main, args=(rank, world, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def all(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`job(*arguments)` on every rank; what they returned. RuntimeError with the traceback of one that raised."""
        for pipe in self._pipes:
            pipe.send((job, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(LIMIT_S):
                raise RuntimeError(f"rank {rank} did not answer within {LIMIT_S:.0f} s")
            answers.append(pipe.recv())
        for rank, (good, value) in enumerate(answers):
            if not good:
                raise RuntimeError(f"rank {rank}: {value}")
        return [value for _, value in answers]

    def seconds(self, job: Callable[..., Any], *arguments: Any) -> float:
        """How long the slowest rank takes, from when all of them begin."""
        return float(max(self.all(_timed, job, arguments)))

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _timed(job: Callable[..., Any], arguments: Sequence[Any]) -> float:
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    job(*arguments)
    return time.perf_counter() - began


def _main(rank: int, world: int, port: int, pipe: Connection) -> None:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=LIMIT_S)
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT_S))
    while True:
        try:
            job, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (True, job(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
