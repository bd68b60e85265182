"""Our host on several ports of one kernel subsystem: ANA states that change, a path that is cut, a restart.

A writer and verifier runs throughout; none of its calls may fail.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from headrace.accidents.relay import Relay
from headrace.device import BlockDevice, open_device
from headrace.units import KIB
from tests.interop.kernel import KernelTarget
from tests.waiting import until

pytestmark = [pytest.mark.rig, pytest.mark.slow, pytest.mark.timeout(600)]

PIECE_BYTES = 64 * KIB
PIECES = 64


class _Verifier(threading.Thread):
    """Writes pieces, each with what it has never held, and reads others back, until told to stop."""

    def __init__(self, device: BlockDevice) -> None:
        super().__init__(name="verifier")
        self._device = device
        self._over = threading.Event()
        self.rounds = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        random = np.random.default_rng(5)
        written: dict[int, np.ndarray] = {}
        found = np.zeros(PIECE_BYTES, np.uint8)
        try:
            while not self._over.is_set():
                piece = int(random.integers(PIECES))
                data = random.integers(0, 256, PIECE_BYTES, dtype=np.uint8)
                self._device.write(piece * PIECE_BYTES, data)
                written[piece] = data
                other = int(random.choice(list(written)))
                self._device.read_into(other * PIECE_BYTES, found)
                assert np.array_equal(found, written[other]), f"piece {other} after {self.rounds} rounds"
                self.rounds += 1
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._over.set()
        self.join(120)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


@contextmanager
def verifying(device: BlockDevice) -> Iterator[_Verifier]:
    verifier = _Verifier(device)
    verifier.start()
    try:
        yield verifier
    finally:
        verifier.stop()


def progress(verifier: _Verifier, rounds: int = 5) -> None:
    """So many more rounds, on whatever path."""
    goal = verifier.rounds + rounds
    until(lambda: verifier.rounds >= goal or verifier.error is not None)


def paths(device: BlockDevice) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = device.describe()["paths"]
    return found


def moved(device: BlockDevice) -> list[int]:
    return [path["reads"] + path["writes"] for path in paths(device)]


def uri(target: KernelTarget, ports: Sequence[int], **options: object) -> str:
    portals = ",".join(f"127.0.0.1:{port}" for port in ports)
    query = "&".join(["nsid=1", *(f"{key}={value}" for key, value in options.items())])
    return f"nvme+tcp://{portals}/{target.nqn}?{query}"


@pytest.fixture
def target(reserving_kernel: KernelTarget) -> KernelTarget:
    return reserving_kernel


def test_ana_states_of_the_kernel_are_obeyed_as_they_change(target: KernelTarget) -> None:
    device = open_device(uri(target, target.ports, keepalive=5))
    try:
        until(lambda: [path["state"] for path in paths(device)] == ["ready", "ready"])
        assert [path["ana"] for path in paths(device)] == ["optimized", "optimized"]
        with verifying(device) as verifier:
            progress(verifier)
            for closed, open_ in ((1, 0), (0, 1)):
                target.set_ana(open_ + 1, "optimized")
                target.set_ana(closed + 1, "inaccessible")
                until(lambda closed=closed: not paths(device)[closed]["usable"])  # type: ignore[misc]
                assert paths(device)[closed]["ana"] == "inaccessible"
                before = moved(device)
                progress(verifier)
                after = moved(device)
                assert after[open_] > before[open_]
                assert after[closed] == before[closed], "a command went by a path that the target calls inaccessible"
            target.set_ana(1, "non-optimized")
            until(lambda: bool(paths(device)[0]["usable"]) or paths(device)[0]["ana"] == "non-optimized")
            before = moved(device)
            progress(verifier)
            assert moved(device)[0] == before[0], "the optimized path goes first"
    finally:
        target.set_ana(1, "optimized")
        target.set_ana(2, "optimized")
        device.close()


def test_a_cut_path_is_not_noticed_by_the_caller(target: KernelTarget) -> None:
    with Relay(target.ports[0]) as relay:
        # By turns: the other policy may leave the slower path alone.
        device = open_device(uri(target, (relay.port, target.ports[1]), keepalive=5, policy="round-robin"))
        try:
            until(lambda: [path["state"] for path in paths(device)] == ["ready", "ready"])
            lost = device.loss_count()
            with verifying(device) as verifier:
                progress(verifier)
                relay.cut()
                until(lambda: paths(device)[0]["state"] != "ready")
                progress(verifier)
                assert device.loss_count() > lost
                relay.heal()
                until(lambda: paths(device)[0]["state"] == "ready")
                before = moved(device)
                progress(verifier, 20)
                assert moved(device)[0] > before[0]
        finally:
            device.close()


def test_a_kernel_target_that_restarts_is_waited_for(target: KernelTarget) -> None:
    with open_device(uri(target, target.ports[:1], keepalive=5, loss_timeout=300, io_timeout=20)) as device:
        data = np.random.default_rng(1).integers(0, 256, PIECE_BYTES, dtype=np.uint8)
        device.write(0, data)
        device.flush()
        lost = device.loss_count()
        target.power_off()
        found = np.zeros(PIECE_BYTES, np.uint8)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(device.read_into, 0, found)
            target.power_on()
            reading.result(120)
        assert np.array_equal(found, data)
        assert device.loss_count() > lost
