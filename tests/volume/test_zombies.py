"""Writers that are stopped, taken over from and woken up, as real processes over a real target."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from headrace.device import new_key, open_device
from headrace.errors import ReservationConflict, WriterActive
from headrace.testing.serve import ServeProcess, serving
from headrace.volume import Volume
from headrace.volume.writing import fence
from tests.interop.relay import HoldingRelay
from tests.volume.support import STRIPE, content, state_of

NQN = "nqn.2026-01.io.headrace:zombies"
BEAT = 0.2

WRITER = """
import ctypes, sys
from headrace.errors import HeadraceError
from headrace.volume import Volume
volume = Volume.open(sys.argv[1:], write=True)
session = volume.session("run", heartbeat_s=0.2, takeover="if-dead")
with session.transaction() as tx:
    tx.put("first", b"1" * 5000)
tx = session.transaction()
tx.put("second", b"2" * 300_000)
print("ready", flush=True)
for line in sys.stdin:
    try:
        if line.strip() == "hold":
            # The GIL is held for as long as the call lasts.
            print("holding", flush=True)
            ctypes.PyDLL(None).usleep(ctypes.c_uint(3_000_000))
            print("held", flush=True)
        elif line.strip() == "commit":
            tx.commit()
            print("committed", flush=True)
        elif line.strip() == "put":
            with session.transaction() as again:
                again.put("third", b"3" * 300_000)
            print("put", flush=True)
    except HeadraceError as error:
        print(type(error).__name__, flush=True)
"""

RANK = """
import sys
from headrace.errors import HeadraceError
from headrace.volume import Grant, Ticket, Volume
grant = Grant.from_json(sys.argv[1])
volume = Volume.open(sys.argv[2:], write=True, ticket=Ticket.from_json(grant.ticket))
print("ready", flush=True)
for line in sys.stdin:
    try:
        volume.write_grant(grant, b"\\xee" * grant.length_bytes)
        print("written", flush=True)
    except HeadraceError as error:
        print(type(error).__name__, flush=True)
