"""Suite `fabric-scale`: many controllers on one target: what an idle one costs, how soon all are back."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.programs import Program, python
from benchmarks.target import NQN

#: I/O queues of each controller; with the admin queue one connection more.
QUEUES = 2
#: After this the target has given back what only busy connections need.
IDLE_S = 3.0
BACK_DEADLINE_S = 120.0


def memory_bytes(pid: int) -> int:
    """Memory of a process, shared pages by its share of them. Socket buffers are the kernel's, and not in it."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no Pss")


def _complete(target: Program) -> int:
    """Controllers that have all their queues."""
    return sum(queues == 1 + QUEUES for queues in target.ask()["queues"])


def _wait(target: Program, controllers: int) -> float:
    """Until that many are complete; returns how long that took."""
    begun = time.monotonic()
    while (found := _complete(target)) < controllers:
        if time.monotonic() - begun > BACK_DEADLINE_S:
            raise RuntimeError(f"{found} of {controllers} controllers are there after {BACK_DEADLINE_S:.0f} s")
        time.sleep(0.1)
    return time.monotonic() - begun


def run(quick: bool, only: Sequence[str] = ()) -> Iterator[Figure]:
    """Both figures come out of one run; `only` leaves out what it does not name."""
    controllers, processes = (64, 2) if quick else (1024, 4)
    rounds = 1 if quick else 3
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The client processes inherit it; the target raises its own.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * controllers + 256)), hard))
    everywhere = set(os.sched_getaffinity(0))
    with ExitStack() as stack:

        def start(*command: object) -> Program:
            program = Program(python(*map(str, command)), everywhere)
            stack.callback(program.close)
            return program

        target = start("scale_target", 0)
        port = int(target.greeting)
        uri = f"nvme+tcp://127.0.0.1:{port}/{NQN}?nsid=1&queues={QUEUES}"
        # What the first controller costs (code that is touched, pages of the allocator) is not what each one costs.
        first = start("scale_clients", uri, 1)
        time.sleep(IDLE_S)
        before = memory_bytes(target.process.pid)
        clients = [start("scale_clients", uri, controllers // processes) for _ in range(processes)]
        everybody = controllers + 1
        _wait(target, everybody)
        time.sleep(IDLE_S)
        each = (memory_bytes(target.process.pid) - before) / controllers
        alone = memory_bytes(first.process.pid)
        hosts = sum(memory_bytes(client.process.pid) - alone for client in clients) / controllers
        back: list[float] = []
        for _ in range(rounds):
            target.process.kill()
            target.process.wait()
            target = start("scale_target", port)
            back.append(_wait(target, everybody))
            # The hosts' side of it: each device says itself that it is connected.
            begun = time.monotonic()
            while (live := sum(client.ask()["live"] for client in [first, *clients])) < everybody:
                if time.monotonic() - begun > BACK_DEADLINE_S:
                    raise RuntimeError(f"the target has all controllers, the hosts {live} devices of {everybody}")
                time.sleep(0.1)
            back[-1] += time.monotonic() - begun
    figures = [
        Figure(
            suite="fabric-scale",
            figure="idle_controller_memory",
            value=each,
            unit="bytes",
            at_most=65536,
            samples=[each],
        ),
        Figure(suite="fabric-scale", figure="idle_device_memory_in_host", value=hosts, unit="bytes", samples=[hosts]),
        Figure(
            suite="fabric-scale",
            figure="controllers_back_after_restart",
            value=sorted(back)[len(back) // 2],
            unit="s",
            at_most=15,
            samples=back,
        ),
    ]
    yield from (figure for figure in figures if not only or figure.figure in only)


#: For `--only`.
FIGURES = ("idle_controller_memory", "idle_device_memory_in_host", "controllers_back_after_restart")
