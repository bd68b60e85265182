"""Real processes for tests of what ranks do together.

    crew = Crew(2, scenario, argument)    every rank runs scenario(rank, argument) under torch.distributed, gloo
    results = crew.join()                 what they returned, by rank; an exception of a rank fails the test

The processes come from one fork server that has imported torch already, so a crew starts in a fraction of a second.
`crew.pids[rank]` is there to be killed, `crew.say` and `Rank.hear` for steps that must happen in order.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from headrace.testing.serve import free_port

_context = multiprocessing.get_context("forkserver")
# What a rank would import at its first step as well (the optimizer brings torch._dynamo), so that it is there once.
_PRELOADED = [
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "headrace.torch.load.reader",
    "headrace.torch.save.writer",
]


def preload(*modules: str) -> None:
    """These, too; before the first crew."""
    _context.set_forkserver_preload([*_PRELOADED, *modules, "tests.torch.frozen"])


preload()


#: Seconds that a whole scenario may take.
LIMIT_S = 60.0


class Rank:
    """What a scenario gets besides its argument."""

    def __init__(self, rank: int, world: int, pipe: Connection) -> None:
        self.rank = rank
        self.world = world
        self._pipe = pipe

    def say(self, word: str) -> None:
        self._pipe.send(("said", word))

    def hear(self) -> str:
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError("the test said nothing")
        return str(self._pipe.recv())


def _main(
    rank: int, world: int, port: int, pipe: Connection, scenario: Callable[[Rank, Any], Any], argument: Any
) -> None:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if world > 1:
            store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=LIMIT_S))
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT_S)
            )
        result = scenario(Rank(rank, world, pipe), argument)
        pipe.send(("returned", result))
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))
    # Rank 0 serves the store; it leaves last. The test closes its end when all have answered.
    with contextlib.suppress(EOFError, OSError):
        pipe.poll(LIMIT_S)
    os._exit(0)


class Crew:
    def __init__(self, world: int, scenario: Callable[[Rank, Any], Any], argument: Any = None) -> None:
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        self.words: list[list[str]] = [[] for _ in range(world)]
        self._results: dict[int, tuple[str, Any]] = {}
        for rank in range(world):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_main, args=(rank, world, port, theirs, scenario, argument), daemon=False)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [int(process.pid or 0) for process in self._processes]

    def say(self, rank: int, word: str) -> None:
        self._pipes[rank].send(word)

    def hear(self, rank: int, word: str) -> None:
        """Wait until this rank has said the word; a rank that ends instead fails the test."""
        end = time.monotonic() + LIMIT_S
        while word not in self.words[rank]:
            assert rank not in self._results, f"rank {rank} ended before it said {word!r}: {self._results[rank][1]}"
            assert time.monotonic() < end, f"rank {rank} did not say {word!r}"
            self.listen(0.5)

    def ended(self, rank: int) -> tuple[str, Any] | None:
        """("returned", what), ("raised", text) or ("died", text); None: it runs, as far as was heard."""
        return self._results.get(rank)

    def listen(self, seconds: float) -> None:
        """Hear what ranks say, and that they end, until there is something, or the time is over."""
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in self._results}
        for ready in wait(list(waiting), seconds):
            assert isinstance(ready, Connection)
            self._hear_all(waiting[ready], ready)

    def _hear_all(self, rank: int, pipe: Connection) -> None:
        while rank not in self._results and pipe.poll():
            try:
                kind, value = pipe.recv()
            except (EOFError, OSError):
                # Also in the middle of a word.
                kind, value = "died", f"exit code {self._processes[rank].exitcode}"
            if kind == "said":
                self.words[rank].append(value)
            else:
                self._results[rank] = (kind, value)

    def end(self) -> None:
        """SIGKILL, whatever they do. What they said before that is heard."""
        for process in self._processes:
            process.kill()
        end = time.monotonic() + LIMIT_S
        while len(self._results) < len(self._pipes):
            assert time.monotonic() < end, f"ranks do not end: {self.pids}"
            self.listen(1.0)
        self._part()

    def _part(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def join(self, *, dead: tuple[int, ...] = ()) -> list[Any]:
        """What each rank returned; None for those in `dead`, which must have died."""
        end = time.monotonic() + LIMIT_S
        try:
            while len(self._results) < len(self._pipes):
                assert time.monotonic() < end, (
                    f"only ranks {sorted(self._results)} of {len(self._pipes)} ended: {self._results}"
                )
                self.listen(1.0)
        finally:
            self._part()
        failed = {r: text for r, (kind, text) in self._results.items() if kind != ("died" if r in dead else "returned")}
        assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
        return [None if rank in dead else self._results[rank][1] for rank in range(len(self._pipes))]


def run(world: int, scenario: Callable[[Rank, Any], Any], argument: Any = None) -> list[Any]:
    return Crew(world, scenario, argument).join()