"""


class Process:
    """A Python program that says one line for each that it is told."""

    def __init__(self, program: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.hear() == "ready"

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def running(program: str, *arguments: str) -> Iterator[Process]:
    process = Process(program, *arguments)
    try:
        yield process
    finally:
        process.end()


class World:
    def __init__(self, target: ServeProcess, images: list[Path]) -> None:
        self.target = target
        self.images = images
        # No keep alive ends the associations of who is stopped: it wakes up with commands that it can send at once.
        self.uris = [target.uri(nsid, keepalive=120, loss_timeout=60) for nsid in (1, 2)]

    def open(self) -> Volume:
        return Volume.open(self.uris, write=True)

    def media(self) -> list[str]:
        return [hashlib.sha256(image.read_bytes()).hexdigest() for image in self.images]

    def conflicts(self) -> int:
        return sum(_numbers(self.target.ask("status"), "conflicts"))


def _numbers(said: object, name: str) -> list[int]:
    if isinstance(said, dict):
        own = [value for key, value in said.items() if name in key and isinstance(value, int)]
        return own + [one for value in said.values() for one in _numbers(value, name)]
    if isinstance(said, list):
        return [one for value in said for one in _numbers(value, name)]
    return []


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    images = [tmp_path / name for name in ("a.img", "b.img")]
    with serving(NQN, *(f"{image}:16MiB" for image in images)) as target:
        made = World(target, images)
        Volume.create(made.uris, stripe_bytes=STRIPE).close()
        yield made


def test_who_holds_the_gil_is_alive_and_who_is_stopped_is_not(world: World) -> None:
    with running(WRITER, *world.uris) as writer, world.open() as volume:
        writer.tell("hold")
        assert writer.hear() == "holding"
        with pytest.raises(WriterActive, match="its heart beats"):
            volume.session("other", takeover="if-dead", heartbeat_s=BEAT)
        assert writer.hear() == "held"
        writer.signal(signal.SIGSTOP)
        began = time.monotonic()
        with volume.session("other", takeover="if-dead", heartbeat_s=BEAT):
            assert time.monotonic() - began >= 4 * BEAT
        writer.signal(signal.SIGCONT)


@pytest.mark.parametrize("late", ["commit", "put"])
def test_a_stopped_writer_wakes_up_after_a_takeover(world: World, late: str) -> None:
    with running(WRITER, *world.uris) as zombie:
        zombie.signal(signal.SIGSTOP)
        with world.open() as volume:
            with volume.session("run", heartbeat_s=BEAT) as session:
                assert session.fence == "persistent" and session.quarantined_bytes == 0
                with session.transaction() as tx:
                    tx.put("new", content(1, 200_000))
            before, conflicts = world.media(), world.conflicts()
            zombie.signal(signal.SIGCONT)
            zombie.tell(late)
            assert zombie.hear() == "SessionLost"
            zombie.tell("put")
            assert zombie.hear() == "SessionLost"
            assert world.conflicts() > conflicts
            assert world.media() == before
            assert state_of(volume) == {"first": b"1" * 5000, "new": content(1, 200_000)}


def test_a_writer_that_stands_between_r2t_and_its_data(world: World) -> None:
    """The target has admitted the write, asked for its data, and waits. Whoever takes over waits for none of it: the
    target gives the command up, says that it drained, and what comes late reaches no medium."""
    with HoldingRelay(world.target.port) as relay:
        near = [uri.replace(f":{world.target.port}/", f":{relay.port}/") for uri in world.uris]
        with running(WRITER, *near) as zombie, world.open() as volume:
            relay.hold()
            zombie.tell("put")
            assert relay.held.wait(30)
            zombie.signal(signal.SIGSTOP)
            began = time.monotonic()
            with volume.session("run", heartbeat_s=BEAT) as session:
                assert session.quarantined_bytes == 0 and time.monotonic() - began < 30
                with session.transaction() as tx:
                    tx.put("new", content(4, 900_000))
            before = world.media()
            relay.release()
            zombie.signal(signal.SIGCONT)
            assert zombie.hear() == "SessionLost"
            zombie.tell("put")
            assert zombie.hear() == "SessionLost"
            assert world.media() == before
            assert state_of(volume) == {"first": b"1" * 5000, "new": content(4, 900_000)}


def test_a_taker_that_registers_late_does_not_write(world: World) -> None:
    """Stopped between its look and its registration, while another one took the volume. As a registrant the target
    would let it write; but it does not hold, and so it does not pass the guard."""
    with world.open() as volume, volume.session("run", heartbeat_s=BEAT) as session, session.transaction() as tx:
        tx.put("new", content(5, 200_000))
    # That one is closed, and holds the members all the same.
    before = world.media()
    for uri in world.uris:
        late = open_device(uri, hostid=uuid4())
        key = new_key()
        late.reservations.register(key)
        with pytest.raises(ReservationConflict, match="fenced"):
            late.guard_writes(key, fence.TYPE)
        with pytest.raises(ReservationConflict, match="fenced"):
            late.write(1 << 20, b"\xee" * 4096)
        late.close()
    assert world.media() == before
    # The next session throws it out.
    with world.open() as volume, volume.session("next", heartbeat_s=BEAT):
        for device in volume.devices:
            assert len(device.reservations.report().registrants) == 1  # type: ignore[attr-defined]
        assert state_of(volume) == {"new": content(5, 200_000)}


def test_a_rank_that_writes_after_the_end_of_its_session(world: World) -> None:
    with world.open() as volume:
        session = volume.session("run", heartbeat_s=BEAT)
        grant = session.transaction().allocate("late", 300_000)
        with running(RANK, grant.to_json(), *world.uris) as rank:
            session.close()
            with volume.session("next", heartbeat_s=BEAT) as after, after.transaction() as tx:
                tx.put("new", content(2, 200_000))
            before, conflicts = world.media(), world.conflicts()
            rank.tell("write")
            assert rank.hear() == "SessionLost"
            assert world.conflicts() > conflicts and world.media() == before
            assert state_of(volume) == {"new": content(2, 200_000)}
            # One that comes only now does not get as far.
            report = volume.devices[0].reservations.report()  # type: ignore[attr-defined]
            assert len(report.registrants) == 1 and report.registrants[0].key != json.loads(grant.ticket)["key"]


def test_the_target_is_restarted_under_a_zombie(tmp_path: Path) -> None:
    images = [tmp_path / name for name in ("a.img", "b.img")]
    namespaces = [f"{image}:16MiB" for image in images]
    with serving(NQN, *namespaces) as target:
        world = World(target, images)
        Volume.create(world.uris, stripe_bytes=STRIPE).close()
        zombie = Process(WRITER, *world.uris)
        zombie.signal(signal.SIGSTOP)
    try:
        with serving(NQN, *namespaces, port=target.port) as again:
            world = World(again, images)
            with world.open() as volume:
                with volume.session("run", heartbeat_s=BEAT) as session, session.transaction() as tx:
                    tx.put("new", content(3, 200_000))
                before = world.media()
                zombie.signal(signal.SIGCONT)
                zombie.tell("commit")
                assert zombie.hear() == "SessionLost"
                assert world.media() == before
                assert state_of(volume) == {"first": b"1" * 5000, "new": content(3, 200_000)}
    finally:
        zombie.end()


def test_files_are_locked_by_their_writer(tmp_path: Path) -> None:
    uris = [f"file:{tmp_path / name}?create=16MiB" for name in "ab"]
    with Volume.create(uris, stripe_bytes=STRIPE) as volume:
        uris = volume.uris
    with running(WRITER, *uris) as writer, Volume.open(uris, write=True) as volume:
        writer.signal(signal.SIGSTOP)
        with pytest.raises(WriterActive, match="only stopped"):
            volume.session("run", heartbeat_s=BEAT)
        writer.signal(signal.SIGKILL)
        writer.end()
        with volume.session("run", heartbeat_s=BEAT) as session:
            assert session.fence == "machine" == volume.info().fence
