"""A save that is taken over from in the middle, that meets a full disk, or a member that is slow or stands still: real
processes over real targets. One clear error each, and nothing that was acknowledged is lost."""

from __future__ import annotations

import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from headrace.accidents.relay import Relay
from headrace.errors import DeviceError, SessionLost, WriterActive
from headrace.testing.serve import serving
from headrace.units import MIB
from headrace.volume import Session, Volume
from headrace.volume.repair.scrub import scrub
from tests.volume.support import KIB, STRIPE, content, state_of

NQN = "nqn.2026-01.io.headrace:phases"

#: A job whose save stands still for good in a phase of it, until it is told to go on; each word is a line.
SAVE = """
import os, signal, sys
from headrace.errors import HeadraceError
from headrace.volume import Grant, Volume, layout
from headrace.volume.catalog import commit

phase, number, uris = sys.argv[1], int(sys.argv[2]), sys.argv[3:]

def stand_still(here):
    if here == phase:
        print(phase, flush=True)
        sys.stdin.readline()

write_through, writes = commit.write_through, 0

def counted(device, offset, data):
    # Of the COMMIT record and its MARKER, each to both copies of the log; it may move before.
    global writes
    kind = data[4] if data[:4] == b"HRLR" else 0
    if kind == layout.COMMIT or (writes and kind == layout.MARKER):
        stand_still(f"committing {writes}")
        writes += 1
    write_through(device, offset, data)

print("ready", flush=True)
sys.stdin.readline()
volume, rank = Volume.open(uris, write=True), Volume.open(uris, write=True)
session = volume.session("run", takeover="now", heartbeat_s=0.2)
with session.transaction() as tx:
    tx.put(f"first-{number}", bytes([number]) * 5000)
try:
    tx = session.transaction()
    grant = Grant.from_json(tx.allocate(f"save-{number}", 300_000).to_json())
    # Its heart stands still with it: as after SIGSTOP.
    session._beat.halt()
    stand_still("granted")
    receipt = rank.write_grant(grant, bytes([number]) * 300_000)
    stand_still("written")
    tx.accept(receipt)
    stand_still("receipts")
    commit.write_through = counted
    tx.commit()
    print("committed", flush=True)
except HeadraceError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


class Process:
    def __init__(self, program: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


PHASES = ["granted", "written", "receipts", *(f"committing {write}" for write in range(4))]


def put(session: Session, name: str, data: bytes) -> None:
    with session.transaction() as tx:
        tx.put(name, data)


def test_a_takeover_in_each_phase_of_a_save(tmp_path: Path) -> None:
    """Each job takes over from the one before, and is taken over from itself a phase later. Then all wake up."""
    with ExitStack() as stack:
        target = stack.enter_context(serving(NQN, *(f"{tmp_path / name}.img:16MiB" for name in "ab")))
        # No keep alive ends the associations of who stands still: it wakes up with commands that it can send at once.
        uris = [target.uri(nsid, keepalive=120, loss_timeout=60) for nsid in (1, 2)]
        Volume.create(uris, stripe_bytes=STRIPE).close()
        jobs = []
        for number, phase in enumerate(PHASES):
            jobs.append(Process(SAVE, phase, str(number), *uris))
            stack.callback(jobs[-1].end)
        expected: dict[str, bytes] = {}
        reader, volume = stack.enter_context(Volume.open(uris)), stack.enter_context(Volume.open(uris, write=True))
        for number, (phase, job) in enumerate(zip(PHASES, jobs, strict=True)):
            assert job.hear() == "ready"
            job.tell()
            assert job.hear() == phase
            expected[f"first-{number}"] = bytes([number]) * 5000
            # A record is believed with its marker, on either copy; without, it is made a fact by who comes next.
            if phase == PHASES[-1]:
                expected[f"save-{number}"] = bytes([number]) * 300_000
            reader.refresh()
            assert state_of(reader) == expected, phase
            if phase in ("committing 1", "committing 2"):
                expected[f"save-{number}"] = bytes([number]) * 300_000
        with volume.session("run", takeover="now", heartbeat_s=0.2) as session:
            # All that is free, whoever it was given to before.
            expected["all"] = content(1, session.free_bytes - 1 * MIB)
            with session.transaction() as tx:
                tx.put("all", expected["all"])
            for job in jobs:
                job.tell()
            for phase, job in zip(PHASES, jobs, strict=True):
                assert job.hear().startswith("SessionLost: another session took the volume over"), phase
            with session.transaction() as tx:
                tx.put("last", b"z" * 5000)
            expected["last"] = b"z" * 5000
        assert state_of(volume) == expected
        assert scrub(volume.devices).clean


def test_a_full_disk_below_the_target_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """Its files may not become longer: the same answer as from a full disk."""
    with serving(NQN, *(f"{tmp_path / name}.img:16MiB" for name in "ab")) as target:

        def room(size: int) -> None:
            resource.prlimit(target.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        uris = [target.uri(nsid) for nsid in (1, 2)]
        Volume.create(uris, stripe_bytes=STRIPE, log_bytes=128 * KIB).close()
        expected = {"first": content(1, 300 * KIB)}
        with Volume.open(uris, write=True) as volume, volume.session("run") as session:
            with session.transaction() as tx:
                tx.put("first", expected["first"])
            tx = session.transaction()
            tx.put("a", content(2, 300 * KIB))
            room(4 * MIB)
            with pytest.raises(DeviceError, match=r"namespace [12], LBA .*Capacity Exceeded"):
                tx.put("b", content(3, 20 * MIB))
            tx.abort()
            assert state_of(volume) == expected
            # Not even the log has room now.
            tx = session.transaction()
            tx.put("c", b"")
            room(4 * KIB)
            with pytest.raises(DeviceError, match="Capacity Exceeded"):
                tx.commit()
            with pytest.raises(SessionLost, match=r"an earlier write to it failed.*open a new session"):
                put(session, "d", b"")
            room(resource.RLIM_INFINITY)
        with Volume.open(uris, write=True) as volume, volume.session("run") as session:
            assert {name: data for name, data in state_of(volume).items() if name != "c"} == expected
            put(session, "after", content(4, 9 * MIB))
            assert volume.read("after") == content(4, 9 * MIB)
            assert scrub(volume.devices).clean


def test_a_member_a_hundred_times_slower_and_then_away(tmp_path: Path) -> None:
    """It holds everybody up, and that is all: nobody is taken for dead. Away, it is named, and what was is there."""
    with ExitStack() as stack:
        quick, slow = (stack.enter_context(serving(f"{NQN}-{name}", f"{tmp_path / name}.img:16MiB")) for name in "ab")
        relay = stack.enter_context(Relay(slow.port, bytes_per_s=4e6))
        uris = [quick.uri(), slow.uri(loss_timeout=1).replace(f":{slow.port}/", f":{relay.port}/")]
        Volume.create(uris, stripe_bytes=STRIPE, log_bytes=128 * KIB).close()
        expected = {"first": content(1, 2 * MIB)}
        with Volume.open(uris, write=True) as volume, ThreadPoolExecutor(1) as pool:
            session = volume.session("run")
            saving = pool.submit(put, session, "first", expected["first"])
            with Volume.open(uris, write=True) as other, pytest.raises(WriterActive, match="its heart beats"):
                other.session("other", takeover="if-dead", missed_beats=30)
            saving.result(120)
            assert state_of(volume) == expected
            tx = session.transaction()
            tx.put("second", content(2, 200 * KIB))
            relay.cut()
            with pytest.raises(DeviceError, match=f":{relay.port}/"):
                tx.put("third", content(3, 200 * KIB))
            tx.abort()
            relay.heal()
            # Whoever closes may meet it while it is still away.
            with suppress(DeviceError):
                session.close()
        with Volume.open(uris, write=True) as volume:
            assert state_of(volume) == expected
            with volume.session("run", takeover="now") as session:
                put(session, "after", content(4, 200 * KIB))
            assert state_of(volume) == {**expected, "after": content(4, 200 * KIB)}
            assert scrub(volume.devices).clean
