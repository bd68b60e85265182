"""Over real NVMe/TCP: a target with a volatile cache is killed again and again while a volume is written."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace.testing.serve import free_port
from headrace.volume import Volume
from headrace.volume.repair.scrub import scrub
from tests.volume.support import KIB, STRIPE, content, state_of

#: How often, besides the one at the end.
KILLS = 2
NQN = "nqn.2026-01.io.headrace:volume-test"


class Target:
    """A target process on one port, over files, whose unflushed writes die with it."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self._command = [
            *(sys.executable, "-m", "headrace.cli", "serve"),
            *(f"{directory / name}:16MiB" for name in "ab"),
            *("--listen", f"127.0.0.1:{self.port}", "--nqn", NQN, "--volatile-cache", "16MiB"),
        ]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def uris(self) -> list[str]:
        return [f"nvme+tcp://127.0.0.1:{self.port}/{NQN}?nsid={nsid}&loss_timeout=60" for nsid in (1, 2)]


def wait_for_target(target: Target) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", target.port), 0.5).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the target does not listen")


@pytest.mark.slow
def test_what_a_killed_target_forgot_is_written_again(tmp_path: Path) -> None:
    target = Target(tmp_path)
    chance = random.SystemRandom()
    number, over = 0, False

    def killer() -> None:
        for _ in range(KILLS):
            # Something was done since the last time, and more is under way: somewhere in the middle of that.
            wanted = number + 2
            while number < wanted:
                if over:
                    return
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.05))
            target.kill()
            target.start()
            wait_for_target(target)

    expected: dict[str, bytes] = {}
    thread = threading.Thread(target=killer)
    try:
        wait_for_target(target)
        volume = Volume.create(target.uris(), stripe_bytes=STRIPE)
        session = volume.session("run", heartbeat_s=0.5)
        thread.start()
        last = None
        while last is None or number < last:
            if last is None and not thread.is_alive():
                last = number + 2
            with session.transaction() as tx:
                tx.put(f"big/{number}", content(number, 1200 * KIB))
                tx.put(f"small/{number}", content(number + 1000, 5000), checksum_block_bytes=4096)
                if number >= 3:
                    tx.delete(f"big/{number - 3}")
            expected[f"big/{number}"] = content(number, 1200 * KIB)
            expected[f"small/{number}"] = content(number + 1000, 5000)
            expected.pop(f"big/{number - 3}", None)
            number += 1
        losses = [device.loss_count() for device in volume.devices]
        # The last cache dies too: only what was acknowledged is left.
        target.kill()
        target.start()
        wait_for_target(target)
        assert state_of(volume) == expected
        session.close()
        volume.close()
        with Volume.open(target.uris()) as again:
            assert state_of(again) == expected
            assert scrub(again.devices).clean
        assert min(losses) >= 1
    finally:
        over = True
        if thread.is_alive():
            thread.join(150)
        target.kill()
