"""What the processes do. Each says lines of JSON; whoever started them holds those against each other."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headrace.errors import DeviceError, HeadraceError, ObjectNotFound, VolumeDamaged, WriterActive
from headrace.volume import Grant, Receipt, Session, Transaction, Volume
from headrace.volume.space import deallocate

#: A beat, and how many missed ones mean death: a writer's patience is the product.
BEAT_S = 0.2
MISSED = 3
#: Seconds between a deletion and the deallocation of its space, so that rounds have some.
DEALLOCATE_S = 0.3
#: Groups of objects that a job keeps.
KEPT = 4


# ---- names: everything about an object can be told from its name ----
#
# A transaction makes one group, "JOB/STEP-COUNT/...", of so many objects: who sees one of them must see all.


def group_of(name: str) -> str:
    return name.rpartition("/")[0]


def order_of(group: str) -> tuple[int, int]:
    """Groups are made, and deleted, in this order."""
    job, step = group.split("/")
    return int(job), int(step.partition("-")[0])


def content(name: str) -> bytes:
    kind, _, source = name.rpartition("/")[2].partition("=")
    if kind == "joined":
        one, other = (f"{source.replace('+', '/')}/{index}" for index in (0, 1))
        return content(one)[:1000] + content(other)
    chance = random.Random(name)
    return chance.randbytes(chance.randrange(1, 3000) if kind == "small" else chance.choice((1, 5000, 70_000, 300_000)))


def torn(names: list[str]) -> dict[str, int]:
    """Groups of which something is missing."""
    found: dict[str, int] = {}
    for name in names:
        found[group_of(name)] = found.get(group_of(name), 0) + 1
    return {group: count for group, count in found.items() if count != int(group.rpartition("-")[2])}


def say(**what: Any) -> None:
    with suppress(BrokenPipeError):
        print(json.dumps(what), flush=True)


def start(role: str, uris: list[str], number: int = 0, ranks: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.volume.processes", "--role", role, "--number", str(number)]
    return subprocess.Popen(
        [*command, "--ranks", str(ranks), *uris], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def open_patiently(uris: list[str]) -> Volume:
    """The target may be away just now."""
    for _ in range(100):
        try:
            return Volume.open(uris, write=True)
        except DeviceError:
            time.sleep(0.2)
    return Volume.open(uris, write=True)


def rank(uris: list[str], number: int, ranks: int) -> None:
    """Writes what it is granted; ends with its coordinator."""
    volume = open_patiently(uris)
    for line in sys.stdin:
        grant = Grant.from_json(line)
        print(volume.write_grant(grant, content(grant.name)).to_json(), flush=True)


def coordinator(uris: list[str], number: int, ranks: int) -> None:
    """Rank 0, and the session: one transaction after another, each with an object of every rank."""
    deallocate.AFTER_S = DEALLOCATE_S
    crew = [start("rank", uris) for _ in range(ranks)]
    say(crew=[process.pid for process in crew])
    try:
        volume = open_patiently(uris)
        say(opening=number)
        session = volume.session("job", takeover="if-dead", heartbeat_s=BEAT_S, missed_beats=MISSED)
        _work(volume, session, number, crew)
    finally:
        for process in crew:
            process.kill()
            process.wait()


def rival(uris: list[str], number: int, ranks: int) -> None:
    """Another job, that wants the volume as soon as its writer is dead."""
    deallocate.AFTER_S = DEALLOCATE_S
    volume = open_patiently(uris)
    say(opening=number)
    while True:
        try:
            session = volume.session("rival", takeover="if-dead", heartbeat_s=BEAT_S, missed_beats=MISSED)
            break
        except WriterActive:
            say(refused=number)
            volume.refresh()
    _work(volume, session, number, [])


def _work(volume: Volume, session: Session, number: int, crew: list[subprocess.Popen[str]]) -> None:
    state = sorted(info.name for info in volume.list())
    say(opened=state, session=session.number)
    chance = random.Random(number)
    for step in range(1_000_000):
        groups = sorted({group_of(name) for name in state}, key=order_of)
        gone = groups[: max(0, len(groups) - KEPT)]
        small = [f"small={index}" for index in range(chance.choice((0, 0, 8)))]
        joined = [f"joined={groups[-1].replace('/', '+')}"] if groups and chance.random() < 0.5 else []
        # The coordinator writes at least two by itself, which later ones are joined of.
        count = max(2, 1 + len(crew)) + len(small) + len(joined)
        group = f"{number}/{step}-{count}"
        big = [f"{group}/{index}" for index in range(count - len(small) - len(joined))]
        with session.transaction() as tx:
            for old in gone:
                tx.delete_prefix(f"{old}/")
            _write(tx, group, big, small, crew)
            for name in joined:
                _join(tx, f"{group}/{name}", groups[-1])
            names = big + [f"{group}/{name}" for name in small + joined]
            state = sorted({*(name for name in state if group_of(name) not in gone), *names})
            say(committing=state)
        say(acknowledged=state)


def _join(tx: Transaction, name: str, source: str) -> None:
    first = len(content(f"{source}/0"))
    tx.compose(name, [(f"{source}/0", 0, min(1000, first)), (f"{source}/1", 0, None)])


def _write(tx: Transaction, group: str, big: list[str], small: list[str], crew: list[subprocess.Popen[str]]) -> None:
    own, theirs = big[: len(big) - len(crew)], big[len(big) - len(crew) :]
    for process, name in zip(crew, theirs, strict=True):
        assert process.stdin is not None
        process.stdin.write(tx.allocate(name, len(content(name))).to_json() + "\n")
        process.stdin.flush()
    for name in own:
        tx.put(name, content(name))
    if small:
        pieces = [content(f"{group}/{name}") for name in small]
        tx.put_many([f"{group}/{name}" for name in small], b"".join(pieces), [len(piece) for piece in pieces])
    for process in crew:
        assert process.stdout is not None
        line = process.stdout.readline()
        if '"ended"' in line or not line:
            ended = json.loads(line or "{}")
            say(ended=f"a rank ended: {ended.get('ended')}", lost=ended.get("lost", False))
            raise SystemExit
        tx.accept(Receipt.from_json(line))


def reader(uris: list[str], number: int, ranks: int) -> None:
    """Looks, and reads some of what it sees, until it is told to stop. What is wrong it says at once."""
    chance = random.Random()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    volume: Volume | None = None
    newest = (0, 0)
    looks = reads = 0
    while not stop.is_set() and os.getppid() != 1:
        try:
            if volume is None:
                volume = Volume.open(uris)
            volume.refresh()
            names = [info.name for info in volume.list()]
            if missing := torn(names):
                say(violation=f"a transaction is torn: {missing}")
            last = max((order_of(group_of(name)) for name in names), default=(0, 0))
            if last < newest:
                say(violation=f"group {newest} was there, and now {last} is the last")
            newest = last
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
        if looks and looks % 20 == 0:
            say(looks=looks, reads=reads)
            looks = reads = 0
        time.sleep(0.02)
    say(looks=looks, reads=reads)


ROLES: dict[str, Callable[[list[str], int, int], None]] = {
    "rank": rank,
    "coordinator": coordinator,
    "rival": rival,
    "reader": reader,
}
