"""The Linux kernel host through what happens to a target: killed and started again, a path cut, namespaces that change.

One guest runs all cases (`kernel_host_life.sh`); each case is one test here. fio verifies what it reads throughout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.testing.serve import ServeProcess, free_port, serving
from tests.interop.guest import run_in_guest
from tests.interop.relay import Relay

pytestmark = [pytest.mark.rig, pytest.mark.slow, pytest.mark.timeout(900)]

NQN = "nqn.2024-01.lab:headrace-life"
CASES = ["xfs", "restart", "two-paths"]
SCRIPT = Path(__file__).with_name("kernel_host_life.sh")


class _Target:
    """A target on one port for good, which can be killed and started again with the same media."""

    def __init__(self, image: Path) -> None:
        self.port = free_port()
        self._image = image
        self._stack = ExitStack()
        self.process = self._start()

    def _start(self) -> ServeProcess:
        return self._stack.enter_context(serving(NQN, f"{self._image}:400MiB", port=self.port))

    def kill_and_start(self) -> None:
        self.process.process.kill()
        self._stack.close()
        self.process = self._start()

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def guest_output(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    share = tmp_path_factory.mktemp("share")
    target = _Target(tmp_path_factory.mktemp("media") / "namespace.img")
    try:
        with Relay(target.port) as relay:
            output = run_in_guest(
                lab,
                SCRIPT,
                share,
                env={"PORT": target.port, "SECOND": relay.port, "NQN": NQN},
                outside={"restart": target.kill_and_start, "cut": relay.cut, "heal": relay.heal},
                timeout_s=600,
            )
        assert target.process.process.poll() is None, f"the target died\n{target.process.output()}\n{output}"
        yield output
    finally:
        target.close()


@pytest.mark.parametrize("case", CASES)
def test_case(guest_output: str, case: str) -> None:
    if not re.search(rf"^CASE {case} ok\b", guest_output, re.M):
        own = re.search(rf"^---- {case}$.*?(?=^---- |\Z)", guest_output, re.M | re.S)
        pytest.fail(own[0] if own else guest_output, pytrace=False)


def test_the_script_ran_to_its_end(guest_output: str) -> None:
    assert guest_output.rstrip().endswith("FINISHED")


def test_no_input_or_output_failed(guest_output: str) -> None:
    messages = guest_output.rpartition("---- kernel messages")[2]
    assert not re.search(r"I/O error|(EXT4-fs|XFS).*(error|corrupt)|digest error|Call Trace", messages, re.I), messages
