"""The Linux kernel as a peer: `linux-lab` boots a Debian kernel in QEMU, with nvmet, nvme-tcp, nvme-cli and fio.

These tests run with HEADRACE_RIG=1 (`make rig`; CI does). Then a rig that cannot be built is a failure, not a skip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.testing.serve import free_port
from headrace.units import MIB
from tests.interop.guest import run_parts
from tests.interop.kernel import KernelTarget, kernel_target

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


@pytest.fixture(scope="session")
def guest_outputs(
    request: pytest.FixtureRequest, lab: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What the scripts of all modules with a `part` printed, by module, as far as a test of theirs is to run."""
    here = [item.module for item in request.session.items if item.path.parent == LAB.parent]
    modules = {module.__name__: module for module in here if hasattr(module, "part")}
    with ExitStack() as stack:
        parts = {
            name.rpartition(".")[2]: stack.enter_context(module.part(tmp_path_factory.mktemp("media")))
            for name, module in modules.items()
        }
        printed = run_parts(lab, parts, tmp_path_factory.mktemp("share"), timeout_s=300 * len(parts))
        print(*printed.values())
    return {name: printed[name.rpartition(".")[2]] for name in modules}


@pytest.fixture(scope="session")
def reserving_kernel(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelTarget]:
    """One that keeps reservations, on two ports, with two namespaces on files."""
    folder = tmp_path_factory.mktemp("media")
    images = [folder / name for name in ("a.img", "b.img")]
    for image in images:
        with image.open("wb") as file:
            file.truncate(16 * MIB)
    share, ports = tmp_path_factory.mktemp("share"), (free_port(), free_port())
    nqn = "nqn.2024-01.lab:reserving-kernel"
    with kernel_target(lab, nqn, "--reservations", ports=ports, share=share, images=images) as running:
        yield running
