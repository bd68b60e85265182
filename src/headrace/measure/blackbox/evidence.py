"""What there is to explain a step with: dumps, files of watches and of Flight Recorders, one record a rank.

Steps are put together by their numbers, not by clocks: "in the same step" needs none. Where times of several ranks
stand beside each other, clocks are brought together by the ends of steps that had a collective, which end for all at
once; else by the begins of steps, where ranks go in step; else by the nodes' own clocks (`Clocks`).
"""

from __future__ import annotations

import heapq
import statistics as stats
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.measure.blackbox.dump import Dump, DumpUnreadable, read_dump
from headrace.measure.blackbox.flight_recorder import MOST_RANKS, FlightRecord, read_flight_recorder
from headrace.measure.watch.ahead import TOGETHER, TOGETHER_CUDA, hidden_in, shortened
from headrace.measure.watch.causes import compute_marked, rest_computes
from headrace.measure.watch.record import LINE_BYTES, WatchHeader, WatchStep, parse_line
from headrace.measure.watch.watch import FLUSH_S

#: A watch takes steps apart once a second.
_ROUGH_NS = round(FLUSH_S * 1e9)
#: Nodes' clocks differ by less; and on one node those since it was booted differ by less from those of the day.
_CLOCKS_APART_NS, _SAME_CLOCK_NS = 60 * 10**9, 10**9
#: Steps of a watch's file that are kept: the last ones, and the longest; besides those that are asked for.
KEPT_LAST, KEPT_LONGEST = 4096, 64
#: Of all ranks together, half a kilobyte each; of one rank at least as many as of the longest.
KEPT_OF_ALL = 1 << 19


@dataclass(frozen=True, kw_only=True)
class StepOfRank:
    """A step of one rank. Times: nanoseconds of the rank's own clock, that of its events."""

    step: int
    started_ns: int
    #: Of the one that was under way when it was dumped: that moment.
    ended_ns: int
    #: By cause, seconds; they add up to the step.
    spent: Mapping[str, float]
    under_way: bool = False
    #: Of the one under way: what it was at, and since when.
    cause: str | None = None
    cause_since_ns: int | None = None
    #: Its causes had not been taken apart yet: time in which the thread lacked a CPU is in whatever it did.
    rough: bool = False
    #: Counters beside it, where they were taken then.
    window: Mapping[str, Any] | None = None

    @property
    def wall_s(self) -> float:
        return (self.ended_ns - self.started_ns) * 1e-9

    def __getitem__(self, cause: str) -> float:
        return self.spent.get(cause, 0.0)


@dataclass(kw_only=True)
class RankRecord:
    """All that is known of one rank."""

    rank: int
    world: int
    host: str
    #: None: there is only the file of its watch, which knows of no single command.
    dump: Dump | None = None
    steps: dict[int, StepOfRank] = field(default_factory=dict)
    #: As it was in the dump; and, unless its watch has written its end, that one again.
    at_dump: StepOfRank | None = None
    under_way: StepOfRank | None = None
    #: To the system's clock of the node.
    to_realtime_ns: int = 0
    #: Of its watch (`WatchHeader`); empty: a dump does not say it.
    clock: str = ""

    @property
    def why(self) -> str:
        return "" if self.dump is None else self.dump.why

    def at(self, step: int) -> StepOfRank | None:
        if self.under_way is not None and self.under_way.step == step:
            return self.under_way
        return self.steps.get(step)

    def others(self, step: int) -> list[StepOfRank]:
        """Finished steps besides this one, the first of all left out where there are enough: it pays for what is made
        once."""
        found = [row for number, row in sorted(self.steps.items()) if number != step]
        return found[1:] if len(found) > 3 else found

    def usual_s(self, step: int, cause: str | None = None) -> float | None:
        """The median of the other steps: of a cause, or of all; None: there are none."""
        others = self.others(step)
        if not others:
            return None
        return stats.median(row.wall_s if cause is None else row[cause] for row in others)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    ranks: dict[int, RankRecord]
    world: int
    flights: tuple[FlightRecord, ...] = ()
    #: What lay beside the others, and why it was left out: what cannot be read, and old dumps.
    unread: tuple[str, ...] = ()
    #: False: no step says what computes, and what is in no other part is taken for it.
    compute_marked: bool = True

    @property
    def missing(self) -> list[int]:
        """Ranks of the job of which there is nothing."""
        return [rank for rank in range(self.world) if rank not in self.ranks]

    def at(self, step: int) -> dict[int, StepOfRank]:
        found = {rank: record.at(step) for rank, record in sorted(self.ranks.items())}
        return {rank: row for rank, row in found.items() if row is not None}


# ---- reading -------------------------------------------------------------------------------------------------------


