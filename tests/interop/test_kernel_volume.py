"""A volume on a Linux kernel target: sessions fence each other there, in each form that a zombie has (`zombies`), also
where the target forgets who held.

What it refused is counted by its own trace. Its media are files of this machine, which are read here.

Then a checkpoint of real ranks, saved to it and loaded from it where packets are lost.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.checkpoint import list_checkpoints
from headrace.drill.run import DrillOptions, run_drill
from headrace.volume import Volume
from tests.interop.kernel import KernelTarget
from tests.torch import crew
from tests.torch.crew import Crew, Rank
from tests.volume import zombies
from tests.volume.support import STRIPE, content
from tests.volume.zombies import WRITER, running

pytestmark = [pytest.mark.rig, pytest.mark.slow, pytest.mark.timeout(600)]


class World(zombies.World):
    fence = "until-restart"
    # Nobody has to watch an emulated machine for beats that miss.
    takeover = "now"

    def __init__(self, target: KernelTarget) -> None:
        self.target = target
        self.port = target.port
        self.uris = [target.uri(nsid, keepalive=120, loss_timeout=300) for nsid in (1, 2)]
        self.target.count_conflicts()

    def media(self) -> list[bytes]:
        return [image.read_bytes() for image in self.target.images]

    def conflicts(self) -> int:
        return self.target.conflicts()

    def restart(self) -> None:
        self.target.down()
        self.up()

    def up(self) -> None:
        self.target.up()
        self.target.count_conflicts()


@pytest.fixture(scope="module")
def target(reserving_kernel: KernelTarget) -> Iterator[World]:
    yield World(reserving_kernel)
    # The reservation of the last writer stays: it is forgotten for whoever comes next.
    reserving_kernel.down()
    reserving_kernel.up()


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


def test_the_drill_shuts_a_job_out_that_writes(world: World) -> None:
    """Linux may answer a write with Internal Error that comes while it shuts its host out: no harm, and it is said."""
    options = DrillOptions(
        uris=[world.target.uri(nsid) for nsid in (1, 2)], scenarios=["takeover"], shard_bytes=256 << 10, destroy=True
    )
    conflicts = world.conflicts()
    report = run_drill(options, tell=lambda text: None, say=print)
    (finding,) = report.findings
    assert report.trusted and report.fence == world.fence, finding
    assert finding.late_commit.startswith("SessionLost") and finding.moved_bytes == 0 < finding.watched_bytes, finding
    # The target's trace says the same.
    assert 0 < finding.refused <= world.conflicts() - conflicts, finding
    assert all("Internal Error" in note and "refused as it must be" in note for note in finding.notes), finding


# ---- packets that are lost ----

#: Of each rank: its shard takes a thousand packets.
ELEMENTS = 200_000


def saved_and_loaded(rank: Rank, uris: list[str]) -> None:
    """By DCP: what each rank loads is to the bit what it has saved."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from headrace.torch import VolumeReader, VolumeWriter

    own = torch.rand(ELEMENTS, generator=torch.Generator().manual_seed(rank.rank))
    state = {"w": DTensor.from_local(own.clone(), init_device_mesh("cpu", (rank.world,)), [Shard(0)]), "step": 1}
    with VolumeWriter(uris, "lossy") as writer:
        dcp.save(state, checkpoint_id="lossy/step-1", storage_writer=writer, process_group=writer.process_group)
    rank.say("saved")
    rank.hear()
    state["w"].to_local().zero_()
    state["step"] = 0
    with VolumeReader(uris, "lossy/step-1") as reader:
        dcp.load(state, storage_reader=reader)
    assert torch.equal(state["w"].to_local().view(torch.int32), own.view(torch.int32)) and state["step"] == 1


def test_ranks_save_and_load_where_packets_are_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in a hundred, each way. QEMU's end of the connections waits long before it sends again, so that nothing here
    is quick; it ends, and all of it is right."""
    monkeypatch.setattr(crew, "LIMIT_S", 300.0)
    uris = [world.target.uri(nsid) for nsid in (1, 2)]
    with world.target.lossy(1) as lost:
        ranks = Crew(2, saved_and_loaded, uris)
        for rank in range(2):
            ranks.hear(rank, "saved")
        while_saved = lost()
        for rank in range(2):
            ranks.say(rank, "load")
        ranks.join()
        in_all = lost()
    assert while_saved[0] > 0, "what is written comes to the target"
    assert in_all[1] > while_saved[1], "what is read leaves it"
    with Volume.open(uris) as volume:
        assert [found.step for found in list_checkpoints(volume, "lossy")] == [1]
