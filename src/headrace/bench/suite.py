"""Which rounds are run, what they cost at most, and in which order: said before anything is moved.

Rounds are interleaved: each piece of work once, then each once more, so that what drifts on the way drifts for all.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from headrace.bench.cache import DROPPED
from headrace.bench.figures import Outcome, together
from headrace.bench.layouts import layout, scale_for, total_bytes
from headrace.bench.meeting import SLACK_S, Meeting
from headrace.bench.merge import round_of
from headrace.bench.patterns import checkpoint, ingest, latency, load, mixed, random, sequential
from headrace.bench.patterns.options import Options
from headrace.bench.places.protocol import Place, Tell
from headrace.bench.ranks import Ranks
from headrace.errors import DeviceTimeout, UsageError
from headrace.units import GIB, MIB, format_bytes, format_seconds

READING = ("sequential", "random", "latency", "load")
PATTERNS = ("ingest", "sequential", "random", "latency", "load", "checkpoint", "mixed")
_RUN = {
    "ingest": ingest.run, "sequential": sequential.run, "random": random.run, "latency": latency.run, "load": load.run,
}  # fmt: skip
_WITH_RANKS: dict[str, Callable[[Place, Options, Tell, Ranks], Outcome]] = {
    "checkpoint": checkpoint.run, "mixed": mixed.run,
}  # fmt: skip
#: Bytes that a round of reading moves at most: reads are paid for in places.
READ_MOST = 64 * GIB
MOST_ROUNDS = 100
#: Between the seeds of two ranks: more than rounds ever are.
_APART = 1 << 32
#: What starting, writing what is read, and storage that is slower than thought may take beside the rounds.
_SPARE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """`patterns` empty: all that the place can do. `flows`: each of these; `samples`: sizes of random samples."""

    patterns: Sequence[str] = ()
    flows: Sequence[int] = (1, 2, 4, 8)
    samples: Sequence[int] = (random.REQUEST,)
    #: What is read: written before, or taken from what is there. Also what one round of ingest writes at most.
    size_bytes: int = 1 * GIB
    #: What all ranks together save; None: as `size_bytes`.
    save_bytes: int | None = None
    seconds: float = 2.0
    rounds: int = 3
    depth: int = 8
    cache: str = DROPPED
    model: str = "8b"
    ranks: int = 4
    #: In place of `save_bytes`: the share of the layout's sizes.
    scale: float | None = None
    seed: int = 0
    #: All of it, seconds; None: twice what the rounds are to take, and two minutes.
    limit_s: float | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.patterns if name not in PATTERNS]
        if unknown:
            raise UsageError("no such pattern", expected=", ".join(PATTERNS), found=repr(unknown[0])[:60])
        if not self.flows or len(self.flows) > 32 or not self.samples or len(self.samples) > 32:
            raise UsageError("flows and sample sizes", expected="1 to 32 of each")
        if not 1 <= self.rounds <= MOST_ROUNDS:
            raise UsageError("rounds", expected=f"1 to {MOST_ROUNDS}", found=str(self.rounds))
        if not MIB <= self.size_bytes <= 1 << 60:
            raise UsageError("size", expected="1 MiB to 1 EiB", found=format_bytes(self.size_bytes))
        if self.save_bytes is not None and not MIB <= self.save_bytes <= 1 << 60:
            raise UsageError("save", expected="1 MiB to 1 EiB", found=format_bytes(self.save_bytes))
        if self.limit_s is not None and not (1 <= self.limit_s < math.inf):
            raise UsageError("limit", expected="a number of seconds from 1 on", found=str(self.limit_s))
        # What each round would check is checked before the first.
        for flows in self.flows:
            self.options(flows=flows)
        for sample in self.samples:
            self.options(request_bytes=sample)

    def options(self, **other: Any) -> Options:
        base = Options(
            depth=self.depth, seconds=self.seconds, cache=self.cache, seed=self.seed, model=self.model,
            ranks=self.ranks, budget_bytes=READ_MOST,
        )  # fmt: skip
        return replace(base, **other)

    @property
    def save_scale(self) -> float:
        if self.scale is not None:
            return self.scale
        return scale_for(self.model, self.ranks, self.save_bytes or self.size_bytes)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A pattern, and how it is run in each round."""

    pattern: str
    options: Options


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What all rounds together cost at most."""

    works: Sequence[Work]
    rounds: int
    write_bytes: int
    read_bytes: int
    seconds: float
    limit_s: float
    lines: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Result:
    """All of it. `stopped`: in words, where the time was up before the last round. `hosts`: names of the nodes."""

    path: str
    kind: str
    hosts: Sequence[str]
    facts: dict[str, str]
    started_s: float
    seconds: float
    budget: Sequence[str]
    outcomes: Sequence[Outcome]
    stopped: str = ""


def works_of(place: Place, suite: SuiteOptions) -> list[Work]:
    """What is run on this place. UsageError where a pattern was asked for that it cannot do."""
    wanted = suite.patterns or [name for name in PATTERNS if name in READING or place.why_read_only is None]
    flows = sorted(set(suite.flows))
    ends = sorted({flows[0], flows[-1]})
    works: list[Work] = []
    for name in dict.fromkeys(wanted):
        if name == "random":
            works += [
                Work(pattern=name, options=suite.options(flows=count, request_bytes=sample))
                for sample in dict.fromkeys(suite.samples)
                for count in flows
            ]
        elif name == "sequential":
            works += [Work(pattern=name, options=suite.options(flows=count)) for count in flows]
        elif name == "latency":
            works += [Work(pattern=name, options=suite.options(flows=count)) for count in ends]
        elif name == "load":
            works.append(Work(pattern=name, options=suite.options(flows=flows[-1], budget_bytes=suite.size_bytes)))
        elif name == "ingest":
            works += [
                Work(pattern=name, options=suite.options(flows=count, budget_bytes=suite.size_bytes)) for count in ends
            ]
        else:
            works.append(Work(pattern=name, options=suite.options(flows=flows[-1], scale=suite.save_scale)))
    return works


def budget_of(place: Place, suite: SuiteOptions, ranks: int = 1) -> Budget:
    """What it will cost at most, and what the place says of it; `ranks` do the same at once. UsageError where it cannot
    be: nothing was done yet."""
    works = works_of(place, suite)
    reads = any(work.pattern != "ingest" and work.pattern != "checkpoint" for work in works)
    saved = 0
    if any(work.pattern in ("checkpoint", "mixed") for work in works):
        saved = total_bytes(layout(suite.model, suite.ranks, suite.save_scale))
    ingested = {work: math.prod(ingest.files_of(work.options)) for work in works if work.pattern == "ingest"}
    room = max([saved, *ingested.values()])
    lines = list(place.plan(suite.size_bytes if reads else 0, room))
    written = suite.size_bytes if reads and place.makes else 0
    read, seconds = 0, 0.0
    once = suite.size_bytes if place.keeps and suite.cache == DROPPED else READ_MOST
    for work in works:
        seconds += suite.seconds * (3 if work.pattern == "mixed" else 1)
        if work.pattern == "ingest":
            written += suite.rounds * ingested[work]
        elif work.pattern in ("checkpoint", "mixed"):
            written += suite.rounds * saved
            read += suite.rounds * (saved if work.pattern == "checkpoint" else 3 * once)
        else:
            read += suite.rounds * min(once, work.options.budget_bytes)
    seconds *= suite.rounds
    limit_s = suite.limit_s if suite.limit_s is not None else 2 * seconds + _SPARE_S
    reads_text = "reads" if once != READ_MOST else "reads what comes in that time,"
    lines.append(
        f"{len(works)} pieces of work in {suite.rounds} rounds: about {format_seconds(seconds)}, at most "
        f"{format_seconds(limit_s)}; writes at most {format_bytes(written)}, {reads_text} at most {format_bytes(read)}"
    )
    if ranks > 1:
        lines.append(
            f"so does each of {ranks} ranks: all of them write at most {format_bytes(ranks * written)}, and read at "
            f"most {format_bytes(ranks * read)}"
        )
    return Budget(
        works=works, rounds=suite.rounds, write_bytes=written, read_bytes=read, seconds=seconds, limit_s=limit_s,
        lines=lines,
    )  # fmt: skip


def run_suite(place: Place, suite: SuiteOptions, budget: Budget, tell: Tell, meeting: Meeting | None = None) -> Result:
    """All rounds. Ctrl-C ends it wherever it is; the place removes what was written. With a `meeting` all its ranks
    run each round at once, and each has what came of all of them."""
    started_s, begun = time.time(), time.monotonic()
    end = begun + budget.limit_s
    works = budget.works
    found: dict[int, list[Outcome]] = {index: [] for index in range(len(works))}
    total = len(works) * budget.rounds
    stopped = ""
    if any(work.pattern not in ("ingest", "checkpoint") for work in works):

        def preparing(fraction: float, text: str) -> None:
            if time.monotonic() >= end:
                raise DeviceTimeout(
                    "the time of the run is up before what is read was written", where=place.name, found=text,
                    next_step="give less of it (--size), or more time (--limit)",
                )  # fmt: skip
            tell(0.0, text)

        place.prepare(suite.size_bytes, tell=preparing)
    ranks = Ranks(suite.ranks) if any(work.pattern in _WITH_RANKS for work in works) else None
    try:
        if ranks is not None:
            ranks.deadline = end
        for step in range(total):
            if _time_is_up(time.monotonic() >= end, meeting, budget):
                stopped = f"stopped after {format_seconds(time.monotonic() - begun)}, {step} of {total} rounds: "
                stopped += "the path is slower than the time that was given (--limit)"
                break
            index = step % len(works)
            work = works[index]
            # Other samples in each round: what a server or a drive kept of the last one is not what is asked for.
            options = replace(work.options, seed=suite.seed * MOST_ROUNDS + step // len(works))

            def show(fraction: float, text: str, step: int = step, load: bool = work.pattern == "load") -> None:
                # A load has no seconds of its own: all others end soon after them.
                if load and time.monotonic() >= end:
                    raise DeviceTimeout("the time of the run is up in the middle of a load", where=place.name)
                tell((step + fraction) / total, f"{step + 1} of {total}, {text}")

            def once(pattern: str = work.pattern, options: Options = options, show: Tell = show) -> Outcome:
                if meeting is not None:
                    # Nor what another rank reads.
                    options = replace(options, seed=options.seed + _APART * meeting.seat.rank)
                if pattern in _WITH_RANKS:
                    assert ranks is not None
                    return _WITH_RANKS[pattern](place, options, show, ranks)
                return _RUN[pattern](place, options, show)

            outcome: Outcome | None = None
            if meeting is None:
                try:
                    outcome = once()
                except DeviceTimeout:
                    # In the middle of a save or a load: what came before it is worth to be told.
                    if time.monotonic() < end or not any(found.values()):
                        raise
            else:
                # The first one waits for the ranks that still write what is read.
                asked = {"round": step, "pattern": work.pattern, "options": asdict(options)}
                outcome = round_of(meeting, once, what=asked, within_s=budget.limit_s + SLACK_S, end_s=end)
            if outcome is None:
                stopped = f"stopped in the middle of round {step + 1} of {total}: the time was up (--limit)"
                break
            found[index].append(outcome)
    finally:
        if ranks is not None:
            ranks.close()
    if not any(found.values()):
        raise DeviceTimeout(
            "the time was up before the first round", where=place.name,
            next_step="give more time (--limit), or less to write and read (--size)",
        )  # fmt: skip
    return Result(
        path=place.name, kind=place.kind, hosts=sorted(set(meeting.hosts)) if meeting else [socket.gethostname()],
        facts=dict(place.describe()), started_s=started_s, seconds=time.monotonic() - begun, budget=budget.lines,
        outcomes=[together(rounds) for rounds in found.values() if rounds], stopped=stopped,
    )  # fmt: skip


def _time_is_up(here: bool, meeting: Meeting | None, budget: Budget) -> bool:
    """Rank 0 says it for all: one that stopped alone would be waited for."""
    if meeting is None:
        return here
    return bool(meeting.gather(None, lambda _: here, within_s=budget.limit_s + SLACK_S))