def gather(paths: Sequence[Path], flights: Sequence[Path] = (), step: int | None = None) -> Evidence:
    """`paths`: dumps, files of watches, or folders of them. Of one rank the last dump counts, and the file of its watch
    adds what a dump does not have. `flights`: dumps of Flight Recorders, or folders of them; where there are none,
    those that a `BlackBox` and PyTorch have put into the folders of the others. `step`: one that is asked for, however
    long ago it was. `UsageError` or `DumpUnreadable` for what is none of them; damaged ones in a folder are left out,
    and told."""
    paths_of_dumps, files = _sorted(paths)
    dumps: dict[int, Dump] = {}
    unread: list[str] = []
    for path in paths_of_dumps:
        try:
            dump = read_dump(path)
        except DumpUnreadable as error:
            # One of many that a node has left when it went down; but not where it was asked for, or is all there is.
            if path in paths or (len(paths_of_dumps) == 1 and not files):
                raise
            unread.append(str(error))
            continue
        before = dumps.get(dump.rank)
        if before is None or before.dumped.realtime_ns <= dump.dumped.realtime_ns:
            dumps[dump.rank] = dump
    old = _of_earlier_starts(dumps)
    records = {rank: of_dump(dump) for rank, dump in dumps.items() if rank not in old}
    starts = {record.rank: (record.host, record.dump.pid) for record in records.values() if record.dump is not None}
    asked = {record.at_dump.step for record in records.values() if record.at_dump is not None} | {step}
    for path in files:
        found = of_watch(path, starts, asked, max(KEPT_LONGEST, min(KEPT_LAST, KEPT_OF_ALL // len(files))))
        if found is not None:
            record = records.setdefault(found.rank, found)
            if record is not found:
                _add(record, found)
    if not records:
        raise UsageError(
            "there is nothing to explain", where=", ".join(map(str, paths)), expected="at least one rank",
            found="; ".join(unread)[:300] or None,
        )  # fmt: skip
    unread += [f"the dump of rank {rank}: it is of an earlier start of the job" for rank in old]
    if flights:
        return together(list(records.values()), [read_flight_recorder(path) for path in _flights(flights)], unread)
    beside, damaged = _flights_beside(paths)
    return together(list(records.values()), beside, unread + damaged)


def _of_earlier_starts(dumps: Mapping[int, Dump]) -> list[int]:
    """Ranks whose dumps were written before the box that wrote the newest one was made: numbers of steps begin again
    with a start, so these would be other steps."""
    if not dumps:
        return []
    newest = max(dumps.values(), key=lambda dump: dump.dumped.realtime_ns)
    since = newest.started.realtime_ns - _CLOCKS_APART_NS
    return sorted(rank for rank, dump in dumps.items() if dump.dumped.realtime_ns < since)


def _flights_beside(paths: Sequence[Path]) -> tuple[list[FlightRecord], list[str]]:
    found: dict[int, FlightRecord] = {}
    unread = []
    for folder in dict.fromkeys(path for path in paths if path.is_dir()):
        for path in sorted(folder.glob("flight-recorder-*")):
            try:
                record = read_flight_recorder(path)
                found[record.rank] = record
            except UsageError as error:
                unread.append(str(error))
    return list(found.values()), unread


def together(
    records: Sequence[RankRecord], flights: Sequence[FlightRecord] = (), unread: Sequence[str] = ()
) -> Evidence:
    """Ranks that a larger job had before are left out: the newest one says how many there are. Where none of the others
    says what computes, their steps are changed to what that means."""
    newest = max(records, key=lambda record: _last_moment(record))
    world = max(newest.world, 1)
    if world > MOST_RANKS:
        raise UsageError("a job of too many ranks", expected=f"at most {MOST_RANKS}", found=str(world))
    ranks = {record.rank: record for record in records if record.rank < world}
    marked = compute_marked(row.spent for record in ranks.values() for row in _rows(record))
    if not marked:
        for record in ranks.values():
            record.steps = {number: _unmarked(row) for number, row in record.steps.items()}
            record.at_dump = record.at_dump and _unmarked(record.at_dump)
            record.under_way = record.under_way and record.at_dump
    _leave_out_what_is_ahead(ranks)
    return Evidence(
        ranks=ranks, world=world, compute_marked=marked,
        flights=tuple(sorted((each for each in flights if each.rank < world), key=lambda each: each.rank)),
        unread=tuple(unread),
    )  # fmt: skip


def _leave_out_what_is_ahead(ranks: dict[int, RankRecord]) -> None:
    """A rank that waited in its next step for one that was still in this one: that wait is none of the next step's
    (`headrace.measure.watch.ahead`). Where clocks are not known to go together, nothing is changed."""
    by_clock = {rank: clock for rank, clock in clocks(ranks).items() if clock.error_s is not None}
    known = {rank: clock.shift_ns for rank, clock in by_clock.items()}
    within_s = 2 * max(clock.error_s or 0.0 for clock in by_clock.values())
    # A host may be ahead of its device.
    share = TOGETHER if all(ranks[rank].clock == "host" for rank in known) else TOGETHER_CUDA
    numbers = sorted({number for rank in known for number in ranks[rank].steps})
    for number in numbers[1:]:
        rows = {rank: row for rank in known if (row := ranks[rank].at(number)) is not None}
        if len(rows) < 2:
            continue
        begun = max(row.started_ns + known[rank] for rank, row in rows.items())
        shortest = min(row.wall_s for row in rows.values())
        hidden = hidden_in(row.spent for row in rows.values())
        if any(row.ended_ns + known[rank] < begun for rank, row in rows.items() if not row.under_way):
            # Nobody ends a step before all have begun it: a clock was set.
            continue
        for rank, row in rows.items():
            ahead_ns = begun - known[rank] - row.started_ns
            if ahead_ns * 1e-9 > max(share * shortest, within_s) and number in ranks[rank].steps:
                ranks[rank].steps[number] = replace(
                    row, started_ns=row.started_ns + ahead_ns, spent=shortened(row.spent, ahead_ns * 1e-9, hidden)
                )


def _rows(record: RankRecord) -> list[StepOfRank]:
    return [*record.steps.values(), *([record.at_dump] if record.at_dump else [])]


def _unmarked(row: StepOfRank) -> StepOfRank:
    return replace(row, spent=rest_computes(row.spent))


def _last_moment(record: RankRecord) -> int:
    return max((row.ended_ns for row in _rows(record)), default=0) + record.to_realtime_ns


def _sorted(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    dumps: list[Path] = []
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            # Those before the last one of a rank (`rank-00003.before-1.blackbox`) are taken where they are named.
            last = sorted(each for each in path.glob("rank-*.blackbox") if each.name.count(".") == 1)
            inside = last, sorted(path.glob("rank-*.jsonl"))
            if not any(inside):
                raise UsageError(
                    "no rank has left anything here", where=str(path),
                    expected="rank-*.blackbox of a BlackBox, or rank-*.jsonl of a Watch",
                )  # fmt: skip
            dumps += inside[0]
            files += inside[1]
        elif path.is_file():
            (files if path.suffix == ".jsonl" else dumps).append(path)
        else:
            raise UsageError("there is no such file", where=str(path))
    return list(dict.fromkeys(dumps)), list(dict.fromkeys(files))


def _flights(paths: Sequence[Path]) -> list[Path]:
    """Of folders all files whose names tell a rank."""
    found: list[Path] = []
    for path in paths:
        inside = [path]
        if path.is_dir():
            inside = [each for each in sorted(path.iterdir()) if each.name[-1:].isdigit()]
        if not inside:
            raise UsageError(
                "no Flight Recorder dump is here", where=str(path), expected="files whose names end with the rank"
            )
        found += inside
    return list(dict.fromkeys(found))


def of_dump(dump: Dump) -> RankRecord:
    record = RankRecord(
        rank=dump.rank, world=dump.world, host=dump.host, dump=dump,
        to_realtime_ns=dump.dumped.realtime_ns - dump.dumped.monotonic_ns,
    )  # fmt: skip
    for step in dump.steps:
        assert step.ended_ns is not None
        record.steps[step.step] = StepOfRank(
            step=step.step,
            started_ns=step.started_ns,
            ended_ns=max(step.started_ns, step.ended_ns),
            spent=step.spent,
            rough=step.ended_ns > dump.dumped.monotonic_ns - _ROUGH_NS,
        )
    if dump.under_way is not None:
        open_one = dump.under_way
        record.at_dump = record.under_way = StepOfRank(
            step=open_one.step, started_ns=open_one.started_ns,
            ended_ns=max(open_one.started_ns, dump.dumped.monotonic_ns), spent=_so_far(dump), under_way=True,
            rough=True, cause=open_one.cause, cause_since_ns=open_one.cause_since_ns,
        )  # fmt: skip
    return record


def _so_far(dump: Dump) -> dict[str, float]:
    """Of the step under way, what it is at counted until the dump."""
    step = dump.under_way
    assert step is not None
    spent = {cause: seconds for cause, seconds in step.spent.items() if seconds > 0}
    missing = (dump.dumped.monotonic_ns - step.started_ns) * 1e-9 - sum(spent.values())
    if missing > 0:
        cause = step.cause or "other"
        spent[cause] = spent.get(cause, 0.0) + missing
    return spent


def of_watch(
    path: Path, starts: Mapping[int, tuple[str, int]], asked: Container[int | None], kept: int
) -> RankRecord | None:
    """Of its last start that has done a step. None: there is none. `starts`: by rank, the host and process of its dump:
    of such a rank that start. `asked`: steps that are kept in any case; `kept`: so many of the last ones."""
    header: WatchHeader | None = None
    newest: WatchHeader | None = None
    last: deque[WatchStep] = deque(maxlen=kept)
    longest: list[tuple[float, int, int, WatchStep]] = []
    wanted: dict[int, WatchStep] = {}
    place = 0
    with path.open("rb") as file:
        while line := file.readline(LINE_BYTES):
            place += len(line)
            try:
                found = parse_line(line.decode("utf-8", errors="replace"), f"{path}, byte {place - len(line)}")
            except UsageError:
                if newest is None and place == len(line) and line.endswith(b"\n"):
                    raise
                # Torn by a kill.
                continue
            if isinstance(found, WatchHeader):
                newest = found
            elif newest is not None and starts.get(newest.rank) in (None, (newest.node, newest.pid)):
                if header is not newest:
                    header = newest
                    last.clear()
                    longest.clear()
                    wanted.clear()
                last.append(found)
                entry = (found.wall_s, -found.step, place, found)
                (heapq.heappush if len(longest) < KEPT_LONGEST else heapq.heappushpop)(longest, entry)
                if found.step in asked:
                    wanted[found.step] = found
    if header is None or not last:
        return None
    record = RankRecord(rank=header.rank, world=header.world, host=header.node, clock=header.clock)
    for row in (*wanted.values(), *(entry[-1] for entry in longest), *last):
        started = round(row.started_s * 1e9)
        record.steps[row.step] = StepOfRank(
            step=row.step, started_ns=started, ended_ns=started + round(row.wall_s * 1e9), spent=row.spent,
            window=row.window,
        )  # fmt: skip
    return record


def _add(record: RankRecord, file: RankRecord) -> None:
    """Of the file: counters beside steps, steps that the dump is too short for, or that ended behind it, and causes:
    those of the second before a dump had not been taken apart yet when it was written, a lack of CPUs above all."""
    record.clock, shift = file.clock, -record.to_realtime_ns
    for number, row in file.steps.items():
        ours = record.steps.get(number)
        started, ended = row.started_ns + shift, row.ended_ns + shift
        if ours is not None:
            started, ended = ours.started_ns, ours.ended_ns
        elif record.at_dump is not None and number == record.at_dump.step:
            record.under_way = None
            started, ended = record.at_dump.started_ns, record.at_dump.started_ns + row.ended_ns - row.started_ns
        record.steps[number] = replace(row, started_ns=started, ended_ns=ended)


# ---- clocks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Clock:
    """How a rank's clock goes beside that of the first rank."""

    #: To be added to its times.
    shift_ns: int
    #: Half of what the alignment leaves open, seconds; None: it rests on the nodes' clocks, which nobody has compared.
    error_s: float | None
    #: "the clock of the same host", "ends of steps", "begins of steps" or "the nodes' clocks".
    by: str


def clocks(ranks: Mapping[int, RankRecord]) -> dict[int, Clock]:
    """Of each rank, beside the one with the least number."""
    first = ranks[min(ranks)]
    found = {first.rank: Clock(shift_ns=0, error_s=0.0, by="the clock of the same host")}
    for record in ranks.values():
        if record is not first:
            found[record.rank] = _beside(first, record)
    return found


#: Steps that had a collective, so many at least, tell how clocks are apart.
_ENOUGH = 3


def _beside(first: RankRecord, other: RankRecord) -> Clock:
    both_dumped = first.dump is not None and other.dump is not None
    by_clock = other.to_realtime_ns - first.to_realtime_ns
    if (
        other.host == first.host
        and abs(by_clock) < _SAME_CLOCK_NS
        and (both_dumped or (first.dump is None and other.dump is None))
    ):
        return Clock(shift_ns=0, error_s=0.0, by="the clock of the same host")
    common = [(first.steps[number], row) for number, row in other.steps.items() if number in first.steps]
    timed = [(ours, theirs) for ours, theirs in common if ours["collective"] > 0 and theirs["collective"] > 0]
    if len(timed) >= _ENOUGH:
        # A step may go on for a moment behind its collective, on each rank for as long as it does.
        return _middle([ours.ended_ns - theirs.ended_ns for ours, theirs in timed], "ends of steps")
    if len(common) >= _ENOUGH:
        # Ranks that wait for each other in a part that is not timed go in step, too; others do not begin together.
        begun = _middle([ours.started_ns - theirs.started_ns for ours, theirs in common], "begins of steps")
        if begun.error_s is not None and begun.error_s < TOGETHER * stats.median(ours.wall_s for ours, _ in common):
            return begun
    return Clock(shift_ns=by_clock, error_s=None, by="the nodes' clocks")


def _middle(apart: Sequence[int], by: str) -> Clock:
    middle = stats.median(apart)
    return Clock(shift_ns=round(middle), error_s=stats.median(abs(each - middle) for each in apart) * 1e-9, by=by)
