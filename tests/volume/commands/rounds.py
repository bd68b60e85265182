"""What is done in a round, to which command, and what must hold whenever it was ended."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from headrace import cli
from headrace.errors import SessionLost
from headrace.testing.serve import serving
from headrace.volume import Volume, layout
from headrace.volume.repair.scrub import scrub
from tests.volume.support import KIB, content

NQN = "nqn.2026-01.io.headrace:commands"
#: Of the heart of each command, so that who comes after one that was killed waits a second.
BEAT_S = 0.2
#: What ends, ends within this time; under load a Python needs long to begin.
PATIENCE_S = 120.0
KINDS = ("copy_in", "copy_out", "scrub_repair", "take_over")
#: A command is ended at most so long after its first sign, most of them sooner: it takes about as long.
_MOST_S = 0.6
#: Sizes of what is copied: of packed files, and of files that have checksum tables.
_SMALL, _LARGE = 60, 12
_LARGE_BYTES = 3 << 19
#: Folders that are kept in the volume.
_KEPT = 3

_numbers = count()


# ---- the processes ---------------------------------------------------------------------------------------------------


def _quick_heart() -> None:
    assert Volume.session.__kwdefaults__ is not None
    Volume.session.__kwdefaults__["heartbeat_s"] = BEAT_S


def command(arguments: list[str]) -> int:
    """`headrace`, from where its imports are done. Before it can be ended in order no signal comes, and after that no
    Ctrl-C, which would go on in this function.
    """
    _quick_heart()
    ended_in_order = {signal.SIGINT, signal.SIGTERM}
    run = cli._run

    def interrupted(*how: Any) -> int:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ended_in_order)
        try:
            return run(*how)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    cli._run = interrupted
    signal.pthread_sigmask(signal.SIG_BLOCK, ended_in_order)
    print("go", flush=True)
    return cli.main(arguments)


def hold(prefix: str, uris: list[str]) -> int:
    """A job that commits one small object after another, and says so before and after."""
    _quick_heart()
    with Volume.open(uris, write=True) as volume:
        session = volume.session("job")
        try:
            for number in range(1_000_000):
                name = f"{prefix}/{number}"
                print(f"committing {name}", flush=True)
                with session.transaction() as tx:
                    tx.put(name, held(name))
                print(f"committed {name}", flush=True)
        except SessionLost:
            print("lost", flush=True)
    return 0


def held(name: str) -> bytes:
    chance = random.Random(name)
    return chance.randbytes(chance.randrange(1, 9000))


class Process:
    """What it says goes into files: nothing of it is lost, whenever it ends."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        number = next(_numbers)
        self._said, self._complained = folder / f"stdout-{number}", folder / f"stderr-{number}"
        with self._said.open("w") as out, self._complained.open("w") as err:
            command = [sys.executable, "-m", "tests.volume.commands", *arguments]
            self.process = subprocess.Popen(command, stdout=out, stderr=err)

    @property
    def out(self) -> str:
        return self._said.read_text()

    @property
    def err(self) -> str:
        return self._complained.read_text()

    def wait_for(self, lines: int) -> None:
        patience = time.monotonic() + PATIENCE_S
        while self.out.count("\n") < lines:
            assert self.process.poll() is None and time.monotonic() < patience, self.err
            time.sleep(0.002)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Run(Process):
    """One command, ended by a signal, or not at all (None): `after_s` after its first `sign` of doing something, which
    is something that changes.
    """

    def __init__(
        self,
        folder: Path,
        arguments: list[str],
        ended_by: signal.Signals | None,
        after_s: float,
        sign: Callable[[], object],
    ) -> None:
        before = sign()
        super().__init__(folder, ["--command", *arguments])
        try:
            self.wait_for(1)
            patience = time.monotonic() + PATIENCE_S
            while sign() == before and self.process.poll() is None and time.monotonic() < patience:
                time.sleep(0.001)
            began = time.monotonic()
            if ended_by is not None:
                time.sleep(after_s)
                self.process.send_signal(ended_by)
            self.status = self.process.wait(PATIENCE_S)
            #: Since the sign.
            self.seconds = time.monotonic() - began
        finally:
            self.end()
        #: It did all that it was asked for, and said so.
        self.done = self.status == 0
        # Where Python runs something that cannot raise, it says that it was interrupted there, and goes on.
        assert "Traceback" not in self.err or "Exception ignored in" in self.err, self.err
        # By the signal itself: SIGTERM behind the end of the command; and SIGINT where it came within an `exec` of text
        # (a dataclass is made), which shells see no difference in.
        ends = [] if ended_by is None else [128 + ended_by, -ended_by]
        assert self.status in (0, 1, *ends), (self.status, self.err)


# ---- the rounds ------------------------------------------------------------------------------------------------------


