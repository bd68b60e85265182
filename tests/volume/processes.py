"""Real processes over NVMe/TCP: a job of four ranks writes, three readers follow, and anybody is killed at any time.

    python -m tests.volume.processes --rounds 200

The target, with a volatile cache, is among the victims. After each round a new reader must find the last state that was
acknowledged, or the commit in flight, whole; and no reader may ever have met anything else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from headrace.errors import DeviceError, HeadraceError, ObjectNotFound, VolumeDamaged
from headrace.testing.serve import ServeProcess, free_port, serving
from headrace.volume import Grant, Receipt, Volume

NQN = "nqn.2026-01.io.headrace:processes"
RANKS = 4
READERS = 3
KIB = 1 << 10


def content(name: str) -> bytes:
    chance = random.Random(name)
    return chance.randbytes(chance.choice((1, 5000, 70_000, 300_000)))


def say(**what: Any) -> None:
    with suppress(BrokenPipeError):
        print(json.dumps(what), flush=True)


def open_patiently(uris: list[str]) -> Volume:
    """The target may be away just now."""
    for _ in range(100):
        try:
            return Volume.open(uris, write=True)
        except DeviceError:
            time.sleep(0.2)
    return Volume.open(uris, write=True)


# ---- the processes ---------------------------------------------------------------------------------------------------


def rank(uris: list[str]) -> None:
    """Writes what it is granted; ends with its coordinator."""
    volume = open_patiently(uris)
    for line in sys.stdin:
        grant = Grant.from_json(line)
        print(volume.write_grant(grant, content(grant.name)).to_json(), flush=True)


def coordinator(uris: list[str], number: int) -> None:
    """Rank 0, and the session: one transaction after another, each with an object of every rank."""
    ranks = [start("rank", uris) for _ in range(RANKS - 1)]
    try:
        volume = open_patiently(uris)
        session = volume.session("job", heartbeat_s=0.2, missed_beats=3)
        state = sorted(info.name for info in volume.list())
        say(opened=state)
        for step in range(1_000_000):
            names = [f"{number}/{step}/{index}" for index in range(RANKS)]
            groups = sorted({name.rpartition("/")[0] for name in state})
            old = [name for name in state if name.rpartition("/")[0] in groups[: max(0, len(groups) - 4)]]
            with session.transaction() as tx:
                for name in old:
                    tx.delete(name)
                for process, name in zip(ranks, names[1:], strict=True):
                    assert process.stdin is not None
                    process.stdin.write(tx.allocate(name, len(content(name))).to_json() + "\n")
                    process.stdin.flush()
                tx.put(names[0], content(names[0]))
                for process in ranks:
                    assert process.stdout is not None
                    tx.accept(Receipt.from_json(process.stdout.readline()))
                state = sorted({*state, *names} - {*old})
                say(committing=state)
            say(acknowledged=state)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def reader(uris: list[str]) -> None:
    """Looks, and reads some of what it sees, until it is told to stop."""
    chance = random.Random()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    volume: Volume | None = None
    looks = reads = 0
    while not stop.is_set():
        try:
            if volume is None:
                volume = Volume.open(uris)
            volume.refresh()
            names = [info.name for info in volume.list()]
            groups: dict[str, int] = {}
            for name in names:
                groups[name.rpartition("/")[0]] = groups.get(name.rpartition("/")[0], 0) + 1
            torn = {group: count for group, count in groups.items() if count != RANKS}
            if torn:
                say(violation=f"a transaction is torn: {torn}")
            looks += 1
            for name in chance.sample(names, min(2, len(names))):
                with suppress(ObjectNotFound):
                    if volume.read(name) != content(name):
                        say(violation=f"wrong bytes of {name}")
                    reads += 1
        except DeviceError:
            time.sleep(0.05)
        except VolumeDamaged as error:
            if "faster" not in error.what:
                say(violation=f"{type(error).__name__}: {error}")
        except HeadraceError as error:
            say(violation=f"{type(error).__name__}: {error}")
        time.sleep(0.01)
    say(looks=looks, reads=reads)


def start(role: str, uris: list[str], *more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.volume.processes", "--role", role, *map(str, more), *uris],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


# ---- the rounds ------------------------------------------------------------------------------------------------------


class Rounds:
    """`run` raises AssertionError where a promise was broken."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.acknowledged: list[str] = []
        self.counts = {"rounds": 0, "commits": 0, "looks": 0, "reads": 0, "target killed": 0, "rank killed": 0}
        #: Why jobs ended that were not killed.
        self.ends: list[str] = []
        self._media = [f"{folder / name}:16MiB" for name in "ab"]
        self._port = free_port()
        self._stack = ExitStack()
        self.target = self._start()
        self.uris = [self.target.uri(nsid, loss_timeout=60, keepalive=1) for nsid in (1, 2)]
        Volume.create(self.uris, stripe_bytes=64 * KIB, log_bytes=256 * KIB).close()

    def _start(self) -> ServeProcess:
        options = ["--volatile-cache", "16MiB"]
        return self._stack.enter_context(serving(NQN, *self._media, port=self._port, options=options))

    def restart(self) -> None:
        self.target.process.kill()
        self._stack.close()
        self._stack = ExitStack()
        self.target = self._start()
        self.counts["target killed"] += 1

    def close(self) -> None:
        self._stack.close()

    def run(self, seconds: float) -> None:
        self.counts["rounds"] += 1
        readers = [start("reader", self.uris) for _ in range(READERS)]
        job = start("coordinator", self.uris, "--number", self.counts["rounds"])
        try:
            self._round(job, readers, seconds)
        finally:
            for process in (job, *readers):
                # Its ranks end with it.
                process.kill()
                process.wait()

    def _round(self, job: subprocess.Popen[str], readers: list[subprocess.Popen[str]], seconds: float) -> None:
        chance = self.chance
        said: list[str] = []
        follower = threading.Thread(target=_collect, args=(job, said))
        follower.start()
        patience = time.monotonic() + 60
        # Several Pythons begin: their time is not the volume's.
        while not any("acknowledged" in line for line in said) and job.poll() is None and time.monotonic() < patience:
            time.sleep(0.05)
        ends = time.monotonic() + chance.random() * seconds
        while time.monotonic() < ends and job.poll() is None:
            time.sleep(chance.random() * 0.8)
            kind = chance.random()
            if kind < 0.3:
                self.restart()
            elif kind < 0.4:
                chance.choice(readers).kill()
            elif kind < 0.45 and (found := _children(job.pid)):
                self.counts["rank killed"] += 1
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(found), signal.SIGKILL)
        job.kill()
        job.wait(60)
        follower.join(60)
        in_flight = self._follow(said)
        self._verify(in_flight)
        for process in readers:
            process.terminate()
        for process in readers:
            words, _ = process.communicate(timeout=90)
            for line in words.splitlines():
                told = _told(line)
                assert "violation" not in told, told["violation"]
                for what in ("looks", "reads"):
                    self.counts[what] += told.get(what, 0)

    def _follow(self, said: list[str]) -> list[str] | None:
        """Take over what the job said; returns the commit in flight."""
        in_flight = None
        for line in said:
            told = _told(line)
            if "ended" in told:
                self.ends.append(told["ended"])
            elif "opened" in told:
                assert told["opened"] == self.acknowledged, "a session opened with another state"
            elif "committing" in told:
                in_flight = told["committing"]
            elif "acknowledged" in told:
                self.acknowledged, in_flight = told["acknowledged"], None
                self.counts["commits"] += 1
        return in_flight

    def _verify(self, in_flight: list[str] | None) -> None:
        # The next session decides about the commit in flight; until then a reader may not see it.
        with Volume.open(self.uris, write=True) as volume:
            with volume.session("job", heartbeat_s=0.2, missed_beats=3):
                found = sorted(info.name for info in volume.list())
            assert found in (self.acknowledged, in_flight), "what was acknowledged is not there"
            self.acknowledged = found
            for name in found:
                assert volume.read(name) == content(name), f"wrong bytes of {name}"
            info = volume.info()
            assert info.used_bytes + info.free_bytes + info.quarantined_bytes == info.capacity_bytes


def _collect(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)


def _told(line: str) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except ValueError:
        # Its last words were cut off.
        return {}
    return told if isinstance(told, dict) else {}


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.volume.processes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0, help="at most, for a round")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--role", choices=["rank", "coordinator", "reader"], help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("uris", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role is not None:
        try:
            if given.role == "coordinator":
                coordinator(given.uris, given.number)
            else:
                {"rank": rank, "reader": reader}[given.role](given.uris)
        except (HeadraceError, BrokenPipeError) as error:
            # A killed target, rank or session is the end of a process.
            say(ended=f"{type(error).__name__}: {error}")
        return 0
    print(f"seed {given.seed}")
    with tempfile.TemporaryDirectory() as folder:
        rounds = Rounds(Path(folder), given.seed)
        try:
            for _ in range(given.rounds):
                rounds.run(given.seconds)
        finally:
            rounds.close()
            print(", ".join(f"{what}: {count}" for what, count in rounds.counts.items()))
            for end in sorted(set(rounds.ends)):
                print(f"ended: {end}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
