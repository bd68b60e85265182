"""One world, from its seed to its end."""

from __future__ import annotations

import itertools
import random
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from headrace.device import crc32c, reference
from headrace.testing import Quirks, namespace
from headrace.volume.data import durable
from headrace.volume.space import deallocate
from headrace.volume.writing import fence, heartbeat
from tests.volume.simulation.actors import Job, rank, reader, world, writer
from tests.volume.simulation.chain import Violation
from tests.volume.simulation.world import Actor, Weather, World

#: A world ends at last after so many steps.
STEPS = 3000


class _Inline:
    """A thread that runs when it is started, so that there is one order."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...] = (), **_: object) -> None:
        self._target, self._args = target, args

    def start(self) -> None:
        self._target(*self._args)

    def join(self, timeout: float | None = None) -> None:
        pass


class _Idle(_Inline):
    """A thread that never gets a turn: the actors beat when they do something."""

    def start(self) -> None:
        pass


@contextmanager
def determined(seed: int) -> Iterator[None]:
    """Chance, clocks and threads of the volume, as the seed wants them."""
    chance = random.Random(seed ^ 0x5EED)
    ticks = itertools.count(1_700_000_000_000_000_000, 1_000_000)

    def rows(data: reference.U8, seeds: reference.U32) -> reference.U32:
        return np.array([crc32c(row, int(one)) for row, one in zip(data, seeds, strict=True)], np.uint32)

    import threading

    def with_thread(kind: type[_Inline]) -> SimpleNamespace:
        return SimpleNamespace(**{**vars(threading), "Thread": kind})

    clock = SimpleNamespace(
        sleep=lambda seconds: None, monotonic=time.monotonic, time=time.time, time_ns=lambda: next(ticks)
    )
    with ExitStack() as stack:
        for owner, name, value in [
            (secrets, "token_bytes", lambda count=32: chance.randbytes(count)),
            (secrets, "randbits", chance.getrandbits),
            (fence, "uuid4", lambda: uuid.UUID(int=chance.getrandbits(128))),
            (namespace, "uuid4", lambda: uuid.UUID(int=chance.getrandbits(128))),
            (reference, "crc32c_rows", rows),
            (durable, "threading", with_thread(_Inline)),
            (heartbeat, "threading", with_thread(_Idle)),
            (deallocate, "threading", with_thread(_Idle)),
            (heartbeat, "time", clock),
            (heartbeat, "wait_for_silence", lambda block, seen, missed: True),
        ]:
            stack.enter_context(patch.object(owner, name, value))
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
    with determined(seed):
        made = world(seed, trace=trace, storm=storm)
        made.weather.resent_ghosts |= resent_ghosts
        try:
            _life(made, steps)
        except BaseException as error:
            error.add_note("\n".join(["", *made.log[-40:]])) if hasattr(error, "add_note") else None
            raise
        finally:
            made.end()
        return made


def _life(made: World, steps: int) -> None:
    chance = made.chance
    numbers = itertools.count(1)
    for _ in range(chance.choice((1, 2))):
        made.spawn(f"reader {next(numbers)}", lambda actor: reader(actor, 60))
    last: Actor | None = None
    sessions = chance.choice((1, 2, 3, 4))
    while made.steps < steps:
        writers = made.alive("writer")
        busy = any(actor.asleep_until <= made.steps for actor in writers)
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
    count = made.chance.choice((3, 8, 20, 60))
    main = made.spawn(f"writer {number}", lambda actor: writer(actor, job, count))
    for index in range(made.chance.choice((0, 0, 1, 2))):
        made.spawn(f"rank {index} of writer {number}", lambda actor: rank(actor, job, main))


def final(made: World) -> None:
    """Everybody has ended; what was acknowledged is there."""
    if made.after_cut is None:
        raise Violation("nobody looks")
    made.cut()


__all__ = ["determined", "run"]
