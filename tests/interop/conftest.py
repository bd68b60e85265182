"""The Linux kernel as a peer: `linux-lab` boots a Debian kernel in QEMU, with nvmet, nvme-tcp, nvme-cli and fio.

These tests run with HEADRACE_RIG=1 (`make rig`; CI does). Then a rig that cannot be built is a failure, not a skip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parent / "linux-lab"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("HEADRACE_RIG"):
        return
    for item in items:
        if "rig" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="the kernel rig runs with HEADRACE_RIG=1 (make rig)"))


@pytest.fixture(scope="session")
def lab() -> Path:
    """The path of linux-lab, its guest built."""
    if not shutil.which("qemu-system-x86_64") and (os.geteuid() != 0 or not shutil.which("apt-get")):
        pytest.skip("QEMU is not installed (qemu-system-x86), and only root can install it")
    answer = subprocess.run(
        [LAB, "build"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900, check=False
    )
    if answer.returncode:
        pytest.fail(f"the guest cannot be built\n{answer.stdout}\n{answer.stderr}")
    return LAB
