"""Suite `fabric`: our NVMe/TCP host and target beside bare sockets that move the same bytes the same way.

The bare socket (`native/bench`) and our side take turns on the same cores, with memory of the same size. Both
sides have first shown that they move the right bytes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from benchmarks import cores
from benchmarks.figures import Figure
from benchmarks.pairs import Pairs, interleaved
from benchmarks.programs import Program, cpu_s, native, python
from benchmarks.target import NQN
from headrace.units import KIB, MIB

STREAM_BYTES = MIB
SMALL_BYTES = 4 * KIB
#: Messages that are taken and asked for at a time; each side uses what is best for it.
BATCHES = (4, 8, 12, 16)
PATTERN = 1
#: SO_SNDBUF of both bare ends: what ours use on one machine (decision 0021), and the kernel's choice.
SEND_BYTES = (256 * KIB, 0)
#: Longer than an answer takes on any machine that these figures make sense on.
POLL_US = 1000


class Meter:
    """One side of a pair: runs its job, gives its rate, keeps how busy the cores were."""

    def __init__(self, client: Program, server: Program, job: dict[str, Any], work: float) -> None:
        self._client, self._server, self._job, self._work = client, server, job, work
        self.client_cores: list[float] = []
        self.server_cores: list[float] = []
        self.client_cpu_s: list[float] = []

    def __call__(self) -> float:
        server = cpu_s(self._server.process.pid)
        answer = self._client.ask(**self._job)
        seconds = answer["seconds"]
        self.client_cpu_s.append(answer["cpu_s"])
        self.client_cores.append(answer["cpu_s"] / seconds)
        self.server_cores.append((cpu_s(self._server.process.pid) - server) / seconds)
        median_us: float | None = answer.get("median_us")
        return self._work / seconds if median_us is None else median_us

    def cpu(self, side: str) -> dict[str, float]:
        return {
            f"{side} client": statistics.median(self.client_cores),
            f"{side} server": statistics.median(self.server_cores),
        }


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is done for a figure."""

    memory_bytes: int
    stream_bytes: int
    small_count: int
    ping_count: int
    rounds: int
    idle_s: float


FULL = Scale(
    memory_bytes=256 * MIB, stream_bytes=512 * MIB, small_count=131_072, ping_count=10_000, rounds=15, idle_s=20
)
QUICK = Scale(memory_bytes=16 * MIB, stream_bytes=32 * MIB, small_count=4_096, ping_count=200, rounds=3, idle_s=1)


def _move(block: int, depth: int, total: int, *, write: bool = False, scatter: bool = False, batch: int = 1) -> Any:
    return {
        "job": "move",
        "write": write,
        "block": block,
        "depth": depth,
        "count": total // block,
        "random": scatter,
        "batch": batch,
    }