class Rounds:
    def __init__(self, folder: Path, seed: int, *, target: bool = False) -> None:
        self.chance = random.Random(seed)
        self.log: list[str] = []
        self.counts: Counter[str] = Counter()
        self._folder = folder
        self._stack = ExitStack()
        self._media = [folder / "a.img", folder / "b.img"]
        self.uris = [f"file:{path}" for path in self._media]
        #: What was acknowledged, and what of what was not has been seen.
        self.state: dict[str, bytes] = {}
        #: What the last command was about, and whether it was about it in several commits.
        self._planned: dict[str, bytes] = {}
        self._apart = False
        self._numbers = 0
        if target:
            self.uris = self._serve()
        made = self.uris if target else [f"{uri}?create=96MiB" for uri in self.uris]
        Volume.create(made, stripe_bytes=64 * KIB, log_bytes=128 * KIB).close()

    def _serve(self) -> list[str]:
        served = self._stack.enter_context(serving(NQN, *(f"{path}:96MiB" for path in self._media)))
        return [served.uri(nsid, loss_timeout=60) for nsid in (1, 2)]

    def __enter__(self) -> Rounds:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def run(self, kind: str) -> None:
        self._numbers += 1
        self.counts["rounds"] += 1
        getattr(self, f"_{kind}")()
        self._settle()

    def _sign(self, kind: str) -> Callable[[], object]:
        """What shows that a command has begun: with its imports; or with what it writes, where much happens soon."""
        if self.chance.random() < 0.2:
            return time.monotonic
        out = self._folder / f"out-{self._numbers}"
        if kind == "copy_out":
            return out.exists
        return lambda: [path.stat().st_mtime_ns for path in self._media]

    def _end(self, kind: str, arguments: list[str]) -> Run:
        """Run a command, and end it at any moment."""
        by = self.chance.choice((signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL))
        after_s = self.chance.random() ** 2 * _MOST_S
        run = Run(self._folder, arguments, by, after_s, self._sign(kind))
        self.log.append(
            f"{kind} {by.name} after {after_s:.3f} s of {run.seconds:.3f} s: status {run.status} {run.err.strip()}"
        )
        self.counts[f"{kind}: {'done before' if run.done else by.name}"] += 1
        return run

    def _whole(self, kind: str, arguments: list[str]) -> Run:
        """Run a command, and let it be."""
        run = Run(self._folder, arguments, None, 0, self._sign(kind))
        assert run.done, f"{arguments[:3]}: {run.err}"
        return run

    def _volume(self) -> list[str]:
        return [part for uri in self.uris for part in ("-V", uri)]

    # ---- copies ----

    def _copy_in(self) -> None:
        folders = sorted({name.partition("/")[0] for name in self.state})
        replace = bool(folders) and self.chance.random() < 0.4
        folder = self.chance.choice(folders) if replace else f"in-{self._numbers}"
        source = self._folder / f"source-{self._numbers}"
        planned = {}
        for number in range(_SMALL + _LARGE):
            name, size = f"{number % 3}/{number}", _LARGE_BYTES if number >= _SMALL else self.chance.randrange(1, 3000)
            planned[f"{folder}/{name}"] = data = content(self.chance.randrange(1 << 30), size)
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(data)
        apart = self.chance.random() < 0.4
        options = ["--keep-going"] if apart else []
        options += ["--existing", "replace"] if replace else []
        options += ["--verify"] if self.chance.random() < 0.3 else []
        arguments = ["volume", "cp", "-r", f"{source}/.", f":{folder}", *options, "--takeover", *self._volume()]
        run = self._end("copy_in", arguments)
        self._flies(planned, apart=apart, acknowledged=run.done)

    def _copy_out(self) -> None:
        if not self.state:
            self._fill()
        folder = self.chance.choice(sorted({name.partition("/")[0] for name in self.state}))
        out = self._folder / f"out-{self._numbers}"
        arguments = ["volume", "cp", "-r", f":{folder}/.", str(out), "--existing", "update", *self._volume()]
        expected = {name.partition("/")[2]: data for name, data in self.state.items() if name.startswith(f"{folder}/")}
        for last in (False, True):
            run = self._whole("copy_out", arguments) if last else self._end("copy_out", arguments)
            there = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}
            for name, path in there.items():
                assert name in expected, f"{name} is there, and no object has this name"
                assert path.read_bytes() == expected[name], f"{name} has a name, and is not whole"
            if run.done:
                assert set(there) == set(expected)

    # ---- repair ----

    def _scrub_repair(self) -> None:
        if not self.state:
            self._fill()
        damaged = self._damage()
        arguments = ["volume", "scrub", "--repair", *self.uris]
        self._end("scrub_repair", arguments)
        self._check()
        report = self._whole("scrub_repair", arguments)
        self.log.append(f"{damaged} is mended: {report.out.strip().splitlines()[-1:]}")

    def _damage(self) -> str:
        """One copy of something, of which the other one is good."""
        with Volume.open(self.uris) as volume:
            block, what = volume.superblock, self.chance.choice(("page", "superblock", "node", "heartbeat"))
            member, offset = 0, 0
            tables = volume._catalog.tables
            large = [name for name, data in self.state.items() if len(data) == _LARGE_BYTES]
            if what == "node" and tables:
                root = self.chance.choice(tables).root
                member, _, offset, _ = self.chance.choice(root.copies).tolist()[0]
            elif what == "heartbeat":
                copy = self.chance.randrange(layout.LOG_COPIES)
                member, offset = block.log_member[copy], block.log_offset[copy]
            elif what != "superblock" and large:
                blob = volume.stored(self.chance.choice(large)).blobs[0]
                place = self.chance.choice(blob.tables).pieces(np.array([0]), np.array([1]))
                member, offset = int(place.member[0]), int(place.offset[0])
        with self._media[member].open("r+b") as file:
            file.seek(offset + 16)
            byte = file.read(1)[0]
            file.seek(offset + 16)
            file.write(bytes([byte ^ 1]))
        return f"{what} on member {member} offset {offset}"

    # ---- takeover ----

    def _take_over(self) -> None:
        prefix = f"job-{self._numbers}"
        job = Process(self._folder, ["--hold", prefix, *self.uris])
        try:
            job.wait_for(6)
            lives = self.chance.random() < 0.5
            if not lives:
                job.end()
            arguments = ["volume", "takeover", "--yes", *(["--now"] if lives else []), *self.uris]
            self._end(f"take_over {'now' if lives else 'if dead'}", arguments)
        finally:
            job.end()
        words = [line.split() for line in job.out.splitlines() if line.startswith("commit")]
        done = {one[1] for one in words if one[0] == "committed" and len(one) == 2}
        # The last word may be cut off.
        maybe = {one[1] for one in words if one[0] == "committing" and len(one) == 2} - done
        self.state |= {name: held(name) for name in done}
        self._flies({name: held(name) for name in maybe})

    # ---- what must hold ----

    def _fill(self) -> None:
        new = {f"in-{self._numbers}/{i}": content(i, _LARGE_BYTES if i < 3 else 1000 * i) for i in range(20)}
        with (
            Volume.open(self.uris, write=True) as volume,
            volume.session("fill", heartbeat_s=BEAT_S) as session,
            session.transaction() as tx,
        ):
            for name, data in new.items():
                tx.put(name, data)
        self.state |= new

    def _flies(self, planned: dict[str, bytes], *, apart: bool = False, acknowledged: bool = False) -> None:
        """A command that planned these objects has ended: in one commit, unless `apart`. Where it was not acknowledged,
        it may be there now, or be found by the next session, or not at all."""
        self._planned, self._apart = planned, apart
        self._check()
        there = sum(self.state.get(name) == data for name, data in planned.items())
        assert not acknowledged or there == len(planned), f"{len(planned) - there} acknowledged objects are gone"

    def _check(self) -> None:
        """Every byte of every object is what was acknowledged, or, where it was in flight, what was planned: all of it
        or nothing, unless it was planned as several commits (`apart`)."""
        planned = self._planned
        with Volume.open(self.uris) as volume:
            found = {info.name: volume.read(info.name) for info in volume.list()}
        new = {name for name, data in planned.items() if found.get(name) == data}
        assert self._apart or len(new) in (0, len(planned)), (
            f"{len(new)} of {len(planned)} objects of one commit are there"
        )
        self.state |= {name: planned[name] for name in new}
        assert found.keys() == self.state.keys(), (
            f"{sorted(found.keys() ^ self.state.keys())[:3]} should (not) be there"
        )
        wrong = [name for name, data in found.items() if data != self.state[name]]
        assert not wrong, f"wrong bytes of {wrong[:3]}"

    def _settle(self) -> None:
        """The next session opens, finds everything, and nothing of the volume is damaged or lost to anybody after."""
        kept = sorted({name.partition("/")[0] for name in self.state}, key=lambda name: int(name.partition("-")[2]))
        with Volume.open(self.uris, write=True) as volume:
            with volume.session("settle", takeover="if-dead", heartbeat_s=BEAT_S) as session:
                self._check()
                self._planned = {}
                for folder in kept[: max(0, len(kept) - _KEPT)]:
                    with session.transaction() as tx:
                        tx.delete_prefix(f"{folder}/")
                    self.state = {name: data for name, data in self.state.items() if not name.startswith(f"{folder}/")}
                info = volume.info()
                together = session.free_bytes + info.used_bytes + session.quarantined_bytes + session.deallocating_bytes
                assert together == info.capacity_bytes
            report = scrub(volume.devices)
            assert report.clean, f"scrub: {'; '.join(map(str, report.findings[:3]))}"
        self._check()
