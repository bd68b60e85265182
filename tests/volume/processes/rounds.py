"""What is done to the processes, round after round, and what must hold whatever it was.

Every job says which state it opened with, which one it is committing, and which one it was told is durable. So
sessions, in the order of their numbers, make one history: each opens with the last acknowledged state of the one
before, or with its commit in flight, whole; what a zombie was told after a takeover must be what its successor found.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError
from headrace.testing.serve import ServeProcess, free_port, serving
from headrace.volume import Session, Volume
from headrace.volume.repair.scrub import scrub
from tests.volume.processes.roles import BEAT_S, MISSED, content, start

NQN = "nqn.2026-01.io.headrace:processes"
RANKS = 4
READERS = 3
KIB = 1 << 10
#: What ends, ends within this time; under load a Python needs long to begin.
PATIENCE_S = 120.0


class Spoken:
    """A process, and what it said so far."""

    def __init__(self, role: str, uris: list[str], number: int = 0, ranks: int = 0) -> None:
        self.number = number
        self.process = start(role, uris, number, ranks)
        self.said: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):  # Its last words were cut off.
                self.said.append(json.loads(line))

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def all(self, what: str) -> list[Any]:
        return [one[what] for one in list(self.said) if what in one]

    def wait_for(self, *what: str) -> bool:
        """Until it said one of these; False where it ended, or time passed, before."""
        patience = time.monotonic() + PATIENCE_S
        while time.monotonic() < patience:
            ended = not self.running
            if any(key in one for one in list(self.said) for key in what):
                return True
            if ended:
                return False
            time.sleep(0.01)
        return False

    def pids(self) -> list[int]:
        """Its own, and its ranks'."""
        crew = self.all("crew")
        return [self.process.pid, *(crew[0] if crew else [])]

    def signal(self, number: int, pids: list[int] | None = None) -> None:
        for pid in self.pids() if pids is None else pids:
            # Not whoever has the number of a rank that is gone.
            with suppress(OSError):
                if "tests.volume.processes" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        self._thread.join(PATIENCE_S)


@dataclass
class History:
    """What was acknowledged, over all sessions."""

    acknowledged: list[str] = field(default_factory=list)
    #: Of the last session: neither acknowledged nor ruled out.
    in_flight: list[str] | None = None

    def session(self, number: int, said: list[dict[str, Any]]) -> int:
        """One session, from what it said. Returns how many commits it was told of."""
        commits = 0
        for one in said:
            if "opened" in one:
                assert one["opened"] in (self.acknowledged, self.in_flight), (
                    f"session {one['session']} of job {number} opened with another state than was acknowledged: "
                    f"{one['opened']}, and it was {self.acknowledged}, in flight {self.in_flight}"
                )
                self.acknowledged, self.in_flight = one["opened"], None
            elif "committing" in one:
                self.in_flight = one["committing"]
            elif "acknowledged" in one:
                self.acknowledged, self.in_flight = one["acknowledged"], None
                commits += 1
        return commits