class Bench:
    """The processes of the suite, started when a figure needs them."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.layout = cores.layout()
        self._stack = ExitStack()
        self._hosts: dict[str, Program] = {}
        self._bare: dict[tuple[int, bool], tuple[Program, Program]] = {}

    def close(self) -> None:
        self._stack.close()

    def start(self, command: list[str], on: set[int]) -> Program:
        program = Program(command, on)
        self._stack.callback(program.close)
        return program

    @cached_property
    def target(self) -> Program:
        return self.start(python("target", self.scale.memory_bytes, 1, 1), {self.layout.server})

    def bare(self, send_bytes: int, second_core: bool = False) -> tuple[Program, Program]:
        """A client and a server of the bare socket."""
        key = send_bytes, second_core
        if key not in self._bare:
            size = self.scale.memory_bytes
            on = {self.layout.client, self.layout.second} if second_core else {self.layout.client}
            server = self.start(native("serve", size, send_bytes), {self.layout.server})
            client = self.start(native("bare", server.greeting, size, send_bytes), on)
            self._show_that_it_moves_the_bytes(client)
            self._bare[key] = client, server
        return self._bare[key]

    def best_bare(self, job: dict[str, Any], second_core: bool = False) -> tuple[Program, Program]:
        """Of `SEND_BYTES`, what lets the bare socket do this job fastest."""

        def seconds(send_bytes: int) -> float:
            client, _ = self.bare(send_bytes, second_core)
            return statistics.median([float(client.ask(**job)["seconds"]) for _ in range(3)])

        return self.bare(min(SEND_BYTES, key=seconds), second_core)

    def host(self, depth: int, **options: object) -> Program:
        """A load on our host, connected to the target; the first one fills the target's memory."""
        text = json.dumps({"depth": depth, **options})
        if text not in self._hosts:
            first = not self._hosts
            command = native("host", self.target.greeting, NQN, self.scale.memory_bytes, text)
            self._hosts[text] = host = self.start(command, {self.layout.client})
            if first:
                host.ask(job="fill", seed=PATTERN)
                host.ask(**_move(STREAM_BYTES, depth, self.scale.memory_bytes, write=True))
            self._show_that_it_moves_the_bytes(host)
        return self._hosts[text]

    def python(self, devices: int = 1, second_core: bool = False) -> Program:
        if not self._hosts:
            self.host(32)
        uri = f"nvme+tcp://127.0.0.1:{self.target.greeting}/{NQN}?nsid=1&depth=32"
        on = {self.layout.client, self.layout.second} if second_core else {self.layout.client}
        return self.start(python("python_load", uri, self.scale.memory_bytes, devices), on)

    def _show_that_it_moves_the_bytes(self, client: Program) -> None:
        size = self.scale.memory_bytes
        client.ask(job="fill", seed=0)
        client.ask(**_move(STREAM_BYTES, 16, size))
        streamed = client.ask(job="check", seed=PATTERN, block=STREAM_BYTES, random=False)["same"]
        client.ask(**_move(SMALL_BYTES, 32, size, scatter=True, batch=8))
        scattered = client.ask(job="check", seed=PATTERN, block=SMALL_BYTES, random=True)["same"]
        # What is read back now, and by every later client, was written here.
        client.ask(job="fill", seed=PATTERN)
        client.ask(**_move(STREAM_BYTES, 16, size, write=True))
        client.ask(job="fill", seed=0)
        client.ask(**_move(STREAM_BYTES, 16, size))
        written = client.ask(job="check", seed=PATTERN, block=STREAM_BYTES, random=False)["same"]
        if not (streamed and scattered and written):
            raise AssertionError(f"the bytes are not those that were to be moved: {streamed=} {scattered=} {written=}")
        client.ask(job="fill", seed=PATTERN)

    def best_batch(self, client: Program, server: Program) -> int:
        """Of `BATCHES`, what gives this client the most 4 KiB transfers a second."""
        count = self.scale.small_count // 4

        def rate(batch: int) -> float:
            job = _move(SMALL_BYTES, 32, count * SMALL_BYTES, scatter=True, batch=batch)
            return statistics.median(Meter(client, server, job, count)() for _ in range(3))

        return max(BATCHES, key=rate)


class Busy(Protocol):
    def cpu(self, side: str) -> dict[str, float]: ...


def _figure(name: str, pairs: Pairs, unit: str, ours: Busy, peer: Busy, **bounds: Any) -> Figure:
    return Figure(
        suite="fabric",
        figure=name,
        value=pairs.median_ratio,
        unit="ratio",
        ours=statistics.median(pairs.ours),
        peer=statistics.median(pairs.peer),
        measured_in=unit,
        samples=pairs.ratios,
        noise=pairs.noise,
        cpu={**ours.cpu("ours"), **peer.cpu("peer")},
        **bounds,
    )


def _stream(bench: Bench, write: bool, block: int, depth: int) -> tuple[Pairs, Meter, Meter]:
    total = bench.scale.stream_bytes
    job = _move(block, depth, total, write=write)
    ours = Meter(bench.host(depth), bench.target, job, total / 1e9)
    peer = Meter(*bench.best_bare(job), job, total / 1e9)
    return interleaved(ours, peer, bench.scale.rounds), ours, peer


