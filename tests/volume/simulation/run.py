"""One world, from its seed to its end."""

from __future__ import annotations

import gc
import itertools
import random
import secrets
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from headrace.device import crc32c, reference
from headrace.testing import Quirks, namespace
from headrace.units import KIB
from headrace.volume import layout, volume
from headrace.volume.catalog import commit
from headrace.volume.catalog.tables import table
from headrace.volume.data import checksums, durable
from headrace.volume.space import deallocate
from headrace.volume.writing import fence, heartbeat, holdings, past, tenure, transaction
from tests.volume.simulation.actor import Actor
from tests.volume.simulation.actors import BEAT_S, Job, rank, reader, world, writer
from tests.volume.simulation.chain import Violation
from tests.volume.simulation.threads import Threads
from tests.volume.simulation.weather import Weather
from tests.volume.simulation.world import World, quiet_s

#: A world ends at last after so many steps.
STEPS = 3000


class _Inline:
    """A thread that runs when it is started: two flushes at once are one after the other."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...] = (), **_: object) -> None:
        self._target, self._args = target, args

    def start(self) -> None:
        self._target(*self._args)

    def join(self, timeout: float | None = None) -> None:
        pass


@contextmanager
def determined(seed: int) -> Iterator[Threads]:
    """Chance, clocks and threads of the volume, as the seed wants them."""
    chance = random.Random(seed ^ 0x5EED)
    ticks = itertools.count(1_700_000_000_000_000_000, 1_000_000)
    threads = Threads()

    def rows(data: reference.U8, seeds: reference.U32) -> reference.U32:
        return np.array([crc32c(row, int(one)) for row, one in zip(data, seeds, strict=True)], np.uint32)

    module, clock = threads.module(), threads.clock(lambda: next(ticks))
    inline = SimpleNamespace(**{**vars(module), "Thread": _Inline})
    with ExitStack() as stack:
        for owner, name, value in [
            (secrets, "token_bytes", lambda count=32: chance.randbytes(count)),
            (secrets, "randbits", chance.getrandbits),
            (fence, "uuid4", lambda: uuid.UUID(int=chance.getrandbits(128))),
            (namespace, "uuid4", lambda: uuid.UUID(int=chance.getrandbits(128))),
            (reference, "crc32c_rows", rows),
            (durable, "threading", inline),
            *(
                (one, "threading", module)
                for one in (heartbeat, deallocate, tenure, holdings, transaction, volume, table)
            ),
            *((one, "Worker", module.Worker) for one in (heartbeat, deallocate)),
            (checksums, "threading", module),
            (heartbeat, "time", clock),
            (past, "time", clock),
            (past, "QUIET_S", quiet_s(seed)),
            (deallocate, "time", clock),
            (heartbeat, "INTERVAL_S", BEAT_S),
            (deallocate, "AFTER_S", 0.2),
        ]:
            stack.enter_context(patch.object(owner, name, value))
        yield threads


@contextmanager
def observed(made: World, threads: Threads) -> Iterator[None]:
    """Nobody is taken for dead whose heart beats."""
    write, judge = heartbeat.HeartbeatBlock.write, heartbeat.judge

    def noted(block: heartbeat.HeartbeatBlock, beat: layout.Heartbeat) -> None:
        write(block, beat)
        made.beats.setdefault(beat.session, []).append(made.now)

    def judged(block: heartbeat.HeartbeatBlock, **how: Any) -> heartbeat.Verdict:
        verdict = judge(block, **how)
        last = verdict.last
        # Time stands still where what a power cut left is looked at.
        if (
            threads.actor() is not None
            and how["takeover"] == "if-dead"
            and last is not None
            and last.state == layout.ACTIVE
        ):
            since = made.now - how["missed_beats"] * BEAT_S
            # One may have come behind the last look.
            if sum(beat > since for beat in made.beats.get(last.session, [])) > 1:
                raise Violation(f"session {last.session} was taken for dead, and its heart beats")
        return verdict

    with ExitStack() as stack:
        stack.enter_context(patch.object(heartbeat.HeartbeatBlock, "write", noted))
        stack.enter_context(patch.object(heartbeat, "judge", judged))
        if made.weather.data_only:
            # One session is enough (`World.opened`).
            stack.enter_context(patch.object(past, "QUIET_S", BEAT_S / 10))
        if made.weather.many_tables:
            for name, value in [("RECENT_BYTES", 1024), ("BULK_BYTES", 2048), ("LOG_BYTES", 24 * KIB)]:
                stack.enter_context(patch.object(commit, name, value))
        yield


def run(
    seed: int,
    *,
    trace: bool = False,
    steps: int = STEPS,
    storm: tuple[Weather, Quirks] | None = None,
    resent_ghosts: bool = False,
) -> World:
    """Raises `Violation`, or what a process raised that it must not."""
    with determined(seed) as threads:
        made = world(seed, trace=trace, storm=storm)
        made.weather.resent_ghosts |= resent_ghosts
        threads.world = made
        try:
            with observed(made, threads):
                _life(made, steps)
        except BaseException as error:
            error.add_note("\n".join(["", *made.log[-40:]])) if hasattr(error, "add_note") else None
            raise
        finally:
            made.end()
            if seed % 8 == 0:
                # Worlds are cycles of few large objects, which Python's collector does not count.
                gc.collect()
        return made


def _life(made: World, steps: int) -> None:
    chance = made.chance
    numbers = itertools.count(1)
    for _ in range(chance.choice((1, 2))):
        made.spawn(f"reader {next(numbers)}", lambda actor: reader(actor, 60))
    last: Actor | None = None
    sessions = made.weather.sessions or chance.choice((1, 2, 3, 4))
    while made.steps < steps:
        writers = made.alive("writer")
        busy = any(actor.asleep_until <= made.steps for actor in writers)
        if not made.fenced:
            # Of two takers at once, and of a third session that meets the first, nothing is promised.
            busy |= bool(made.opening) or len(writers) > 1
        if sessions and (not writers or (not busy and chance.random() < 0.02)):
            sessions -= 1
            spawn_job(made, next(numbers))
        last = made.step(last)
        if last is None and not sessions:
            break
    made.settle(200_000)
    final(made)


def spawn_job(made: World, number: int) -> None:
    job = Job()
    count = made.weather.transactions or made.chance.choice((3, 8, 20, 60))
    main = made.spawn(f"writer {number}", lambda actor: writer(actor, job, count))
    for index in range(made.chance.choice((0, 0, 1, 2))):
        made.spawn(f"rank {index} of writer {number}", lambda actor: rank(actor, job, main))


def final(made: World) -> None:
    """Everybody has ended; what was acknowledged is there."""
    if made.after_cut is None:
        raise Violation("nobody looks")
    made.cut()


__all__ = ["determined", "run"]
