"""The ranks put together: what the job's accelerators were lost to.

Ranks go in step: it ends for all when it ends for the slowest, and all pay for what that one did. The slowest is the
one that did most besides waiting for the others: besides its collectives where these were timed apart, else besides
its computing, in which the waiting for others is hidden. What it computed longer than the others is the "straggler".
A step begins for all when it begins for the last one (`ahead`).

A job that never says what computes (`watch.compute()`) is not one that loses all its time to "other": there that is
what computes, with whatever else is not watched.

Files are read once to find where each start of a rank begins, and once more in order of the steps: memory does not grow
with them.
"""

from __future__ import annotations

import heapq
import json
import statistics as stats
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.measure import arithmetic, statistics
from headrace.measure.watch.ahead import TELL, Ahead, hidden_in
from headrace.measure.watch.causes import LOST, STORAGE, compute_marked, rest_computes
from headrace.measure.watch.ranks import STRAGGLES, RankRow
from headrace.measure.watch.record import LINE_BYTES, WatchHeader, WatchStep, parse_line

#: Steps whose figures are kept for quantiles; beyond, every other one is forgotten, again and again.
MOST_KEPT = 200_000
#: Stretches of steps in pictures.
BINS = 60


@dataclass(kw_only=True)
class JobStep:
    """A step of the job. `spent`: by cause, seconds for each rank, `compute` and `straggler` included."""

    step: int
    started_s: float
    wall_s: float
    ranks: int
    slowest: int
    spent: dict[str, float]
    #: Of the batches of the slowest rank, where its loader says.
    bytes: int
    #: Counters of the slowest rank, where they were taken at this step; of the worst steps also where they were later
    #: for a stretch of steps that this one is in.
    window: dict[str, Any] | None

    @property
    def lost_s(self) -> float:
        return sum(seconds for cause, seconds in self.spent.items() if cause != "compute")


def join_step(rows: dict[int, WatchStep]) -> JobStep:
    """`rows`: by rank; at least one."""
    hidden = hidden_in(row.spent for row in rows.values())
    slowest = max(rows, key=lambda rank: (rows[rank].wall_s - rows[rank][hidden], -rank))
    row = rows[slowest]
    wall = max([each.wall_s for each in rows.values()])
    spent = {cause: seconds for cause, seconds in row.spent.items() if seconds > 0}
    spent[hidden] = spent.get(hidden, 0.0) + max(0.0, wall - row.wall_s)
    if hidden == "collective" and len(rows) > 1:
        usual = stats.median(each["compute"] for rank, each in rows.items() if rank != slowest)
        longer = row["compute"] - usual
        if longer > STRAGGLES * usual:
            spent["compute"] -= longer
            spent["straggler"] = longer
    return JobStep(
        step=row.step, started_s=min(each.started_s for each in rows.values()), wall_s=wall, ranks=len(rows),
        slowest=slowest, spent=spent, bytes=row.bytes, window=row.window,
    )  # fmt: skip


