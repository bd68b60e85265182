"""A volume on a Linux kernel target: sessions fence each other there, in each form that a zombie has (`zombies`), also
where the target forgets who held.

What it refused is counted by its own trace. Its media are files of this machine, which are read here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.units import MIB
from headrace.volume import Volume
from tests.interop.kernel import KernelTarget, kernel_target
from tests.volume import zombies
from tests.volume.support import STRIPE, content
from tests.volume.zombies import WRITER, running

pytestmark = [pytest.mark.rig, pytest.mark.slow, pytest.mark.timeout(600)]

NQN = "nqn.2024-01.lab:volume"


class World(zombies.World):
    fence = "until-restart"
    # Nobody has to watch an emulated machine for beats that miss.
    takeover = "now"

    def __init__(self, target: KernelTarget, images: list[Path]) -> None:
        self.target = target
        self._images = images
        self.port = target.port
        self.uris = [target.uri(nsid, keepalive=120, loss_timeout=300) for nsid in (1, 2)]
        self.target.count_conflicts()

    def media(self) -> list[bytes]:
        return [image.read_bytes() for image in self._images]

    def conflicts(self) -> int:
        return self.target.conflicts()

    def restart(self) -> None:
        self.target.down()
        self.up()

    def up(self) -> None:
        self.target.up()
        self.target.count_conflicts()


@pytest.fixture(scope="module")
def target(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    share = tmp_path_factory.mktemp("share")
    images = [tmp_path_factory.mktemp("media") / name for name in ("a.img", "b.img")]
    for image in images:
        with image.open("wb") as file:
            file.truncate(16 * MIB)
    disks = [word for image in images for word in ("--disk", str(image))]
    with kernel_target(lab, NQN, "--reservations", *disks, share=share) as running_target:
        yield World(running_target, images)


@pytest.fixture
def world(target: World) -> World:
    Volume.create(target.uris, stripe_bytes=STRIPE, force=True).close()
    return target


def test_a_stopped_writer(world: World) -> None:
    refused = zombies.is_stopped(world, "commit")
    assert refused.conflicts > 0 and refused.fenced == 0, refused


def test_a_rank_that_writes_after_the_end_of_its_session(world: World) -> None:
    refused = zombies.writes_after_the_end(world)
    assert refused.conflicts > 0 and refused.fenced == 0, refused


def test_a_taker_that_registers_late(world: World) -> None:
    zombies.registers_late(world)


def test_a_writer_that_stands_between_r2t_and_its_data(world: World) -> None:
    """Linux waits for such a command when it is told to abort it, until the keep alive of its association ends. What
    comes later reaches nothing."""
    refused = zombies.stands_between_r2t_and_data(world, lives=False)
    assert refused.conflicts == 0 and refused.fenced > 0, refused


@pytest.mark.parametrize("taken", ["before", "after"])
def test_the_kernel_target_is_restarted_under_a_zombie(world: World, taken: str) -> None:
    """It lets everybody write then, until somebody takes the volume."""
    refused = zombies.is_stopped_while_the_target_restarts(world, taken)
    assert refused.conflicts == 0 and refused.fenced > 0, refused


def test_the_kernel_forgets_under_a_writer(world: World) -> None:
    """It runs, beats, and finds out before it writes; then another one takes the volume."""
    with running(WRITER, *world.uris) as writer:
        world.target.down()
        before = world.media()
        world.up()
        writer.tell("commit")
        assert writer.hear() == "SessionLost"
        world.is_untouched(before)
        world.take(drained=False)
        before = world.media()
        writer.tell("put")
        assert writer.hear() == "SessionLost"
        world.is_untouched(before)
        refused = writer.refusals()
        assert refused.conflicts == 0 and refused.fenced > 0, refused
        world.holds({"first": b"1" * 5000, "new": content(1, 200_000)})
