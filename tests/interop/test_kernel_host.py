"""The Linux kernel host against `headrace serve`: discover, file system, fio with verification, digests, e2fsck.

One script (`kernel_host.sh`) runs all cases, in a guest that others share; each case is one test here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.testing.serve import serving
from tests.interop.guest import Part, check_case, check_end

pytestmark = [pytest.mark.rig, pytest.mark.slow, pytest.mark.timeout(1500)]

NQN = "nqn.2024-01.lab:headrace-target"
CASES = ["discover", "identify", "plain", "header-digest", "data-digest", "both-digests"]
SCRIPT = Path(__file__).with_name("kernel_host.sh")


@contextmanager
def part(folder: Path) -> Iterator[Part]:
    with serving(NQN, "mem:96MiB") as target:
        yield Part(SCRIPT, {"PORT": target.port, "NQN": NQN})
        assert target.process.poll() is None, f"the target died\n{target.output()}"


@pytest.fixture(scope="module")
def guest_output(guest_outputs: dict[str, str]) -> str:
    return guest_outputs[__name__]


@pytest.mark.parametrize("case", CASES)
def test_case(guest_output: str, case: str) -> None:
    check_case(guest_output, case)


def test_the_script_ran_to_its_end(guest_output: str) -> None:
    check_end(guest_output)


def test_no_controller_was_reset(guest_output: str) -> None:
    messages = guest_output.rpartition("---- kernel messages")[2]
    assert not re.search(r"reset|timeout", messages, re.I), messages