def _stream_1mib(bench: Bench, write: bool, name: str, cpu_name: str) -> Iterator[Figure]:
    pairs, ours, peer = _stream(bench, write, STREAM_BYTES, 16)
    yield _figure(name, pairs, "GB/s", ours, peer, at_least=0.88)
    gigabytes = bench.scale.stream_bytes / 1e9
    # Two measures of the peer a round, and a first one of each that only warms.
    used = [mine / theirs for mine, theirs in zip(ours.client_cpu_s[1:], peer.client_cpu_s[1::2], strict=True)]
    yield Figure(
        suite="fabric",
        figure=cpu_name,
        value=statistics.median(used),
        unit="ratio",
        ours=statistics.median(ours.client_cpu_s) / gigabytes,
        peer=statistics.median(peer.client_cpu_s) / gigabytes,
        measured_in="CPU s/GB",
        samples=used,
        at_most=1.2,
    )


def read_1mib(bench: Bench) -> Iterator[Figure]:
    yield from _stream_1mib(bench, False, "read_1mib", "cpu_host_1mib")


def write_1mib(bench: Bench) -> Iterator[Figure]:
    yield from _stream_1mib(bench, True, "write_1mib", "cpu_host_write_1mib")


def read_128kib(bench: Bench) -> Iterator[Figure]:
    yield _figure("read_128kib", *_with_unit(_stream(bench, False, 128 * KIB, 32), "GB/s"), at_least=0.88)


def write_128kib(bench: Bench) -> Iterator[Figure]:
    yield _figure("write_128kib", *_with_unit(_stream(bench, True, 128 * KIB, 32), "GB/s"), at_least=0.88)


def _with_unit(measured: tuple[Pairs, Meter, Meter], unit: str) -> tuple[Pairs, str, Meter, Meter]:
    pairs, ours, peer = measured
    return pairs, unit, ours, peer


