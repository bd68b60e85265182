"""headrace on block devices of a real kernel: over NVMe/TCP to our target, over NVMe/RDMA (soft RoCE) to the kernel's
own, through device-mapper, and with failures; and training over the kernel's NFS and over its target.

One guest runs all cases (`kernel_block_cases.py`), with the Python that runs these tests; each case is one test here.
"""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from examples.nfs_cure.judge import disagreements, judge, too_busy
from examples.nfs_cure.picture import page, text
from examples.nfs_cure.run import make_setting, measured_of
from examples.nfs_cure.world import World
from headrace.device import ReservationType, open_device
from headrace.errors import ReservationConflict
from headrace.testing.serve import ServeProcess, free_port, serving
from headrace.volume import Volume
from tests.interop.guest import Part, check_case, run_in_guest

pytestmark = [pytest.mark.rig, pytest.mark.slow, pytest.mark.timeout(1200)]

NQN = "nqn.2024-01.lab:headrace-block"
VOLATILE_NQN = "nqn.2024-01.lab:headrace-volatile"
RDMA_NQN = "nqn.2024-01.lab:nvmet-rdma"
SCRIPT = Path(__file__).with_name("kernel_block.sh")
CASES_FILE = Path(__file__).with_name("kernel_block_cases.py")
CASES = re.findall(r"^@case\ndef (\w+)", CASES_FILE.read_text(), re.M)
#: Of `examples/nfs_cure`.
WORLD = World()
#: As in the cases.
KEY, OTHER = 0x1234, 0x5678
DATA = np.random.default_rng(42).integers(0, 256, 3 << 20, np.uint8)
SHARED = ReservationType.WRITE_EXCLUSIVE_REGISTRANTS


class _Volatile:
    """A target that keeps what was not flushed in its own memory, and loses it."""

    def __init__(self, image: Path) -> None:
        self.port = free_port()
        self._image = image
        self._stack = ExitStack()
        self._start()

    def _start(self) -> None:
        options = ["--volatile-cache", "32MiB"]
        self._target: ServeProcess = self._stack.enter_context(
            serving(VOLATILE_NQN, f"{self._image}:16MiB", port=self.port, options=options)
        )

    def lose(self) -> None:
        self._target.process.kill()
        self._stack.close()
        self._start()

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("share")


@pytest.fixture(scope="module")
def guest_output(lab: Path, share: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("media")
    image = folder / "namespace.img"
    volatile = _Volatile(folder / "volatile.img")
    cure = make_setting(WORLD, folder)
    with serving(NQN, f"{image}:64MiB") as target, open_device(target.uri(), hostid=uuid.uuid4()) as device:

        def at(offset: int, length: int) -> bytes:
            with image.open("rb") as file:
                file.seek(offset)
                return file.read(length)

        def same_bytes() -> None:
            assert at(1 << 20, len(DATA)) == DATA.tobytes()

        def same_volume() -> None:
            with Volume.open(target.uri()) as volume:
                assert volume.name == "in the guest"
                assert volume.read("numbers") == DATA.tobytes()

        def take_volume() -> None:
            with (
                Volume.open(target.uri(), write=True) as volume,
                volume.session(run_id="outside", takeover="now") as session,
                session.transaction() as tx,
            ):
                assert volume.read("before") == DATA.tobytes()
                tx.put("outside", b"o" * 10_000)

        def take_volume_again() -> None:
            with Volume.open(target.uri(), write=True) as volume:
                volume.session(run_id="outside", takeover="now").close()

        def clear() -> None:
            device.reservations.register(OTHER)
            device.reservations.clear(OTHER)

        def volume_is_whole() -> None:
            with Volume.open(target.uri()) as volume:
                assert "late" not in volume
                assert volume.read("outside") == b"o" * 10_000 and volume.read("before") == DATA.tobytes()

        def refused() -> None:
            assert at(0, 4096) == b"h" * 4096
            with pytest.raises(ReservationConflict):
                device.write(0, b"o" * 4096)
            report = device.reservations.report()
            assert report.type == SHARED and [found.key for found in report.holders] == [KEY]

        def preempt() -> None:
            device.reservations.register(OTHER)
            device.reservations.preempt(OTHER, KEY, SHARED)

        def nothing_of_it() -> None:
            assert at(0, 4096) == b"h" * 4096
            conflicts = target.ask("status")["subsystems"][0]["namespaces"][0]["conflicts"]
            # Ours was the first.
            assert conflicts > 1

        def only_the_other() -> None:
            assert [found.key for found in device.reservations.report().registrants] == [OTHER]

        def shut_out() -> None:
            assert at(0, 4096) == b"t" * 4096
            with pytest.raises(ReservationConflict):
                device.write(0, b"o" * 4096)

        part = Part(
            SCRIPT,
            env=cure.env
            | {
                "PORT": target.port,
                "NQN": NQN,
                "RDMA_NQN": RDMA_NQN,
                "VOLATILE_PORT": volatile.port,
                "VOLATILE_NQN": VOLATILE_NQN,
                "CASES": CASES_FILE,
            },
            outside={
                "bytes": same_bytes,
                "volume": same_volume,
                "take-volume": take_volume,
                "volume-is-whole": volume_is_whole,
                "take-volume-again": take_volume_again,
                "clear": clear,
                "refused": refused,
                "preempt": preempt,
                "nothing-of-it": nothing_of_it,
                "only-the-other": only_the_other,
                "shut-out": shut_out,
                "lose-cache": volatile.lose,
            },
        )
        output = run_in_guest(lab, part, share, timeout_s=900, machine=True, options=cure.words)
        volatile.close()
        assert target.process.poll() is None, f"the target died\n{target.output()}\n{output}"
    sys.stdout.write(output)
    yield output


@pytest.mark.parametrize("case", CASES)
def test_case(guest_output: str, case: str) -> None:
    check_case(guest_output, case)


def test_the_script_ran_to_its_end(guest_output: str) -> None:
    # Refused and failed writes are errors in its log, so that only a fault of the kernel's is looked for.
    assert guest_output.rstrip().endswith("FINISHED")
    assert "Call Trace" not in guest_output


def test_watch_bench_and_plan_agree_on_nfs_and_its_cure(guest_output: str, share: Path) -> None:
    """`examples/nfs_cure`, with few steps: images over NFS are held up by storage, over NVMe/TCP not; text is not."""
    rows = judge(WORLD, measured_of(guest_output), share / "watch")
    if busy := too_busy(rows):
        pytest.skip(busy)
    found = disagreements(rows)
    assert not found, "\n".join([*found, text(rows)])
    assert "not the problem" in page(rows, WORLD, found)
