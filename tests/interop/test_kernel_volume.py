"""A volume on a Linux kernel target: sessions fence each other there, also where the target forgets who held.

Media are compared byte by byte where that is cheap: `tests/volume/test_zombies.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.volume import Volume
from tests.interop.kernel import KernelTarget, kernel_target
from tests.interop.relay import HoldingRelay
from tests.volume.support import STRIPE, content, state_of
from tests.volume.test_zombies import RANK, WRITER, running

pytestmark = [pytest.mark.rig, pytest.mark.slow, pytest.mark.timeout(600)]

NQN = "nqn.2024-01.lab:volume"


@pytest.fixture(scope="module")
def target(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelTarget]:
    share = tmp_path_factory.mktemp("share")
    with kernel_target(lab, NQN, "--size", "64", "--reservations", share=share) as running_target:
        yield running_target


def test_a_stopped_writer_and_a_late_rank(target: KernelTarget) -> None:
    uri = target.uri(keepalive=120, loss_timeout=300)
    Volume.create(uri, stripe_bytes=STRIPE, force=True).close()
    with running(WRITER, uri) as zombie, Volume.open(uri, write=True) as volume:
        zombie.signal(signal.SIGSTOP)
        session = volume.session("run", heartbeat_s=0.2)
        # Linux aborts nothing, and answers when all of it is through.
        assert session.fence == "until-restart" == volume.info().fence and session.quarantined_bytes == 0
        with session.transaction() as tx:
            tx.put("new", content(1, 200_000))
        grant = session.transaction().allocate("late", 300_000)
        with running(RANK, grant.to_json(), uri) as rank:
            session.close()
            with volume.session("next", heartbeat_s=0.2):
                pass
            before = volume.read("new")
            rank.tell("write")
            assert rank.hear() == "SessionLost"
            zombie.signal(signal.SIGCONT)
            zombie.tell("commit")
            assert zombie.hear() == "SessionLost"
            assert volume.read("new") == before
        assert state_of(volume) == {"first": b"1" * 5000, "new": content(1, 200_000)}


def test_the_kernel_forgets_under_a_writer(target: KernelTarget) -> None:
    """The subsystem leaves its port, its namespace is made anew over the same bytes: as after a restart. Everybody may
    write then; the writer's next association finds out that it does not hold, before it writes."""
    uri = target.uri(keepalive=120, loss_timeout=300)
    link, namespace = f"ports/1/subsystems/{NQN}", f"subsystems/{NQN}/namespaces/1"
    Volume.create(uri, stripe_bytes=STRIPE, force=True).close()
    with running(WRITER, uri) as writer:
        target.do(f"rm {link}; echo 0 > {namespace}/enable; echo 1 > {namespace}/enable")
        target.do(f"ln -s $PWD/subsystems/{NQN} {link}")
        writer.tell("commit")
        assert writer.hear() == "SessionLost"
        with Volume.open(uri, write=True) as volume:
            with volume.session("run", heartbeat_s=0.2) as session, session.transaction() as tx:
                tx.put("after", b"x" * 5000)
            writer.tell("put")
            assert writer.hear() == "SessionLost"
            assert state_of(volume) == {"first": b"1" * 5000, "after": b"x" * 5000}


def test_a_writer_that_stands_between_r2t_and_its_data(target: KernelTarget) -> None:
    """Linux waits for such a command when it is told to abort it, until the keep alive of its association ends. What
    comes later reaches nothing."""
    with HoldingRelay(target.port) as relay:
        uri, port = target.uri(keepalive=120, loss_timeout=300), f":{target.port}/"
        Volume.create(uri, stripe_bytes=STRIPE, force=True).close()
        near = target.uri(keepalive=5, loss_timeout=300).replace(port, f":{relay.port}/")
        with running(WRITER, near) as zombie, Volume.open(uri, write=True) as volume:
            relay.hold()
            zombie.tell("put")
            assert relay.held.wait(60)
            zombie.signal(signal.SIGSTOP)
            with volume.session("run", heartbeat_s=0.2) as session, session.transaction() as tx:
                tx.put("new", content(1, 200_000))
            relay.release()
            zombie.signal(signal.SIGCONT)
            assert zombie.hear() == "SessionLost"
            assert state_of(volume) == {"first": b"1" * 5000, "new": content(1, 200_000)}