class Attribution:
    """What a job's accelerators were lost to. `*_gpu_s`: seconds of all ranks together."""

    def __init__(self, *, worst: int = 5) -> None:
        self.steps = 0
        self.total_gpu_s = 0.0
        self.spent_gpu_s: dict[str, float] = defaultdict(float)
        self.ranks: dict[int, RankRow] = {}
        #: Of the last start, as its ranks say.
        self.world = 0
        self.starts = 0
        #: Steps that were done again after a restart; time from the last step of a start to the first one of the next;
        #: time in no step.
        self.repeated_steps = 0
        #: A start after the first did not say with which step of the job it goes on.
        self.repeats_unknown = False
        self.down_s = self.outside_s = 0.0
        self.bytes = 0
        self.clocks: set[str] = set()
        #: False: no step says what computes, and what is in no other part is taken for it.
        self.compute_marked = True
        self.sm_activity_why_not: set[str] = set()
        self._most_worst = worst
        self._worst: list[tuple[float, int, JobStep]] = []
        self._ahead = Ahead()
        #: The longest step, and what it took.
        self.longest: tuple[float, int] = (0.0, -1)
        self._walls: array[float] = array("d")
        self._every = 1
        self._series: list[_Stretch] = []
        self._bin = 1
        #: The end of the last step, and that of the last one before a start that has come to no step yet.
        self._ended_s: float | None = None
        self._down_from: float | None = None
        self._paths: dict[tuple[str, str], dict[str, Any]] = {}
        #: Of the worst steps, by their slowest rank: those whose counters are still to come.
        self._unseen: dict[int, list[JobStep]] = {}
        #: For those who follow: why there is no step yet that all ranks have written down.
        self.why_none = ""

    # ---- figures ---------------------------------------------------------------------------------------------------

    @property
    def lost_gpu_s(self) -> float:
        return sum(self.spent_gpu_s[cause] for cause in LOST)

    @property
    def lost_share(self) -> float:
        return statistics.share(self.lost_gpu_s, self.total_gpu_s)

    def share(self, cause: str) -> float:
        return statistics.share(self.spent_gpu_s[cause], self.total_gpu_s)

    @property
    def storage_share(self) -> float:
        """Of what is known to be storage: reads, checkpoints, restarts."""
        return sum(self.share(cause) for cause in STORAGE)

    @property
    def worst(self) -> list[JobStep]:
        """Steps that lost most, the worst first."""
        return [step for _, _, step in sorted(self._worst, key=lambda each: (-each[0], -each[1]))]

    @property
    def step_p50_s(self) -> float:
        return statistics.p50(self._walls) if self._walls else 0.0

    @property
    def step_p99_s(self) -> float:
        return statistics.p99(self._walls) if self._walls else 0.0

    @property
    def sm_activity(self) -> float | None:
        """On average over all ranks; None: not measured."""
        busy, over = (sum(row.sm_activity[i] for row in self.ranks.values()) for i in (0, 1))
        return busy / over if over else None

    @property
    def series(self) -> list[tuple[int, int, dict[str, float]]]:
        """(first step, steps, seconds a step by cause), at most `BINS` stretches."""
        return [
            (each.first, each.steps, {cause: seconds / each.steps for cause, seconds in each.spent.items()})
            for each in self._series
        ]

    @property
    def paths(self) -> list[dict[str, Any]]:
        """Of each path of headrace's devices the window with the highest p99, the slowest path first."""
        return sorted(self._paths.values(), key=lambda each: -each["p99_s"])

    @property
    def ended_s(self) -> float | None:
        """When the last step ended, by the clocks of the nodes."""
        return self._down_from if self._ended_s is None else self._ended_s

    @property
    def behind(self) -> tuple[int, int, int] | None:
        """A rank that wrote no more while others did: which, its last step (-1: none), and theirs."""
        last = {row.rank: row.last_step for row in self.ranks.values() if row.last_step is not None}
        rank = min(last, key=lambda rank: last[rank], default=-1)
        furthest = max((self.ranks[each].trained_step for each in last), default=-1)
        return (rank, last[rank], furthest) if last and last[rank] < furthest else None

    @property
    def missing(self) -> int:
        """Ranks of the job of whose last start there is no file."""
        return max(0, self.world - sum(row.last_step is not None for row in self.ranks.values()))

    @property
    def straggler(self) -> RankRow | None:
        """The rank that the others waited for longest while it computed."""
        return max(self.ranks.values(), key=lambda row: row.straggled_s, default=None)

    @property
    def slowest_rank(self) -> RankRow | None:
        """The rank that was the slowest in most steps, where there are several."""
        return max(self.ranks.values(), key=lambda row: row.slowest) if len(self.ranks) > 1 else None

    # ---- adding ----------------------------------------------------------------------------------------------------

    def begin(self, headers: Iterable[WatchHeader], steps: Sequence[dict[int, WatchStep]]) -> None:
        """The ranks start, or start again. `steps`: the first ones that will be added, as many as `TELL` and one."""
        headers = list(headers)
        self._ahead.begin(headers, steps)
        if steps:
            for row in self.ranks.values():
                row.last_step, row.trained_step = None, -1
        for header in headers:
            row = self.ranks.setdefault(header.rank, RankRow(rank=header.rank))
            row.node = header.node
            if steps:
                row.last_step = -1
                self.world = max(header.world, self.world if header is not headers[0] else 0)
            self.clocks.add(header.clock)
            if header.sm_activity:
                self.sm_activity_why_not.add(header.sm_activity)
        # A start that came to no step was a part of being down.
        self._down_from = self._ended_s if self._ended_s is not None else self._down_from
        self._ended_s = None
        # What comes now says nothing of steps before.
        self._unseen.clear()
        self.starts += 1

    def add(self, rows: dict[int, WatchStep], *, repeated: bool = False) -> JobStep:
        """A step of all ranks. `repeated`: it was done again later."""
        step = join_step(self._ahead.without(rows))
        for rank, row in rows.items():
            of_rank = self.ranks.get(rank)
            if of_rank is None:
                of_rank = self.ranks[rank] = RankRow(rank=rank)
            of_rank.add(row, rank == step.slowest)
            self.bytes += row.bytes
            if row.window is not None:
                self._see(rank, row, row.window)
        if self._down_from is not None:
            down, self._down_from = max(0.0, step.started_s - self._down_from), None
            self.down_s += down
            self._pay("restart", arithmetic.gpu_seconds(down, step.ranks))
        if self._ended_s is not None:
            self.outside_s += max(0.0, step.started_s - self._ended_s)
        self._ended_s = step.started_s + step.wall_s
        self.steps += 1
        if repeated:
            self.repeated_steps += 1
            self._pay("restart", arithmetic.gpu_seconds(step.wall_s, step.ranks))
            return step
        for cause, seconds in step.spent.items():
            self._pay(cause, arithmetic.gpu_seconds(seconds, step.ranks))
        self.ranks[step.slowest].straggled_s += step.spent.get("straggler", 0.0)
        self._keep(step)
        return step

    def _see(self, rank: int, row: WatchStep, window: dict[str, Any]) -> None:
        for step in self._unseen.pop(rank, ()):
            step.window = window
        for path in window.get("paths", ()):
            key = (str(path.get("device")), str(path.get("path")))
            if key not in self._paths or self._paths[key]["p99_s"] < path.get("p99_s", 0.0):
                self._paths[key] = {**path, "rank": rank, "step": row.step}

    def _pay(self, cause: str, gpu_s: float) -> None:
        self.spent_gpu_s[cause] += gpu_s
        self.total_gpu_s += gpu_s

    def _keep(self, step: JobStep) -> None:
        if len(self._worst) < self._most_worst or (self._worst and self._worst[0][0] < step.lost_s):
            heapq.heappush(self._worst, (step.lost_s, -self.steps, step))
            if len(self._worst) > self._most_worst:
                heapq.heappop(self._worst)
            if step.window is None:
                kept = [each for each in self._unseen.get(step.slowest, ()) if any(each is w[2] for w in self._worst)]
                self._unseen[step.slowest] = [*kept, step]
        self.longest = max(self.longest, (step.wall_s, step.step))
        if self.steps % self._every == 0:
            self._walls.append(step.wall_s)
            if len(self._walls) > MOST_KEPT:
                self._walls, self._every = self._walls[::2], 2 * self._every
        if not self._series or self._series[-1].steps >= self._bin:
            self._series.append(_Stretch(step.step))
        self._series[-1].add(1, step.spent)
        if len(self._series) > BINS:
            for first, second in zip(self._series[::2], self._series[1::2], strict=False):
                first.add(second.steps, second.spent)
            self._series, self._bin = self._series[::2], 2 * self._bin

    def to_json(self, gpu_hour_price: float | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {
            "steps": self.steps, "ranks": len(self.ranks), "missing_ranks": self.missing, "starts": self.starts,
            "repeated_steps": None if self.repeats_unknown else self.repeated_steps,
            "down_s": self.down_s, "outside_s": self.outside_s, "total_gpu_s": self.total_gpu_s,
            "lost_gpu_s": self.lost_gpu_s, "lost_share": self.lost_share, "storage_share": self.storage_share,
            "lost_to": {
                cause: {"gpu_s": self.spent_gpu_s[cause], "share": self.share(cause)}
                for cause in LOST if self.spent_gpu_s[cause] > 0
            },
            "compute_marked": self.compute_marked,
            "step_p50_s": self.step_p50_s, "step_p99_s": self.step_p99_s, "longest_step_s": self.longest[0],
            "longest_step": self.longest[1], "bytes": self.bytes,
            "sm_activity": self.sm_activity, "sm_activity_why_not": sorted(self.sm_activity_why_not),
            "worst_steps": [
                {"step": step.step, "wall_s": step.wall_s, "slowest_rank": step.slowest, "spent": step.spent,
                 "window": step.window}
                for step in self.worst
            ],
            "paths": self.paths,
            "by_rank": [
                {"rank": row.rank, "node": row.node, "steps": row.steps, "slowest_steps": row.slowest,
                 "straggled_s": row.straggled_s, "last_step": row.last_step,
                 "spent": dict(row.spent), "counters": dict(row.windows)}
                for row in sorted(self.ranks.values(), key=lambda row: row.rank)
            ],
        }  # fmt: skip
        if gpu_hour_price is not None:
            found["lost_money"] = arithmetic.dollars(self.lost_gpu_s, gpu_hour_price)
            for cause, lost in found["lost_to"].items():
                lost["money"] = arithmetic.dollars(self.spent_gpu_s[cause], gpu_hour_price)
        return found


@dataclass
class _Stretch:
    """Of steps from `first` on: how many, seconds of all by cause."""

    first: int
    steps: int = 0
    spent: dict[str, float] = field(default_factory=dict)

    def add(self, steps: int, spent: Mapping[str, float]) -> None:
        self.steps += steps
        for cause, seconds in spent.items():
            self.spent[cause] = self.spent.get(cause, 0.0) + seconds


# ---- files ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Start:
    """A start of a rank: where its lines are."""

    header: WatchHeader
    path: Path
    begin: int
    end: int
    #: None: there is none, or it is not known which one of the job it is.
    first_step: int | None
    counted: bool
    #: One of its steps says what computes.
    marked: bool


def attribute(paths: Sequence[Path], *, worst: int = 5, each: Callable[[JobStep], None] | None = None) -> Attribution:
    """Of the files of all ranks of a job. `each` gets every step that was not done again. `UsageError` for what no
    `Watch` has written; a torn last line is left out."""
    found = Attribution(worst=worst)
    starts = [start for path in paths for start in _starts(path)]
    found.compute_marked = any(start.marked for start in starts)
    read = _steps if found.compute_marked else _unmarked_steps
    groups = _groups(starts)
    for number, group in enumerate(groups):
        later = [start.first_step for group in groups[number + 1 :] for start in group if start.first_step is not None]
        again = min(later, default=None)
        found.repeats_unknown |= number > 0 and any(start.counted for start in group)
        rows = heapq.merge(*map(read, group), key=lambda row: row[1].step)
        steps = (dict(of_step) for _, of_step in groupby(rows, key=lambda row: row[1].step))
        first = list(islice(steps, 1 + TELL))
        found.begin((start.header for start in group), first)
        for of_step in chain(first, steps):
            repeated = again is not None and next(iter(of_step.values())).step >= again
            joined = found.add(of_step, repeated=repeated)
            if each is not None and not repeated:
                each(joined)
    if not found.steps:
        dumped = any(path.with_suffix(".blackbox").exists() for path in paths)
        raise UsageError(
            "no step was recorded", where=", ".join(map(str, paths)), expected="at least one",
            next_step="headrace watch explain reads the dump beside it, which may have steps" if dumped else None,
        )  # fmt: skip
    return found


def _groups(starts: list[_Start]) -> list[list[_Start]]:
    """The first start of each rank, the second, and so on, where all have as many: nodes' clocks may be apart. Else
    starts of different ranks belong together until one of them starts again."""
    by_rank: dict[int, list[_Start]] = defaultdict(list)
    for start in starts:
        by_rank[start.header.rank].append(start)
    each = [sorted(of_rank, key=lambda start: start.header.started_s) for of_rank in by_rank.values()]
    if len({len(of_rank) for of_rank in each}) == 1:
        return [list(group) for group in zip(*each, strict=True)]
    groups: list[list[_Start]] = []
    seen: set[int] = set()
    for start in sorted(starts, key=lambda start: start.header.started_s):
        if not groups or start.header.rank in seen:
            groups.append([])
            seen = set()
        seen.add(start.header.rank)
        groups[-1].append(start)
    return groups


def _starts(path: Path) -> Iterator[_Start]:
    header: WatchHeader | None = None
    begin, place, first = 0, 0, None
    counted = marked = False
    with path.open("rb") as file:
        while line := file.readline(LINE_BYTES):
            place += len(line)
            if line.startswith(b'{"headrace_watch"'):
                if header is not None:
                    yield _Start(
                        header=header, path=path, begin=begin, end=place - len(line), first_step=first,
                        counted=counted, marked=marked,
                    )  # fmt: skip
                header = None
                if not _is_whole(line):
                    # Its writer was killed in it, and had written no step.
                    continue
                found = parse_line(_text(line), f"{path}, byte {place - len(line)}")
                if isinstance(found, WatchHeader):
                    header, begin, first, counted, marked = found, place, None, False, False
            elif header is None and line.strip():
                raise UsageError(
                    "not a file of a watch", where=str(path), expected="what headrace.measure.Watch writes",
                    found=_text(line)[:80],
                )  # fmt: skip
            elif header is not None:
                marked = marked or b'"compute_s"' in line
                if first is None and not counted and _is_whole(line):
                    step = parse_line(_text(line), f"{path}, byte {place - len(line)}")
                    if isinstance(step, WatchStep):
                        first, counted = None if step.counted else step.step, step.counted
    if header is not None:
        yield _Start(
            header=header, path=path, begin=begin, end=place, first_step=first, counted=counted, marked=marked
        )  # fmt: skip


def _is_whole(line: bytes) -> bool:
    """A kill has not torn it."""
    try:
        json.loads(line)
    except RecursionError:
        return True
    except ValueError:
        return False
    return line.endswith(b"\n")


#: Read of a file at a time: it is not kept open, for a job may have more ranks than a process may have files.
_AT_ONCE = 1 << 16


def _lines(start: _Start) -> Iterator[tuple[int, bytes]]:
    """Those of its steps, and where each ends."""
    place = start.begin
    while place < start.end:
        some: list[tuple[int, bytes]] = []
        with start.path.open("rb", buffering=_AT_ONCE) as file:
            first = file.seek(place)
            while place < min(start.end, first + _AT_ONCE) and (line := file.readline(LINE_BYTES)):
                place += len(line)
                some.append((place, line))
        if not some:
            # It was cut meanwhile.
            return
        yield from some


def _steps(start: _Start) -> Iterator[tuple[int, WatchStep]]:
    last, name = None, str(start.path)
    for place, line in _lines(start):
        if not line.strip():
            continue
        where = f"{name}, byte {place - len(line)}"
        try:
            found = parse_line(_text(line), where)
        except UsageError:
            if place >= start.end:
                # Its writer was killed in it.
                return
            raise
        if isinstance(found, WatchStep):
            if last is not None and found.step <= last:
                raise UsageError(
                    "steps are not in order", where=where, expected=f"more than {last}", found=str(found.step)
                )
            last = found.step
            yield start.header.rank, found


def _unmarked_steps(start: _Start) -> Iterator[tuple[int, WatchStep]]:
    for rank, step in _steps(start):
        yield rank, _rest_computes(step)


def _rest_computes(step: WatchStep) -> WatchStep:
    step.spent = rest_computes(step.spent)
    return step


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace")


#: Of the end of each file, for those who follow a job.
TAIL_BYTES = 1 << 18


def recent(paths: Sequence[Path], *, worst: int = 5) -> Attribution:
    """As `attribute`, of the last steps that every rank has written down; whatever the size of the files."""
    found = Attribution(worst=worst)
    ranks: dict[int, dict[int, WatchStep]] = {}
    headers: dict[int, WatchHeader] = {}
    for path in paths:
        tail = _tail(path)
        if tail is None:
            continue
        header, steps = tail
        headers[header.rank] = header
        ranks[header.rank] = steps
    if headers:
        # Files of ranks that a larger job had before are nobody's now.
        world = max(headers.values(), key=lambda header: header.started_s).world
        ranks = {rank: steps for rank, steps in ranks.items() if rank < world}
    numbers = set.intersection(*(set(steps) for steps in ranks.values())) if ranks else set()
    if ranks and not numbers:
        behind = min(ranks, key=lambda rank: max(ranks[rank], default=-1))
        furthest = max(max(steps, default=-1) for steps in ranks.values())
        if furthest >= 0:
            told = f"none beyond {max(ranks[behind])}" if ranks[behind] else "none"
            found.why_none = f"rank {behind} has written {told}, others up to {furthest}"
    found.compute_marked = not numbers or compute_marked(
        step.spent for steps in ranks.values() for step in steps.values()
    )
    if not found.compute_marked:
        ranks = {rank: {at: _rest_computes(step) for at, step in steps.items()} for rank, steps in ranks.items()}
    rows = [{rank: steps[number] for rank, steps in ranks.items()} for number in sorted(numbers)]
    found.begin((headers[rank] for rank in ranks), rows)
    for of_step in rows:
        found.add(of_step)
    return found


def _tail(path: Path) -> tuple[WatchHeader, dict[int, WatchStep]] | None:
    """None: its rank is about to write the first line."""
    with path.open("rb") as file:
        first = file.readline(LINE_BYTES)
        if not first.endswith(b"\n") and len(first) < LINE_BYTES:
            return None
        header = parse_line(_text(first), f"{path}, line 1")
        if not isinstance(header, WatchHeader):
            raise UsageError("not a file of a watch", where=str(path), expected="what headrace.measure.Watch writes")
        begin = max(file.tell(), file.seek(0, 2) - TAIL_BYTES)
        file.seek(begin)
        lines = file.read(TAIL_BYTES).split(b"\n")
    steps: dict[int, WatchStep] = {}
    for line in lines[:-1]:
        try:
            found = parse_line(_text(line), str(path))
        except UsageError:
            # The first one may be a part of one, and what a kill has torn is there, too.
            continue
        if isinstance(found, WatchHeader):
            header, steps = found, {}
        else:
            steps[found.step] = found
    return header, steps
