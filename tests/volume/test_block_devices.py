"""A volume on block devices of the kernel: loop devices here, NVMe over TCP and RDMA in the rig."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from headrace.device import BlockDevice
from headrace.errors import VolumeDamaged, WriterActive
from headrace.testing.loop import LoopDevice
from headrace.units import MIB
from headrace.volume import Volume
from headrace.volume.writing import fence

pytestmark = pytest.mark.skipif(bool(LoopDevice.problem()), reason=LoopDevice.problem() or "there are loop devices")

DATA = np.random.default_rng(3).integers(0, 256, 5_000_001, np.uint8).tobytes()


@pytest.fixture
def loops(tmp_path: Path) -> Iterator[list[LoopDevice]]:
    made = [LoopDevice(tmp_path / f"loop-{number}", 32 * MIB) for number in range(2)]
    yield made
    for loop in made:
        loop.close()


def test_two_members_by_their_paths(loops: list[LoopDevice]) -> None:
    first, second = (loop.path for loop in loops)
    with Volume.create(f"{first},{second}", name="loops") as volume, volume.session() as session:
        assert session.fence == "machine"
        with session.transaction() as tx:
            tx.put("object", DATA)
    with Volume.open(f"{second},block:{first}?engine=pread") as volume:
        assert volume.read("object") == DATA
        assert not any(member.volatile_cache for member in volume.info().members)


def test_one_writer_a_machine(loops: list[LoopDevice]) -> None:
    path = loops[0].path
    with (
        Volume.create(path) as volume,
        volume.session(),
        Volume.open(path, write=True) as other,
        pytest.raises(WriterActive, match="a process of this machine"),
    ):
        other.session(takeover="now")


def test_a_member_that_has_shrunk(loops: list[LoopDevice]) -> None:
    path = loops[0].path
    with Volume.create(path) as volume, volume.session() as session, session.transaction() as tx:
        tx.put("object", DATA)
    loops[0].resize(16 * MIB)
    with pytest.raises(VolumeDamaged, match="smaller than it was"):
        Volume.open(path)


class _Said:
    """What a device says of itself, and nothing else."""

    def __init__(self, name: str, problem: str) -> None:
        self._said: dict[str, Any] = {
            "transport": "block",
            "kernel": {"name": name},
            "reservations": {"problem": problem},
        }

    def describe(self) -> dict[str, Any]:
        return self._said


@pytest.mark.parametrize(
    ("name", "strength"),
    [("vda", fence.NONE), ("sdb1", fence.NONE), ("loop3", fence.MACHINE), ("loop3p1", fence.MACHINE)],
)
def test_a_disk_without_reservations_fences_nobody(name: str, strength: str) -> None:
    """There may be a network behind it, and other nodes; a lock keeps out this machine's only."""
    assert fence.kind_of(cast(BlockDevice, _Said(name, "none here"))) == strength
