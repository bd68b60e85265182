"""Writers that others took over from, in each form that there is, as real processes over a real target.

`test_zombies.py` has them at our target, `tests/interop/test_kernel_volume.py` at Linux's: a `World` says how the media
of either are read, what it has refused, and how it is started again. What counts is the same: the zombie hears that its
session is lost, what it sent was refused, or never left it, and not a byte of the media has moved.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from uuid import uuid4

import numpy as np
import pytest

from headrace.accidents.relay import Relay
from headrace.device import NativeDevice, new_key, open_device
from headrace.errors import ReservationConflict
from headrace.volume import Volume
from headrace.volume.writing import fence
from tests.volume.support import content, state_of

BEAT = 0.2

#: What became of what these devices sent; `lost` is what their session said at its end.
_COUNT = """
import json
def count(devices, lost):
    said = [device.describe() for device in devices]
    print(json.dumps({
        "conflicts": sum(one["counters"]["conflicts"] for one in said),
        "fenced": sum(one["guard"]["state"] == "fenced" for one in said),
        "found": str(lost),
    }), flush=True)
"""

WRITER = (
    _COUNT
    + """
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
        elif line.strip() == "count":
            count(session.devices, session._lost)
    except HeadraceError as error:
        print(type(error).__name__, flush=True)
"""
)

RANK = (
    _COUNT
    + """
import sys
from headrace.errors import HeadraceError
from headrace.volume import Grant, Ticket, Volume
grant, lost = Grant.from_json(sys.argv[1]), None
volume = Volume.open(sys.argv[2:], write=True, ticket=Ticket.from_json(grant.ticket))
print("ready", flush=True)
for line in sys.stdin:
    try:
        if line.strip() == "count":
            count(volume.writers(), lost)
        else:
            volume.write_grant(grant, b"\\xee" * grant.length_bytes)
            print("written", flush=True)
    except HeadraceError as error:
        lost = error
        print(type(error).__name__, flush=True)
