"""A volume whose members are reached through two portals: one may go, and each class of traffic has its own queue."""

from __future__ import annotations

from pathlib import Path

from headrace.accidents.relay import Relay
from headrace.testing.serve import ServeProcess, free_port, serving
from headrace.volume import Volume
from tests.volume.support import KIB, STRIPE, content, state_of
from tests.waiting import until

NQN = "nqn.2026-01.io.headrace:volume-paths"


def test_a_volume_goes_on_while_one_of_two_portals_is_gone(tmp_path: Path) -> None:
    port, second = free_port(), free_port()
    options = ("--listen", f"127.0.0.1:{second}", "--volatile-cache", "16MiB")
    media = [f"{tmp_path / name}:16MiB" for name in "ab"]
    with serving(NQN, *media, port=port, options=options), Relay(second) as relay:
        portals = f"127.0.0.1:{relay.port},127.0.0.1:{port}"
        # One text holds both members, and each address both portals.
        where = ",".join(f"nvme+tcp://{portals}/{NQN}?nsid={nsid}&loss_timeout=60" for nsid in (1, 2))
        expected: dict[str, bytes] = {}
        with Volume.create(where, stripe_bytes=STRIPE) as volume:
            assert len(volume.devices) == 2
            with volume.session("run", heartbeat_s=0.5) as session:
                for number in range(9):
                    if number == 3:
                        # A volume is open as soon as one path is; one that is not there yet cannot be lost.
                        until(lambda: all(path.state == "ready" for path in volume.devices[0].paths()))  # type: ignore[attr-defined]
                        relay.cut()
                        until(lambda: volume.devices[0].loss_count() > 0)
                    if number == 6:
                        relay.heal()
                    name = f"object-{number}"
                    expected[name] = content(300 * KIB + number, number)
                    with session.transaction() as tx:
                        tx.put(name, expected[name])
            assert state_of(volume) == expected
        with Volume.open(where) as again:
            assert state_of(again) == expected


def test_writes_and_the_log_have_queues_of_their_own(tmp_path: Path) -> None:
    with serving(NQN, f"{tmp_path / 'a'}:16MiB") as target:
        with Volume.create(target.uri(), stripe_bytes=STRIPE) as volume, volume.session("run") as session:
            with session.transaction() as tx:
                tx.put("object", content(300 * KIB, 1))
            volume.read("object")
            assert len(queues(target)) == 3
        with Volume.open(target.uri()) as volume:
            volume.read("object")
            assert len(queues(target)) == 1, "a reader needs one"


def queues(target: ServeProcess) -> list[int]:
    """The I/O queues that are connected, of all controllers."""
    controllers = target.ask("status")["controllers"]
    return [queue for controller in controllers for queue in controller["queues"] if queue > 0]
