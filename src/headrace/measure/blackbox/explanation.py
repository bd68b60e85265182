"""What an explanation says: the step, the rank, what made it slow, in order of cost; and the words for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.measure import arithmetic
from headrace.measure.blackbox.commands import Hung, IoView, PathView
from headrace.measure.blackbox.evidence import Clock, StepOfRank
from headrace.measure.blackbox.flight_recorder import Lacking, Mismatch
from headrace.units import format_seconds

Storage = Literal["yes", "no", "unknown"]
Scope = Literal["path", "target", "node", "path or target"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that made the step slow."""

    #: As in `watch.causes`, `compute` and `straggler` among them.
    cause: str
    #: More than usual; of a step like the others: all of it.
    seconds: float
    rank: int
    storage: Storage
    #: The path that explains it, where one does; and how far its slowness goes.
    path: PathView | None = None
    scope: Scope | None = None
    #: What that path is held against: other paths of the rank, paths of other ranks to the target.
    beside: tuple[PathView, ...] = ()
    #: "sure", "likely" or "open".
    confidence: str = "sure"
    because: tuple[str, ...] = ()
    against: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Late:
    """A collective of the step that one rank came to after the others."""

    description: str
    sequence: int
    name: str
    rank: int
    seconds: float
    where: str


@dataclass(frozen=True, kw_only=True)
class AtDump:
    """What a dump that was written in the middle of the step shows of its rank."""

    #: Since the step had begun.
    into_s: float
    #: What it was at, and for how long; None: that is not known.
    cause: str
    cause_s: float | None
    #: Frames of the thread that trains, the innermost first.
    where: tuple[str, ...]
    #: Commands without an answer, the path of the oldest, and that one.
    open_commands: int
    path: str
    oldest: Hung | None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    step: int
    #: When it was dumped.
    under_way: bool
    took_s: float
    #: The median of the other steps; None: there is no other.
    usual_s: float | None
    #: Of how many steps it is the slowest.
    of_steps: int
    stands_out: bool
    world: int
    #: The rank that the others waited for, and its node; None: none more than others.
    rank: int
    host: str
    findings: tuple[Finding, ...]
    #: Seconds that it took longer than usual (or lost, where it is like the others), for all ranks.
    lost_s: float
    #: Was slow in the step, and nobody waited for it.
    unwaited: PathView | None
    missing: tuple[int, ...]
    #: Ranks of which only the file of the watch is there.
    without_events: tuple[int, ...]
    #: Ranks whose dump was written before the step began.
    dumped_before: tuple[int, ...]
    #: By rank: what dumps in the middle of the step show.
    at_dump: dict[int, AtDump]
    #: False: nothing says what computes, and what is in no other part is taken for it.
    compute_marked: bool
    unread: tuple[str, ...]
    lacking: tuple[Lacking, ...]
    mismatches: tuple[Mismatch, ...]
    late: Late | None
    clocks: dict[int, Clock]
    #: Why dumps were written, by rank; and in words what was seen.
    why: dict[int, str]
    detail: dict[int, str]
    #: What all ranks did in the step.
    rows: dict[int, StepOfRank]

    @property
    def main(self) -> Finding | None:
        return self.findings[0] if self.findings else None

    @property
    def storage(self) -> Storage:
        """Of what cost most."""
        return self.main.storage if self.main is not None else "no"

    @property
    def gpu_s(self) -> float:
        return arithmetic.gpu_seconds(self.lost_s, self.world)

    @property
    def storage_gpu_s(self) -> float:
        """Of it what is known to be storage's."""
        return arithmetic.gpu_seconds(
            min(self.lost_s, sum(each.seconds for each in self.findings if each.storage == "yes")), self.world
        )

    @property
    def open_questions(self) -> tuple[str, ...]:
        """What speaks against it, and what is not known."""
        return tuple(dict.fromkeys(text for finding in self.findings for text in finding.against))


# ---- words ---------------------------------------------------------------------------------------------------------


def it_text(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 to 6`, `ranks 1, 4 and 2 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = [str(rank) for rank in ranks[:6]]
    if len(ranks) > 6:
        return f"ranks {', '.join(shown)} and {len(ranks) - 6} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def brief_path_text(path: PathView | None) -> str:
    return "" if path is None else f"path {path.path or 'none'}, p99 {format_seconds(path.p99_s)}"


def quick_text(view: IoView) -> str:
    slowest = max(view.paths, key=lambda path: path.p99_s)
    before = "" if slowest.before_p99_s is None else f", before {format_seconds(slowest.before_p99_s)}"
    return f"p99 {format_seconds(slowest.p99_s)}{before}"


def lack_text(each: Lacking) -> str:
    text = f"{each.name} number {each.sequence} of {each.description or each.group}"
    if each.where:
        text += f" ({each.where})"
    who = []
    if each.missing:
        who.append(f"{ranks_text(each.missing)} had not come to it")
    if each.unknown:
        who.append(f"of {ranks_text(each.unknown)} there is no Flight Recorder dump")
    return f"Flight Recorder: {text}: {ranks_text(each.joined)} waited; {'; '.join(who)}"
