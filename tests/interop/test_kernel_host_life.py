"""The Linux kernel host through what happens to a target: killed and started again, a path cut, namespaces that change.

One script (`kernel_host_life.sh`) runs all cases, in a guest that others share; each case is one test here. fio
verifies what it reads throughout.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from headrace.accidents.relay import Relay
from headrace.testing.serve import ServeProcess, free_port, serving
from tests.interop.guest import Part, check_case, check_end

pytestmark = [pytest.mark.rig, pytest.mark.slow, pytest.mark.timeout(1500)]

NQN = "nqn.2024-01.lab:headrace-life"
CASES = ["xfs", "restart", "two-paths", "logs", "ana"]
SCRIPT = Path(__file__).with_name("kernel_host_life.sh")


class _Target:
    """A target on two ports for good, which can be killed and started again with the same media."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.other_portal = free_port()
        self._folder = folder
        self._socket = folder / "control"
        self._stack = ExitStack()
        self.process = self._start()

    def _start(self) -> ServeProcess:
        options = ["--listen", f"127.0.0.1:{self.other_portal}", "--socket", str(self._socket)]
        image = f"{self._folder / 'namespace.img'}:400MiB"
        return self._stack.enter_context(serving(NQN, image, port=self.port, options=options))

    def change(self, *words: str) -> Callable[[], None]:
        """A change at run time, as an administrator makes it: `headrace target WORDS`."""
        command = [sys.executable, "-m", "headrace.cli", "target", *words, "--socket", str(self._socket)]

        def run() -> None:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert answer.returncode == 0, f"{' '.join(words)}\n{answer.stdout}{answer.stderr}"

        return run

    def kill_and_start(self) -> None:
        self.process.process.kill()
        self._stack.close()
        self.process = self._start()

    def close(self) -> None:
        self._stack.close()


@contextmanager
def part(folder: Path) -> Iterator[Part]:
    target = _Target(folder)
    outside = {
        "restart": target.kill_and_start,
        "ana-away": target.change("ana", "inaccessible", "--portal", "1"),
        "ana-back": target.change("ana", "optimized", "--portal", "1"),
    }
    try:
        with Relay(target.port) as relay:
            yield Part(
                SCRIPT,
                env={"PORT": target.port, "SECOND": relay.port, "OTHER_PORTAL": target.other_portal, "NQN": NQN},
                outside={**outside, "cut": relay.cut, "heal": relay.heal},
            )
        assert target.process.process.poll() is None, f"the target died\n{target.process.output()}"
    finally:
        target.close()


@pytest.fixture(scope="module")
def guest_output(guest_outputs: dict[str, str]) -> str:
    return guest_outputs[__name__]


@pytest.mark.parametrize("case", CASES)
def test_case(guest_output: str, case: str) -> None:
    check_case(guest_output, case)


def test_the_script_ran_to_its_end(guest_output: str) -> None:
    check_end(guest_output)