class Rounds:
    """`run` raises AssertionError where a promise was broken."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.history = History()
        self.counts: Counter[str] = Counter()
        #: Why jobs ended that were not killed.
        self.ends: set[str] = set()
        #: What was done, for who looks into a failure.
        self.log: list[str] = []
        self._media = [f"{folder / name}:16MiB" for name in "ab"]
        self._port = free_port()
        self._stack = ExitStack()
        self._numbers = 0
        self._jobs: list[Spoken] = []
        self._readers: list[Spoken] = []
        self.target = self._serve()
        self.uris = self._addresses(keepalive=1)
        Volume.create(self.uris, stripe_bytes=64 * KIB, log_bytes=256 * KIB).close()

    # ---- who there is ----

    def _serve(self) -> ServeProcess:
        options = ["--volatile-cache", "16MiB"]
        return self._stack.enter_context(serving(NQN, *self._media, port=self._port, options=options))

    def _addresses(self, *, keepalive: int) -> list[str]:
        return [self.target.uri(nsid, loss_timeout=60, keepalive=keepalive) for nsid in (1, 2)]

    def _say(self, what: str) -> None:
        self.log.append(f"{time.monotonic():.3f} round {self.counts['rounds']}: {what}")

    def restart(self) -> None:
        self._say("the target is killed")
        self.target.process.kill()
        self._stack.close()
        self._stack = ExitStack()
        self.target = self._serve()
        self.counts["target killed"] += 1

    def _job(self, role: str, ranks: int) -> Spoken:
        self._numbers += 1
        # Who is stopped loses its associations, or wakes up with commands that it can send at once.
        uris = self._addresses(keepalive=self.chance.choice((1, 120)))
        job = Spoken(role, uris, self._numbers, ranks)
        self._jobs.append(job)
        self._say(f"{role} {job.number} begins")
        return job

    def close(self) -> None:
        for one in (*self._jobs, *self._readers):
            one.end()
        self._stack.close()

    # ---- a round ----

    def run(self, seconds: float) -> None:
        self.counts["rounds"] += 1
        while len(self._readers) < READERS:
            self._readers.append(Spoken("reader", self.uris))
        job = self._job("coordinator", RANKS - 1)
        job.wait_for("acknowledged")
        ends = time.monotonic() + self.chance.random() * seconds
        zombies = 1
        while job.running:
            time.sleep(self.chance.random() * 0.6)
            kind = self.chance.random()
            if kind < 0.25:
                self.restart()
            elif kind < 0.35:
                self._kill_reader()
            elif kind < 0.42:
                self._kill_rank(job)
            elif kind < 0.65:
                self._pause(job)
            elif kind < 0.85 and zombies:
                zombies -= 1
                job = self._take_over(job)
            if time.monotonic() > ends:
                break
        self._end(job)
        if self.chance.random() < 0.5:
            self._kill_again()
        self._account()
        self._verify()
        self._check_readers()

    def _kill_reader(self) -> None:
        self.counts["reader killed"] += 1
        reader = self._readers.pop(self.chance.randrange(len(self._readers)))
        reader.end()
        self._hear(reader)

    def _kill_rank(self, job: Spoken) -> None:
        if ranks := job.pids()[1:]:
            self.counts["rank killed"] += 1
            self._say(f"a rank of {job.number} is killed")
            job.signal(signal.SIGKILL, [self.chance.choice(ranks)])

    def _pause(self, job: Spoken) -> None:
        """Stopped for less than the heartbeat's patience, as far as this machine keeps time."""
        pids = self._some(job)
        self.counts["stopped within patience"] += 1
        self._say(f"{len(pids)} of {job.number} are stopped for a moment")
        job.signal(signal.SIGSTOP, pids)
        time.sleep(self.chance.random() * BEAT_S * (MISSED - 1))
        job.signal(signal.SIGCONT, pids)

    def _some(self, job: Spoken) -> list[int]:
        """All of a job, or its coordinator, or its ranks."""
        pids = job.pids()
        return self.chance.choice((pids, pids[:1], pids[1:] or pids))

    def _take_over(self, job: Spoken) -> Spoken:
        """Stopped for longer, so that a rival gets the volume; then woken up. Returns the rival."""
        pids = job.pids() if self.chance.random() < 0.7 else job.pids()[:1]
        self._say(f"{len(pids)} of {job.number} are stopped until somebody took over")
        job.signal(signal.SIGSTOP, pids)
        rival = self._job("rival", 0)
        if self.chance.random() < 0.3:
            time.sleep(self.chance.random())
            self.restart()
        if self.chance.random() < 0.3 and rival.wait_for("opening"):
            # The taker dies, too, wherever it is.
            time.sleep(self.chance.random() * (MISSED + 2) * BEAT_S)
            self._say(f"rival {rival.number} is killed")
            self.counts["second kill"] += 1
            rival.end()
            rival = self._job("rival", 0)
        taken = rival.wait_for("acknowledged")
        before = self._conflicts()
        job.signal(signal.SIGCONT, pids)
        self._say(f"{job.number} wakes up")
        if not taken:
            # It ended of something else; whoever was stopped may go on.
            self._end(rival)
            return job
        self.counts["taken over"] += 1
        try:
            job.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"job {job.number} does not notice that {rival.number} took over") from None
        self.counts["conflicts of zombies"] += max(0, self._conflicts() - before)
        if any(job.all("lost")):
            self.counts["zombie said that it is lost"] += 1
        return rival

    def _end(self, job: Spoken) -> None:
        """SIGKILL; the target's power may fail with it."""
        if job.running:
            self.counts["writer killed"] += 1
        self._say(f"{job.number} is killed")
        if self.chance.random() < 0.25:
            self.target.process.kill()
            job.end()
            self.restart()
        job.end()

    def _kill_again(self) -> None:
        """The next session, or the target, dies while it recovers."""
        job = self._job("coordinator", 0)
        if job.wait_for("opening"):
            time.sleep(self.chance.random() * (MISSED + 3) * BEAT_S)
            self.counts["second kill"] += 1
            if self.chance.random() < 0.5:
                self.restart()
                time.sleep(self.chance.random())
        self._say(f"{job.number} is killed again")
        job.end()

    def _conflicts(self) -> int:
        try:
            return _sum(self.target.ask("status"), "conflicts")
        except HeadraceError:
            return 0

    # ---- what must hold ----

    def _account(self) -> None:
        """Everything that all jobs of this round said, in the order of their sessions."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.end()
            self.ends.update(job.all("ended"))
            self.counts["refused by a living writer"] += len(job.all("refused"))
        for job in sorted((one for one in jobs if one.all("session")), key=lambda one: one.all("session")[0]):
            self.counts["sessions"] += 1
            self.counts["commits"] += self.history.session(job.number, job.said)

    def _verify(self) -> None:
        """A new session finds the last acknowledged state, or the one in flight, and every byte of it."""
        with Volume.open(self.uris, write=True) as volume:
            with volume.session("verify", takeover="if-dead", heartbeat_s=BEAT_S, missed_beats=MISSED) as session:
                found = sorted(info.name for info in volume.list())
                self.history.session(0, [{"opened": found, "session": session.number}])
                for name in found:
                    assert volume.read(name) == content(name), f"wrong bytes of {name}"
                self._taken(volume, session)
            report = scrub(volume.devices)
            assert report.clean, f"scrub: {'; '.join(map(str, report.findings[:3]))}"
            assert report.object_count == len(found)

    def _taken(self, volume: Volume, session: Session) -> int:
        """Bytes that are not free, all accounted for."""
        with session.lock:
            info = volume.info()
            together = session.free_bytes + info.used_bytes + session.quarantined_bytes + session.deallocating_bytes
        assert together == info.capacity_bytes, f"{info.capacity_bytes} bytes, and {together} are accounted for"
        return info.capacity_bytes - session.free_bytes

    def _check_readers(self) -> None:
        for reader in list(self._readers):
            self._hear(reader)
            if not reader.running:
                self._readers.remove(reader)
                raise AssertionError(f"a reader ended: {reader.said[-3:]}")

    def _hear(self, reader: Spoken) -> None:
        for violation in reader.all("violation"):
            raise AssertionError(violation)
        said, reader.said = reader.said, []
        for one in said:
            for what in ("looks", "reads"):
                self.counts[what] += one.get(what, 0)

    def empty(self) -> None:
        """At the end everything is deleted: then nothing takes space but tables, and nothing waits for anybody."""
        with Volume.open(self.uris, write=True) as volume:
            session = volume.session("empty", takeover="if-dead", heartbeat_s=BEAT_S, missed_beats=MISSED)
            with session.transaction() as tx:
                for name in (info.name for info in volume.list()):
                    tx.delete(name)
            session.renew()
            taken = self._taken(volume, session)
            assert not session.quarantined_bytes and taken <= volume.info().used_bytes, f"{taken} bytes are left"
            assert taken < 512 * KIB, f"{taken} bytes for tables of nothing"
            session.close()


def _sum(said: object, name: str) -> int:
    if isinstance(said, dict):
        own = sum(value for key, value in said.items() if key == name and isinstance(value, int))
        return own + sum(_sum(value, name) for value in said.values())
    return sum(_sum(one, name) for one in said) if isinstance(said, list) else 0


__all__ = ["History", "Rounds", "Spoken"]