def random_read_4kib_depth32(bench: Bench) -> Iterator[Figure]:
    count = bench.scale.small_count
    sides = []
    probe = _move(SMALL_BYTES, 32, count // 4 * SMALL_BYTES, scatter=True, batch=BATCHES[1])
    for client, server in ((bench.host(32), bench.target), bench.best_bare(probe)):
        batch = bench.best_batch(client, server)
        job = _move(SMALL_BYTES, 32, count * SMALL_BYTES, scatter=True, batch=batch)
        sides.append(Meter(client, server, job, count / 1e3))
    pairs = interleaved(sides[0], sides[1], bench.scale.rounds)
    yield _figure("random_read_4kib_depth32", pairs, "1000/s", sides[0], sides[1], at_least=0.6)


def latency_4kib_depth1(bench: Bench) -> Iterator[Figure]:
    """The client polls on both sides; the server sleeps for each request."""
    job = {"job": "ping", "block": SMALL_BYTES, "count": bench.scale.ping_count, "spin": True}
    ours = Meter(bench.host(1, poll_us=POLL_US), bench.target, job, 1)
    peer = Meter(*bench.bare(SEND_BYTES[0]), job, 1)
    pairs = interleaved(ours, peer, bench.scale.rounds)
    yield _figure("latency_4kib_depth1", pairs, "us", ours, peer, at_most=1.5)


def latency_4kib_asleep(bench: Bench) -> Iterator[Figure]:
    """For comparison: nobody polls."""
    job = {"job": "ping", "block": SMALL_BYTES, "count": bench.scale.ping_count, "spin": False}
    ours = Meter(bench.host(1), bench.target, job, 1)
    peer = Meter(*bench.bare(SEND_BYTES[0]), job, 1)
    pairs = interleaved(ours, peer, bench.scale.rounds)
    yield _figure("latency_4kib_asleep", pairs, "us", ours, peer)


def python_batches_of_256(bench: Bench) -> Iterator[Figure]:
    count = bench.scale.small_count
    load = bench.python()
    everything = bench.scale.memory_bytes // SMALL_BYTES
    load.ask(job="batches", block_bytes=SMALL_BYTES, count=everything, batch=256)
    if not load.ask(job="check", block_bytes=SMALL_BYTES, seed=PATTERN, scatter=True)["same"]:
        raise AssertionError("Python's batches did not read the bytes that were written")
    host = bench.host(32)
    batch = bench.best_batch(host, bench.target)
    ours = Meter(
        load,
        bench.target,
        {"job": "batches", "block_bytes": SMALL_BYTES, "count": count, "batch": 256},
        count / 1e3,
    )
    peer_job = _move(SMALL_BYTES, 32, count * SMALL_BYTES, scatter=True, batch=batch)
    peer = Meter(host, bench.target, peer_job, count / 1e3)
    pairs = interleaved(ours, peer, bench.scale.rounds)
    yield _figure("python_batches_of_256", pairs, "1000/s", ours, peer, at_least=0.85)


def gil_held(bench: Bench) -> Iterator[Figure]:
    """The client may use a second core, for the thread that computes."""
    total = 2 * bench.scale.stream_bytes
    load = bench.python(second_core=True)
    sides = [
        Meter(
            load,
            bench.target,
            {"job": "read", "block_bytes": STREAM_BYTES, "count": total // STREAM_BYTES, "compute": compute},
            total / 1e9,
        )
        for compute in (True, False)
    ]
    pairs = interleaved(sides[0], sides[1], bench.scale.rounds)
    yield _figure("gil_held", pairs, "GB/s", sides[0], sides[1], at_least=0.9)


class Disturbed:
    """A measure while another process computes on these cores."""

    def __init__(self, meter: Meter, on: set[int]) -> None:
        self._meter, self._on = meter, on

    def __call__(self) -> float:
        with cores.pinned(self._on):
            busy = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        try:
            return self._meter()
        finally:
            busy.kill()
            busy.wait()


def gil_held_bare(bench: Bench) -> Iterator[Figure]:
    """What the cores leave of `gil_held`: a bare socket beside whose client somebody computes, over it alone."""
    total = 2 * bench.scale.stream_bytes
    job = _move(STREAM_BYTES, 16, total)
    client, server = bench.best_bare(job, second_core=True)
    sides = [Meter(client, server, job, total / 1e9) for _ in range(2)]
    disturbed = Disturbed(sides[0], {bench.layout.client, bench.layout.second})
    pairs = interleaved(disturbed, sides[1], bench.scale.rounds)
    yield _figure("gil_held_bare", pairs, "GB/s", sides[0], sides[1])


def digests_on(bench: Bench) -> Iterator[Figure]:
    total = bench.scale.stream_bytes
    job = _move(STREAM_BYTES, 16, total)
    ours = Meter(bench.host(16, digests=True), bench.target, job, total / 1e9)
    peer = Meter(bench.host(16), bench.target, job, total / 1e9)
    pairs = interleaved(ours, peer, bench.scale.rounds)
    yield _figure("digests_on", pairs, "GB/s", ours, peer, at_least=0.7)


class Group:
    """Several clients at once; the rate of all together."""

    def __init__(self, clients: list[Program], servers: list[Program], job: dict[str, Any], work: float) -> None:
        self._clients, self._servers, self._job, self._work = clients, servers, job, work
        self.client_cores: list[float] = []
        self.server_cores: list[float] = []

    def __call__(self) -> float:
        before = sum(cpu_s(server.process.pid) for server in self._servers)
        begun = time.perf_counter()
        for client in self._clients:
            client.send(**self._job)
        used = sum(client.answer()["cpu_s"] for client in self._clients)
        seconds = time.perf_counter() - begun
        self.client_cores.append(used / seconds)
        self.server_cores.append((sum(cpu_s(server.process.pid) for server in self._servers) - before) / seconds)
        return self._work / seconds

    def cpu(self, side: str) -> dict[str, float]:
        return {
            f"{side} clients": statistics.median(self.client_cores),
            f"{side} server": statistics.median(self.server_cores),
        }


def eight_clients(bench: Bench) -> Iterator[Figure]:
    """One target with a namespace and a reactor for each client, beside eight servers."""
    count = len(bench.layout.pairs)
    size = bench.scale.memory_bytes // 4
    server_cores = {server for _, server in bench.layout.pairs}
    target = bench.start(python("target", size, count, min(count, len(server_cores))), server_cores)
    hosts, bares, servers = [], [], []
    for number, (client_core, server_core) in enumerate(bench.layout.pairs):
        servers.append(bench.start(native("serve", size, SEND_BYTES[0]), {server_core}))
        bares.append(bench.start(native("bare", servers[-1].greeting, size, SEND_BYTES[0]), {client_core}))
        options = json.dumps({"depth": 16, "nsid": number + 1})
        hosts.append(bench.start(native("host", target.greeting, NQN, size, options), {client_core}))
        hosts[-1].ask(job="fill", seed=number)
        hosts[-1].ask(**_move(STREAM_BYTES, 16, size, write=True))
    total = max(size, bench.scale.stream_bytes // 4)
    job = _move(STREAM_BYTES, 16, total)
    ours = Group(hosts, [target], job, count * total / 1e9)
    peer = Group(bares, servers, job, count * total / 1e9)
    pairs = interleaved(ours, peer, bench.scale.rounds)
    for number, host in enumerate(hosts):
        if not host.ask(job="check", seed=number, block=STREAM_BYTES, random=False)["same"]:
            raise AssertionError(f"client {number} did not read what it had written")
    yield _figure("eight_clients", pairs, "GB/s", ours, peer, at_least=0.85)


def idle_cpu(bench: Bench) -> Iterator[Figure]:
    """A Python process with 16 devices open and nothing to do, keep-alives included."""
    load = bench.python(devices=16)
    answer = load.ask(job="idle", seconds=bench.scale.idle_s)
    percent = 100 * answer["cpu_s"] / answer["seconds"]
    yield Figure(suite="fabric", figure="idle_cpu", value=percent, unit="% of a core", samples=[percent], at_most=0.5)


def pure_python_loop(bench: Bench) -> Iterator[Figure]:
    """For scale: what a loop in plain Python gets out of the bare server."""
    load = bench.python()
    rounds = max(3, bench.scale.rounds // 3)
    for name, block, depth, count, unit in (
        ("pure_python_loop_1mib", STREAM_BYTES, 16, bench.scale.stream_bytes // STREAM_BYTES, "GB/s"),
        ("pure_python_loop_4kib", SMALL_BYTES, 32, bench.scale.small_count, "1000/s"),
    ):
        # The server has one client at a time.
        server = bench.start(native("serve", bench.scale.memory_bytes, SEND_BYTES[0]), {bench.layout.server})
        work = count * block / 1e9 if unit == "GB/s" else count / 1e3
        job = {"job": "socket_loop", "port": int(server.greeting), "block_bytes": block, "depth": depth, "count": count}
        meter = Meter(load, server, job, work)
        samples = [meter() for _ in range(rounds)]
        if not load.ask(job="check", block_bytes=block, seed=PATTERN, scatter=True)["same"]:
            raise AssertionError("the loop did not read the server's bytes")
        yield Figure(
            suite="fabric",
            figure=name,
            value=statistics.median(samples),
            unit=unit,
            samples=samples,
            cpu=meter.cpu("ours"),
        )


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "read_1mib": read_1mib,
    "write_1mib": write_1mib,
    "read_128kib": read_128kib,
    "write_128kib": write_128kib,
    "random_read_4kib_depth32": random_read_4kib_depth32,
    "latency_4kib_depth1": latency_4kib_depth1,
    "latency_4kib_asleep": latency_4kib_asleep,
    "python_batches_of_256": python_batches_of_256,
    "gil_held": gil_held,
    "gil_held_bare": gil_held_bare,
    "digests_on": digests_on,
    "eight_clients": eight_clients,
    "idle_cpu": idle_cpu,
    "pure_python_loop": pure_python_loop,
}


def run(quick: bool, only: Sequence[str] = ()) -> Iterator[Figure]:
    bench = Bench(QUICK if quick else FULL)
    try:
        with cores.pinned(bench.layout.driver):
            for name in only or FIGURES:
                yield from FIGURES[name](bench)
    finally:
        bench.close()
