"""The processes behind the suite `fabric` move the bytes they say, and a figure comes out. No speed is judged here."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from benchmarks import fabric
from benchmarks.programs import Program, cpu_s, native
from headrace.units import MIB

TINY = fabric.Scale(memory_bytes=4 * MIB, stream_bytes=4 * MIB, small_count=1024, ping_count=50, rounds=3, idle_s=0.2)


@pytest.fixture(scope="module")
def bench() -> Iterator[fabric.Bench]:
    bench = fabric.Bench(TINY)
    yield bench
    bench.close()


@pytest.mark.parametrize("name", [name for name in fabric.FIGURES if name != "eight_clients"])
def test_each_figure_comes_out(bench: fabric.Bench, name: str) -> None:
    for figure in fabric.FIGURES[name](bench):
        assert figure.value > 0 or name == "idle_cpu"
        assert {"suite", "figure", "value", "samples"} <= set(json.loads(figure.json_line()))


def test_eight_clients_come_out(bench: fabric.Bench) -> None:
    (figure,) = fabric.eight_clients(bench)
    assert figure.value > 0 and len(figure.samples) == TINY.rounds


def test_wrong_bytes_are_seen(bench: fabric.Bench) -> None:
    for client in (bench.bare(fabric.SEND_BYTES[0])[0], bench.host(16)):
        client.ask(job="fill", seed=99)
        for scatter in (False, True):
            answer = client.ask(job="check", seed=fabric.PATTERN, block=4096, random=scatter)
            assert answer["same"] is False


def test_cpu_of_another_process_is_seen() -> None:
    program = Program(native("serve", 64 * MIB, fabric.SEND_BYTES[0]), {fabric.cores.layout().server})
    try:
        assert 0 < cpu_s(program.process.pid) < 60
    finally:
        program.close()
    assert program.process.returncode == 0


def test_a_program_that_does_not_start_says_so() -> None:
    with pytest.raises(RuntimeError, match="ended with status 1"):
        Program(native("bare", "not-a-port", 1, 0), {fabric.cores.layout().client})
