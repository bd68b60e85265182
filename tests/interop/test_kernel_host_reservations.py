"""The Linux kernel host and nvme-cli with reservations of our target, beside a host of ours.

One script (`kernel_host_reservations.sh`) runs all cases, in a guest that others share; each case is one test here.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from headrace.device import ReservationType, new_key, open_device
from headrace.errors import ReservationConflict
from headrace.testing.serve import serving
from tests.interop.guest import Part, check_case

pytestmark = [pytest.mark.rig, pytest.mark.slow, pytest.mark.timeout(1500)]

NQN = "nqn.2024-01.lab:headrace-reservations"
CASES = ["hold", "others_are_shut_out", "preempted", "back_again"]
SCRIPT = Path(__file__).with_name("kernel_host_reservations.sh")
KEY = 0x1234
SHARED = ReservationType.WRITE_EXCLUSIVE_REGISTRANTS
DATA = np.full(4096, 5, np.uint8)


@contextmanager
def part(folder: Path) -> Iterator[Part]:
    image = folder / "namespace.img"
    with serving(NQN, f"{image}:16MiB") as target, open_device(target.uri(), hostid=uuid.uuid4()) as device:

        def refused() -> None:
            with pytest.raises(ReservationConflict):
                device.write(0, DATA)
            report = device.reservations.report()
            assert report.type == SHARED and [found.key for found in report.holders] == [KEY]

        def preempt() -> None:
            own = new_key()
            device.reservations.register(own)
            device.reservations.preempt(own, KEY, SHARED)
            device.write(0, DATA)

        yield Part(SCRIPT, {"PORT": target.port, "NQN": NQN}, {"refused": refused, "preempt": preempt})
        assert target.process.poll() is None, f"the target died\n{target.output()}"


@pytest.fixture(scope="module")
def guest_output(guest_outputs: dict[str, str]) -> str:
    return guest_outputs[__name__]


@pytest.mark.parametrize("case", CASES)
def test_case(guest_output: str, case: str) -> None:
    check_case(guest_output, case)


def test_the_script_ran_to_its_end(guest_output: str) -> None:
    # The refused writes are errors in its log, so that is not looked at.
    assert guest_output.rstrip().endswith("FINISHED")
