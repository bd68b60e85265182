"""The Linux kernel host against `headrace serve`: discover, file system, fio with verification, digests, e2fsck.

One guest runs all cases (`kernel_host.sh`); each case is one test here.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.testing.serve import serving

pytestmark = [pytest.mark.rig, pytest.mark.slow, pytest.mark.timeout(600)]

NQN = "nqn.2024-01.lab:headrace-target"
CASES = ["discover", "identify", "plain", "header-digest", "data-digest", "both-digests"]
SCRIPT = Path(__file__).with_name("kernel_host.sh")


@pytest.fixture(scope="module")
def guest_output(lab: Path) -> Iterator[str]:
    with serving(NQN, "mem:96MiB") as target:
        answer = subprocess.run(
            [lab, "run", "--script", SCRIPT, "--env", f"PORT={target.port}", "--env", f"NQN={NQN}", "--timeout", "400"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=500,
            check=False,
        )
        assert target.process.poll() is None, f"the target died\n{target.output()}\n{answer.stdout}"
    yield answer.stdout


@pytest.mark.parametrize("case", CASES)
def test_case(guest_output: str, case: str) -> None:
    if not re.search(rf"^CASE {case} ok\b", guest_output, re.M):
        own = re.search(rf"^---- {case}$.*?(?=^---- |\Z)", guest_output, re.M | re.S)
        pytest.fail(own[0] if own else guest_output, pytrace=False)


def test_the_script_ran_to_its_end(guest_output: str) -> None:
    assert guest_output.rstrip().endswith("FINISHED")


def test_the_kernel_saw_no_error(guest_output: str) -> None:
    messages = guest_output.rpartition("---- kernel messages")[2]
    assert not re.search(r"I/O error|EXT4-fs error|reset|timeout|digest error|Call Trace", messages, re.I), messages
