"""The Linux kernel host hears of what changes at the target: ANA states, a namespace that grows, comes and goes.

One script (`kernel_host_changes.sh`) runs all cases, in a guest that others share; each case is one test here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.fabric import (
    AnaGroupOptions,
    ListenOptions,
    MemoryMedia,
    NamespaceOptions,
    SubsystemOptions,
    Target,
    TargetOptions,
)
from tests.interop.guest import Part, check_case, check_end

pytestmark = [pytest.mark.rig, pytest.mark.slow, pytest.mark.timeout(1500)]

NQN = "nqn.2024-01.lab:headrace-changes"
CASES = ["connected", "ana", "resize", "namespaces"]
SCRIPT = Path(__file__).with_name("kernel_host_changes.sh")
SIZE = 16 << 20


@contextmanager
def part(folder: Path) -> Iterator[Part]:
    options = TargetOptions(
        listen=[ListenOptions(name="a"), ListenOptions(name="b")],
        subsystems=[
            SubsystemOptions(
                nqn=NQN,
                ana_groups=[AnaGroupOptions(id=1, states={"b": "non-optimized"})],
                namespaces=[NamespaceOptions(media=MemoryMedia(size_bytes=SIZE))],
            )
        ],
    )
    second = NamespaceOptions(nsid=2, media=MemoryMedia(size_bytes=SIZE))
    with Target(options) as target:
        (_, first_port), (_, second_port) = target.addresses
        yield Part(
            SCRIPT,
            env={"PORT": first_port, "SECOND": second_port, "NQN": NQN},
            outside={
                "inaccessible": lambda: target.set_ana_state(NQN, 1, "inaccessible", portal="a"),
                "optimized": lambda: target.set_ana_state(NQN, 1, "optimized", portal="a"),
                "grow": lambda: target.resize_namespace(NQN, 1, 2 * SIZE),
                "add": lambda: target.add_namespace(NQN, second),
                "remove": lambda: _remove(target),
            },
        )


def _remove(target: Target) -> None:
    assert target.remove_namespace(NQN, 2), "commands of the kernel are still under way"


@pytest.fixture(scope="module")
def guest_output(guest_outputs: dict[str, str]) -> str:
    return guest_outputs[__name__]


@pytest.mark.parametrize("case", CASES)
def test_case(guest_output: str, case: str) -> None:
    check_case(guest_output, case)


def test_the_script_ran_to_its_end(guest_output: str) -> None:
    check_end(guest_output)
