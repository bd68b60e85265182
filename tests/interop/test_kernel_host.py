"""The Linux kernel host against `headrace serve`: discover, file system, fio with verification, digests, e2fsck.

One guest runs all cases (`kernel_host.sh`); each case is one test here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.testing.serve import serving
from tests.interop.guest import check_case, check_end, run_in_guest

pytestmark = [pytest.mark.rig, pytest.mark.slow, pytest.mark.timeout(600)]

NQN = "nqn.2024-01.lab:headrace-target"
CASES = ["discover", "identify", "plain", "header-digest", "data-digest", "both-digests"]
SCRIPT = Path(__file__).with_name("kernel_host.sh")


@pytest.fixture(scope="module")
def guest_output(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(NQN, "mem:96MiB") as target:
        env = {"PORT": target.port, "NQN": NQN}
        output = run_in_guest(lab, SCRIPT, tmp_path_factory.mktemp("share"), env=env, timeout_s=400)
        assert target.process.poll() is None, f"the target died\n{target.output()}\n{output}"
    yield output


@pytest.mark.parametrize("case", CASES)
def test_case(guest_output: str, case: str) -> None:
    check_case(guest_output, case)


def test_the_script_ran_to_its_end(guest_output: str) -> None:
    check_end(guest_output)


def test_no_controller_was_reset(guest_output: str) -> None:
    messages = guest_output.rpartition("---- kernel messages")[2]
    assert not re.search(r"reset|timeout", messages, re.I), messages
