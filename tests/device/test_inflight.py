"""The cap on reads under way: it holds, nobody starves, and nothing is left of what was lost."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.device import Batch, open_device, read_batch
from headrace.errors import DeviceError, UsageError
from headrace.settings import inflight_bytes
from headrace.testing.serve import serving
from headrace.units import MIB
from tests.waiting import until

NQN = "nqn.2026-01.test:inflight"
SIZE = 16 * MIB


@pytest.mark.parametrize(("text", "value"), [("", None), ("auto", None), ("off", 0), ("64MiB", 64 * MIB)])
def test_the_setting(monkeypatch: pytest.MonkeyPatch, text: str, value: int | None) -> None:
    monkeypatch.setenv("HEADRACE_INFLIGHT", text)
    assert inflight_bytes() == value


@pytest.mark.parametrize("text", ["no", "-1", "0", "1 parsec"])
def test_a_setting_that_cannot_be_meant(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HEADRACE_INFLIGHT", text)
    with pytest.raises(UsageError, match="HEADRACE_INFLIGHT"):
        inflight_bytes()


def everything(members: int) -> Batch:
    """All of every member, 256 KiB at a time, the members in turns."""
    piece = 256 << 10
    count = SIZE // piece
    number = np.arange(count * members)
    return Batch(
        member=(number % members).astype(np.uint32),
        offset=(number // members * piece).astype(np.uint64),
        length=np.full(len(number), piece, np.uint64),
        buffer_offset=(number % members * SIZE + number // members * piece).astype(np.uint64),
    )


@pytest.mark.parametrize(("setting", "mode", "held"), [("1MiB", str(MIB), True), ("off", "off", False)])
def test_many_reads_of_two_devices(monkeypatch: pytest.MonkeyPatch, setting: str, mode: str, held: bool) -> None:
    monkeypatch.setenv("HEADRACE_INFLIGHT", setting)
    source = np.random.default_rng(3).integers(0, 256, 2 * SIZE, dtype=np.uint8)
    with serving(NQN, f"mem:{SIZE}", f"mem:{SIZE}") as target:
        devices = [open_device(target.uri(nsid=1)), open_device(target.uri(nsid=2))]
        for number, device in enumerate(devices):
            device.write(0, source[number * SIZE : (number + 1) * SIZE])
        found = np.zeros(2 * SIZE, np.uint8)
        counted = [0]

        def told() -> bool:
            """Counters are of all devices of the process, those that another test left among them, and told now and
            then: the first may be from before."""
            read_batch(devices, everything(2), [found])
            assert np.array_equal(found, source)
            flow = devices[0].describe()["flow"]
            assert flow["mode"] == mode
            grown, counted[0] = flow["held_back"] > counted[0], flow["held_back"]
            return flow["governed"] is held and grown is held

        until(told, "reads are held back, or not")
        flow = devices[0].describe()["flow"]
        if held:
            assert flow["window_bytes"] <= MIB
            # Where it is shared, or why not: one of the two is always told.
            assert (flow["shared_in"] is None) != (flow["not_shared_because"] is None)
        for device in devices:
            device.close()


def test_what_a_lost_target_had_under_way_is_free_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_INFLIGHT", "1MiB")
    with serving(NQN, f"mem:{SIZE}") as lost, serving(NQN, f"mem:{SIZE}") as well:
        gone = open_device(lost.uri(loss_timeout=2, connect_timeout=2))
        good = open_device(well.uri())
        failed = threading.Event()

        def read_gone() -> None:
            try:
                while True:
                    read_batch([gone], everything(1), [np.zeros(SIZE, np.uint8)])
            except DeviceError:
                failed.set()

        reader = threading.Thread(target=read_gone)
        reader.start()
        try:
            for _ in range(3):
                read_batch([good], everything(1), [np.zeros(SIZE, np.uint8)])
            lost.process.kill()
            for _ in range(3):
                read_batch([good], everything(1), [np.zeros(SIZE, np.uint8)])
            assert failed.wait(30)
        finally:
            lost.process.kill()
            reader.join(30)
        read_batch([good], everything(1), [np.zeros(SIZE, np.uint8)])
        good.close()
        gone.close()


READER = """
import sys
import numpy as np
from headrace.device import Batch, open_device, read_batch
with open_device(sys.argv[1]) as device:
    buffer = np.zeros(1 << 20, np.uint8)
    batch = Batch(
        member=np.zeros(4, np.uint32),
        offset=np.arange(4, dtype=np.uint64) << 18,
        length=np.full(4, 1 << 18, np.uint64),
        buffer_offset=np.arange(4, dtype=np.uint64) << 18,
    )
    while True:
        read_batch([device], batch, [buffer])
"""


def test_processes_of_a_node_hear_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_INFLIGHT", "4MiB")
    with serving(NQN, f"mem:{SIZE}") as target, open_device(target.uri()) as device:
        buffer = np.zeros(SIZE, np.uint8)
        read_batch([device], everything(1), [buffer])
        place = device.describe()["flow"]["not_shared_because"]
        if place is not None:
            pytest.skip(f"this machine shares no cap: {place}")
        with subprocess.Popen([sys.executable, "-c", READER, target.uri()]) as other:
            try:
                deadline = time.monotonic() + 30
                while not (flow := device.describe()["flow"])["other_processes"]:
                    assert time.monotonic() < deadline, flow
                    assert other.poll() is None
                    read_batch([device], everything(1), [buffer])
            finally:
                other.kill()
        # A process that was killed is not counted for long.
        deadline = time.monotonic() + 30
        while device.describe()["flow"]["other_processes"]:
            assert time.monotonic() < deadline
            read_batch([device], everything(1), [buffer])
