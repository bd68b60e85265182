"""One wait for a batch, taken apart: reads, preparation on CPUs, a lack of CPUs, and what nobody can tell.

Loaders of headrace say how long they waited for reads. Of any other one this is known, without asking it:

- what the thread that waited computed itself (its CPU time), and how long it could have run and did not (the kernel's
  run queue delay): preparation, and a lack of CPUs;
- what the loader's helpers, its threads and processes, did meanwhile: as much of the rest is preparation as the busiest
  of them was on a CPU, and as much a lack of CPUs as that one waited for one;
- what is left is "blocked", if the thread slept at all: nothing of the loader was at work here. Storage, the network or
  a lock; nobody has said which.

A loader of one's own can say so: `with watch.fetch():` and `with watch.preparation():` in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

#: Seconds on a CPU, and seconds of waiting for one.
Used = tuple[float, float]


class Waited(NamedTuple):
    """What a loader has counted since it was made."""

    #: Waited for reads; waited for batches in all.
    fetch_s: float
    wait_s: float
    #: Handed out.
    bytes: int


@runtime_checkable
class Tells(Protocol):
    """A loader that says for what it waited: those of headrace, or one's own."""

    @property
    def waited(self) -> tuple[float, float, int]:
        """As `Waited`."""


def teller_of(batches: Any) -> Tells | None:
    """The loader behind what is iterated over (`Epochs(loader)`), where it tells."""
    for each in _inwards(batches):
        if isinstance(each, Tells):
            return each
    return None


def _inwards(batches: Any) -> Iterator[Any]:
    for _ in range(4):
        yield batches
        batches = getattr(batches, "loader", None)
        if batches is None:
            return


@dataclass(frozen=True)
class HelperShares:
    """What the busiest of a loader's helpers did while a step waited, as shares of that time: the one whose batch is
    waited for is at work, or is blocked; others may be done with theirs."""

    on_cpu: float = 0.0
    waiting_for_cpu: float = 0.0

    @classmethod
    def of(cls, before: Mapping[str, Used], after: Mapping[str, Used], wall_s: float) -> HelperShares:
        """`before`, `after`: seconds on a CPU and waiting for one, by helper."""
        did = [(now[0] - before[name][0], now[1] - before[name][1]) for name, now in after.items() if name in before]
        on_cpu, waiting = max(did, key=sum, default=(0.0, 0.0))
        # The kernel counts to a tick.
        whole = max(wall_s, on_cpu + waiting, 1e-9)
        return cls(on_cpu / whole, waiting / whole)


def split(
    wall_s: float,
    *,
    own_cpu_s: float,
    own_queue_s: float,
    told: tuple[float, float, int] | None,
    shares: HelperShares | None,
    slept: bool = True,
) -> dict[str, float]:
    """By cause; together `wall_s`. `own_cpu_s`, `own_queue_s`: of the thread that waited. `told`: what a loader that
    tells counted in this wait. `shares`: of its helpers, where it has some. `slept`: the thread let go
    of its CPU to wait for something; else what is left is time in which the machine ran something else."""
    if not own_queue_s and told is None and shares is None and slept:
        # Once a step of most loops.
        work = min(wall_s, own_cpu_s)
        return {"preparation": work, "blocked": wall_s - work} if work > 0 else {"blocked": wall_s}
    starved = min(wall_s, own_queue_s)
    own = min(wall_s - starved, own_cpu_s)
    rest = max(0.0, wall_s - starved - own)
    fetch = blocked = 0.0
    work = own
    if told is not None:
        fetch = min(rest, max(0.0, told[0]))
        waits = rest - fetch
        busy = shares.on_cpu + shares.waiting_for_cpu if shares is not None else 0.0
        for_cpu = waits * shares.waiting_for_cpu / busy if shares is not None and busy > 0 else 0.0
        starved, work = starved + for_cpu, work + waits - for_cpu
    elif not slept:
        starved += rest
    elif shares is None:
        blocked = rest
    else:
        work, starved = work + rest * shares.on_cpu, starved + rest * shares.waiting_for_cpu
        blocked = max(0.0, rest * (1 - shares.on_cpu - shares.waiting_for_cpu))
    found = {"fetch": fetch, "preparation": work, "starved": starved, "blocked": blocked}
    return {cause: seconds for cause, seconds in found.items() if seconds > 0}