"""
)


@dataclass(frozen=True)
class Refusals:
    """What became of all that a zombie sent, as its own host counted it."""

    #: Commands that the target answered with Reservation Conflict, or Command Aborted due to Preempt and Abort.
    conflicts: int
    #: Members whose next association did not show the reservation, so that nothing was sent.
    fenced: int
    #: What its session says.
    found: str = ""


def refusals(devices: Sequence[NativeDevice]) -> Refusals:
    """Of devices of this process."""
    said = [device.describe() for device in devices]
    return Refusals(
        sum(one["counters"]["conflicts"] for one in said), sum(one["guard"]["state"] == "fenced" for one in said)
    )


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

    def refusals(self) -> Refusals:
        self.tell("count")
        return Refusals(**json.loads(self.hear()))

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


class World(ABC):
    """A volume at a target, whose media can be read behind it."""

    #: How well the target fences.
    fence: str
    port: int
    #: One of each member. No keep alive ends the associations of who is stopped: it wakes up with commands that it can
    #: send at once.
    uris: list[str]
    #: As `Volume.session` takes it, for who takes over.
    takeover: str

    @abstractmethod
    def media(self) -> list[bytes]:
        """All bytes of each member, read where they lie."""

    @abstractmethod
    def conflicts(self) -> int:
        """Commands that the target has refused with Reservation Conflict since it started."""

    @abstractmethod
    def restart(self) -> None:
        """The target ends, and starts again over the same media."""

    def open(self) -> Volume:
        return Volume.open(self.uris, write=True)

    def take(self, data: bytes = b"", *, drained: bool = True) -> None:
        """Another session puts an object, and ends. The members are held by it from now on, and nobody writes.
        `drained`: the target could tell it that nothing of the one before is under way."""
        with self.open() as volume, volume.session("run", heartbeat_s=BEAT, takeover=self.takeover) as session:
            assert session.fence == self.fence and (session.quarantined_bytes == 0) == drained
            with session.transaction() as tx:
                tx.put("new", data or content(1, 200_000))

    def holds(self, expected: dict[str, bytes]) -> None:
        with Volume.open(self.uris) as volume:
            assert state_of(volume) == expected

    def is_untouched(self, before: Sequence[bytes]) -> None:
        """Not a byte of any member is another one."""
        for member, (old, new) in enumerate(zip(before, self.media(), strict=True)):
            assert len(old) == len(new)
            moved = np.flatnonzero(np.frombuffer(old, np.uint8) != np.frombuffer(new, np.uint8))
            assert not len(moved), f"member {member}: {len(moved)} bytes, from {moved[0]} to {moved[-1]}"

    def conflicts_beyond(self, count: int) -> None:
        """The target has counted more than these, or will soon."""
        deadline = time.monotonic() + 60
        while self.conflicts() <= count:
            assert time.monotonic() < deadline, f"no conflict beyond {count}"
            time.sleep(0.1)


def _wakes_up(world: World, zombie: Process, late: str) -> None:
    """It was told what to do while it was stopped, so that this is the first that it does."""
    before = world.media()
    if late:
        zombie.tell(late)
    zombie.signal(signal.SIGCONT)
    assert zombie.hear() == "SessionLost"
    zombie.tell("put")
    assert zombie.hear() == "SessionLost"
    world.is_untouched(before)


def is_stopped(world: World, late: str) -> Refusals:
    """Within its keep alive: its associations live, and its heart has a beat to send."""
    with running(WRITER, *world.uris) as zombie:
        zombie.signal(signal.SIGSTOP)
        world.take()
        conflicts = world.conflicts()
        _wakes_up(world, zombie, late)
        world.conflicts_beyond(conflicts)
        world.holds({"first": b"1" * 5000, "new": content(1, 200_000)})
        return zombie.refusals()


def writes_after_the_end(world: World) -> Refusals:
    """A rank whose session was closed, and followed by another one."""
    with world.open() as volume:
        session = volume.session("run", heartbeat_s=BEAT)
        grant = session.transaction().allocate("late", 300_000)
        with running(RANK, grant.to_json(), *world.uris) as rank:
            session.close()
            world.take()
            before, conflicts = world.media(), world.conflicts()
            rank.tell("write")
            assert rank.hear() == "SessionLost"
            world.is_untouched(before)
            world.conflicts_beyond(conflicts)
            world.holds({"new": content(1, 200_000)})
            # One that comes only now does not get as far.
            report = volume.devices[0].reservations.report()  # type: ignore[attr-defined]
            assert len(report.registrants) == 1 and report.registrants[0].key != json.loads(grant.ticket)["key"]
            return rank.refusals()


def stands_between_r2t_and_data(world: World, *, lives: bool) -> Refusals:
    """The target has admitted its write, asked for the data, and waits. `lives`: its association outlives that; else
    its keep alive ends it."""
    with Relay(world.port) as relay:
        near = [uri.replace(f":{world.port}/", f":{relay.port}/") for uri in world.uris]
        if not lives:
            near = [uri.replace("keepalive=120", "keepalive=5") for uri in near]
        with running(WRITER, *near) as zombie:
            relay.hold()
            zombie.tell("put")
            assert relay.held.wait(60)
            zombie.signal(signal.SIGSTOP)
            world.take(content(4, 900_000))
            before, conflicts = world.media(), world.conflicts()
            relay.release()
            _wakes_up(world, zombie, "")
            if lives:
                world.conflicts_beyond(conflicts)
            world.is_untouched(before)
            world.holds({"first": b"1" * 5000, "new": content(4, 900_000)})
            return zombie.refusals()


def registers_late(world: World) -> Refusals:
    """A taker that was stopped between its look and its registration, while another one took the volume: as a
    registrant the target would let it write. It does not hold, and so it does not pass the guard; the next session
    throws it out."""
    world.take()
    conflicts, before = world.conflicts(), world.media()
    with ExitStack() as stack:
        late = [stack.enter_context(open_device(uri, hostid=uuid4())) for uri in world.uris]
        for device in late:
            with pytest.raises(ReservationConflict, match="Reservation Conflict"):
                device.write(1 << 20, b"\xee" * 4096)
            key = new_key()
            device.reservations.register(key)
            with pytest.raises(ReservationConflict, match="fenced"):
                device.guard_writes(key, fence.TYPE)
            with pytest.raises(ReservationConflict, match="fenced"):
                device.write(1 << 20, b"\xee" * 4096)
        world.is_untouched(before)
        assert refusals(late) == Refusals(len(late), len(late)), "the guard sent something"
        with world.open() as volume, volume.session("next", heartbeat_s=BEAT):
            for member in volume.devices:
                assert len(member.reservations.report().registrants) == 1  # type: ignore[attr-defined]
        before = world.media()
        for device in late:
            device.unguard_writes()
            with pytest.raises(ReservationConflict, match="Reservation Conflict"):
                device.write(1 << 20, b"\xee" * 4096)
        world.is_untouched(before)
        assert world.conflicts() >= conflicts + 2 * len(late)
        world.holds({"new": content(1, 200_000)})
        return refusals(late)


def is_stopped_while_the_target_restarts(world: World, taken: str) -> Refusals:
    """`taken`: another session took the volume before the target ended, or after it came back. The associations of the
    zombie are gone when it wakes up; the next ones ask first, and send nothing."""
    with running(WRITER, *world.uris) as zombie:
        zombie.signal(signal.SIGSTOP)
        if taken == "before":
            world.take()
        world.restart()
        if taken == "after":
            # Who knows of no older session has none to abort.
            world.take(drained=world.fence == fence.PERSISTENT)
        conflicts = world.conflicts()
        _wakes_up(world, zombie, "commit")
        assert world.conflicts() == conflicts, "it sent something"
        world.holds({"first": b"1" * 5000, "new": content(1, 200_000)})
        return zombie.refusals()
