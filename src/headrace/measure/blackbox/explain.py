"""Why a step was slow: what it waited for, on which rank, by which path to which target, what it cost; or that it was
not storage.

How it is found, each step of it from what was measured:

1. The step: the one that took most more than steps usually do, or one that was under way for longer still.
2. The rank: all end a step with the slowest, which is the one that did most besides its collectives (where these are
   not timed apart: besides its computing).
3. The cause: what that rank did longer than it usually does, in order of seconds. The median of its other steps is what
   is usual.
4. Whether that is storage: the commands of that rank in that step (`commands`). A loader that was blocked is called
   storage only where slow commands cover what it waited; of a wait for reads in which none was under way it is not
   known, nor of time that no part says anything of. I/O that was slow while nobody waited is told, and is no cause.
   A dump in the middle of a step tells of what came before it only, and is held against that.
5. The path or the target: what else was slow in the same step, on this rank and on others.

Nothing is said without dumps of all ranks that these might turn over: then it is said what is missing.
"""

from __future__ import annotations

import statistics as stats
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.errors import UsageError
from headrace.measure.blackbox.commands import READS, WRITES, IoView, PathView, look, open_commands
from headrace.measure.blackbox.dump import DumpedDevice
from headrace.measure.blackbox.evidence import Evidence, RankRecord, StepOfRank, clocks
from headrace.measure.blackbox.explanation import (
    AtDump,
    Explanation,
    Finding,
    Late,
    Scope,
    brief_path_text,
    it_text,
    lack_text,
    quick_text,
    ranks_text,
)
from headrace.measure.blackbox.flight_recorder import Lacking, lacking, mismatches
from headrace.measure.watch.ahead import hidden_in
from headrace.measure.watch.causes import CAUSES, WAIT
from headrace.measure.watch.ranks import STRAGGLES
from headrace.units import format_seconds

#: A step that took less than so many times what is usual is one like the others.
STANDS_OUT = 1.5
#: Causes of less than this share of what was lost are not told; nor more than so many.
TOLD_SHARE, MOST_TOLD = 0.1, 4
#: Slow commands that cover so much of a wait explain it; commands under way for less than that do not.
COVERS, HARDLY = 0.5, 0.2


def explain(evidence: Evidence, step: int | None = None) -> Explanation:
    """`step`: another one than the slowest. `UsageError` where no rank knows of it."""
    number = _slowest(evidence) if step is None else step
    rows = evidence.at(number)
    if not rows:
        raise UsageError("no rank has recorded this step", where=f"step {number}", expected=_known(evidence))
    return _Case(evidence, number, rows).explanation()


def _known(evidence: Evidence) -> str:
    numbers = sorted({number for record in evidence.ranks.values() for number in record.steps})
    return f"one of {numbers[0]} to {numbers[-1]}, of the last start" if numbers else "a step that has ended"


def _slowest(evidence: Evidence) -> int:
    records = list(evidence.ranks.values())
    over: dict[int, float] = {}
    for record in records:
        finished = [row for _, row in sorted(record.steps.items())]
        # The first one pays for what is made once.
        told = finished[1:] if len(finished) > 1 else finished
        usual = stats.median(row.wall_s for row in told) if told else 0.0
        for row in told:
            over[row.step] = max(over.get(row.step, 0.0), row.wall_s - usual)
    open_rows = [record.under_way for record in records if record.under_way is not None]
    if open_rows:
        # Who is furthest behind is who is waited for.
        behind = min(row.step for row in open_rows)
        usual = stats.median([row.wall_s for record in records for row in record.steps.values()] or [0.0])
        age = max(row.wall_s for row in open_rows if row.step == behind)
        asked = any(record.why in ("watchdog", "collective") for record in records)
        if not over or age - usual > max(over.values()) or (asked and age > STANDS_OUT * usual):
            return behind
    if not over:
        dumps = [f"rank {each.rank}, {each.dump.why}: {each.dump.detail}" for each in records if each.dump is not None]
        alone = f"dumps alone ({'; '.join(dumps)[:300]})" if dumps else None
        raise UsageError("no step was recorded", expected="at least one of a Watch", found=alone)
    return max(over, key=lambda number: (over[number], -number))


class _Case:
    """One step, and all that is asked about it."""

    def __init__(self, evidence: Evidence, number: int, rows: dict[int, StepOfRank]) -> None:
        self.evidence, self.number, self.rows = evidence, number, rows
        self.hidden = hidden_in(row.spent for row in rows.values())
        self.rank = max(rows, key=lambda rank: (rows[rank].wall_s - rows[rank][self.hidden], -rank))
        self.row = rows[self.rank]
        self.record: RankRecord = evidence.ranks[self.rank]
        self.took_s = max(row.wall_s for row in rows.values())
        self.usual_s = self.record.usual_s(number)
        self.stands_out = self.usual_s is not None and self.took_s >= STANDS_OUT * self.usual_s
        self.clocks = clocks(evidence.ranks)
        #: Of what is told as a lack of CPUs, that of the thread that takes answers.
        self.io_lacked_s = 0.0
        self._views: dict[tuple[int, bool], IoView | None] = {}
        #: Ranks whose dumps were written in the middle of the step, and before it.
        self.in_it, self.before_it = self._dumped()

    # ---- the whole -----------------------------------------------------------------------------------------------

    def explanation(self) -> Explanation:
        over = self._over()
        lost_s = self.took_s - (self.usual_s or 0.0) if self.stands_out else sum(over.values())
        told = [(cause, seconds) for cause, seconds in over.items() if seconds >= TOLD_SHARE * lost_s and seconds > 0]
        told.sort(key=lambda each: -each[1])
        findings = tuple(self._finding(cause, seconds) for cause, seconds in told[:MOST_TOLD])
        return Explanation(
            step=self.number, under_way=any(row.under_way for row in self.rows.values()), took_s=self.took_s,
            usual_s=self.usual_s, of_steps=len({n for each in self.evidence.ranks.values() for n in each.steps}),
            stands_out=self.stands_out, world=self.evidence.world, rank=self.rank, host=self.record.host,
            findings=findings, lost_s=max(0.0, lost_s), unwaited=self._unwaited(findings),
            missing=tuple(self.evidence.missing),
            without_events=tuple(rank for rank, record in self.evidence.ranks.items() if record.dump is None),
            dumped_before=self.before_it, at_dump=self._at_dump(), compute_marked=self.evidence.compute_marked,
            unread=self.evidence.unread, lacking=self._lacking(),
            mismatches=tuple(mismatches(self.evidence.flights)), late=self._late(), clocks=self.clocks,
            why={rank: record.why for rank, record in self.evidence.ranks.items() if record.why},
            detail={rank: dump.detail for rank, each in self.evidence.ranks.items() if (dump := each.dump) is not None},
            rows=self.rows,
        )  # fmt: skip

    def _dumped(self) -> tuple[dict[int, StepOfRank], tuple[int, ...]]:
        inside, before = {}, []
        for rank, row in self.rows.items():
            record = self.evidence.ranks[rank]
            if record.at_dump is not None and record.at_dump.step == self.number:
                inside[rank] = record.at_dump
            elif record.dump is not None and row.started_ns >= record.dump.dumped.monotonic_ns:
                before.append(rank)
        return inside, tuple(before)

    def _at_dump(self) -> dict[int, AtDump]:
        found = {}
        for rank, row in self.in_it.items():
            dump = self.evidence.ranks[rank].dump
            assert dump is not None
            since = row.cause_since_ns
            threads = [frames for name, frames in dump.threads.items() if name.startswith("MainThread ")]
            count, path, oldest = open_commands(dump) or (0, "", None)
            found[rank] = AtDump(
                into_s=row.wall_s, cause=row.cause or "other",
                cause_s=None if since is None else max(0.0, (row.ended_ns - since) * 1e-9),
                where=_where(threads[0]) if threads else (), open_commands=count, path=path, oldest=oldest,
            )  # fmt: skip
        return found

    def _seen_s(self, rank: int, cause: str, seconds: float) -> float:
        """Of so many seconds of a cause those that a dump in the middle of the step can tell of."""
        row = self.in_it.get(rank)
        if row is None or self.rows[rank].under_way:
            return seconds
        waits = row[WAIT] if cause in ("fetch", "blocked", "preparation") else 0.0
        return min(seconds, row[cause] + waits)

    def _over(self) -> dict[str, float]:
        """By cause, seconds more than usual; of a step like the others all that is no computing."""
        found: dict[str, float] = {}
        # A wait that was under way has not been taken apart.
        waits = ("fetch", "blocked", "preparation")
        if self.row[WAIT] > 0:
            usual = sum(self.record.usual_s(self.number, cause) or 0.0 for cause in waits)
            found[WAIT] = max(0.0, self.row[WAIT] - (usual if self.stands_out else 0.0))
        for cause in CAUSES:
            seconds = self.row[cause]
            if self.stands_out:
                seconds -= self.record.usual_s(self.number, cause) or 0.0
            elif cause == "compute":
                continue
            if seconds > 0:
                found[self._straggles(seconds) if cause == "compute" else cause] = seconds
        self._io_lacked_cpus(found)
        if self.stands_out and self.hidden == "collective":
            # What passed on others after this one's part had ended.
            rest = self.took_s - self.row.wall_s
            if rest > 0:
                found["collective"] = found.get("collective", 0.0) + rest
        return found

    def _io_lacked_cpus(self, found: dict[str, float]) -> None:
        """Where the thread that takes answers lacked a CPU, so much of the wait for them is not storage's.
        How much is told of a second, of which the step is a part."""
        window = self._window() or {}
        lacked = window.get("io_run_queue_s", 0.0) / max(window.get("window_s", 0.0), 1e-9)
        if lacked < HARDLY:
            return
        moved = 0.0
        for cause in ("fetch", "blocked", "checkpoint", "restart"):
            share = min(1.0, lacked) * found.get(cause, 0.0)
            if share > 0:
                found[cause] -= share
                moved += share
        if moved > 0:
            found["starved"] = found.get("starved", 0.0) + moved
            self.io_lacked_s = moved

    def _straggles(self, seconds: float) -> str:
        others = [row["compute"] for rank, row in self.rows.items() if rank != self.rank]
        if self.hidden == "compute" or not others:
            return "compute"
        usual = stats.median(others)
        return "straggler" if self.row["compute"] - usual > max(STRAGGLES * usual, 0.5 * seconds) else "compute"

    # ---- one cause -----------------------------------------------------------------------------------------------

    def _finding(self, cause: str, seconds: float) -> Finding:
        if cause in ("fetch", "restart"):
            return self._reads(cause, seconds)
        if cause in ("blocked", WAIT):
            return self._blocked(cause, seconds)
        if cause == "checkpoint":
            return self._checkpoint(seconds)
        if cause == "collective":
            return self._collective(seconds)
        because, against = self._counters(cause)
        if cause == "other" or (cause == "compute" and not self.evidence.compute_marked):
            return self._nobodys(cause, seconds, because, against)
        return Finding(
            cause=cause, seconds=seconds, rank=self.rank, storage="no", because=because, against=against,
            confidence="likely" if against else "sure",
        )  # fmt: skip

    def _nobodys(self, cause: str, seconds: float, because: tuple[str, ...], against: tuple[str, ...]) -> Finding:
        """Time that nobody has said anything of."""
        view = self._io(self.rank)
        text = "a save, or reads, that nobody marked would be in it"
        if (
            view is not None
            and view.worst is not None
            and view.slow_s >= COVERS * self._seen_s(self.rank, cause, seconds)
        ):
            text += f"; commands were slow meanwhile ({brief_path_text(view.worst)}), and who waited is not known"
        return Finding(cause=cause, seconds=seconds, rank=self.rank, storage="unknown", confidence="open",
                       because=because, against=(*against, text))  # fmt: skip

    def _reads(self, cause: str, seconds: float) -> Finding:
        """A wait for reads, as the loader says, or a state that is loaded."""
        view, seen_s = self._io(self.rank), self._seen_s(self.rank, cause, seconds)
        if view is None or seen_s < HARDLY * seconds:
            return self._from_window(cause, seconds)
        told = cause == "fetch"
        if view.complete and view.busy_s < (COVERS if told else HARDLY) * seen_s:
            busy = format_seconds(view.busy_s)
            return Finding(
                cause=cause, seconds=seconds, rank=self.rank, storage="unknown", confidence="open",
                because=(f"reads of headrace's devices were under way for {busy} of it only",),
                against=("it read elsewhere, which is not seen, or asked late for what it needed",),
            )  # fmt: skip
        return self._storage(cause, seconds, view, told="the loader waited for reads" if told else "")

    def _blocked(self, cause: str, seconds: float) -> Finding:
        """A foreign loader does not say what it waits for, and one that is waited for yet has not: only slow commands
        say that it is storage."""
        view, seen_s = self._io(self.rank), self._seen_s(self.rank, cause, seconds)
        tells = view is not None and seen_s >= HARDLY * seconds
        if tells and view is not None and view.slow_s >= COVERS * seen_s and view.worst is not None:
            return self._storage(cause, seconds, view, told="")
        against = "storage, the network, a lock or work: nobody says what the loader waited for"
        if cause == "blocked":
            against = "storage, the network or a lock: this loader does not say what it waited for"
        because: tuple[str, ...] = ()
        if tells and view is not None and view.paths:
            against += ", nor whether it reads from elsewhere"
            if view.worst is not None:
                slow = f"{brief_path_text(view.worst)}, for {format_seconds(view.slow_s)} of it"
                because = (f"commands of headrace's devices were slow meanwhile ({slow})",)
            elif all(path.slow_from_s is not None for path in view.paths):
                because = (f"headrace's devices answered as they usually do ({quick_text(view)})",)
            else:
                against += "; no commands were recorded before it to compare with"
        return Finding(
            cause=cause, seconds=seconds, rank=self.rank, storage="unknown", confidence="open", because=because,
            against=(against,),
        )  # fmt: skip

    def _checkpoint(self, seconds: float) -> Finding:
        """Any rank's writes may be what all wait for."""
        views = {
            rank: view for rank in self.rows
            if self._seen_s(rank, "checkpoint", seconds) >= HARDLY * seconds
            and (view := self._io(rank, writes=True)) is not None
        }  # fmt: skip
        if not views:
            return Finding(cause="checkpoint", seconds=seconds, rank=self.rank, storage="unknown", confidence="open",
                           against=("there are no I/O events of it: where a save is written is not seen",))  # fmt: skip
        rank = max(views, key=lambda each: (views[each].slow_s, views[each].busy_s))
        view = views[rank]
        if view.busy_s >= COVERS * self._seen_s(rank, "checkpoint", seconds):
            return self._storage("checkpoint", seconds, view, told="training stood still for a save", rank=rank)
        written = any(view.paths or view.before_bytes_per_s for view in views.values())
        if not written:
            return Finding(cause="checkpoint", seconds=seconds, rank=self.rank, storage="unknown", confidence="open",
                           because=("nothing was written by headrace's devices",),
                           against=("where else a save is written is not seen",))  # fmt: skip
        return Finding(
            cause="checkpoint", seconds=seconds, rank=self.rank, storage="no", confidence="likely",
            because=(f"writes were under way for {format_seconds(view.busy_s)} of it: the rest is copying, packing",),
        )  # fmt: skip

    def _collective(self, seconds: float) -> Finding:
        missing = self.evidence.missing
        lack = self._lacking()
        if missing or len(self.rows) < self.evidence.world:
            absent = missing or [rank for rank in self.evidence.ranks if rank not in self.rows]
            last = "".join(
                f"; the last step of rank {rank} that is known is {max(self.evidence.ranks[rank].steps)}"
                for rank in absent[:2] if rank in self.evidence.ranks and self.evidence.ranks[rank].steps
            )  # fmt: skip
            return Finding(
                cause="collective", seconds=seconds, rank=self.rank, storage="unknown", confidence="open",
                because=tuple(lack_text(each) for each in lack[:1]),
                against=(
                    f"{ranks_text(absent)} may be what was waited for: nothing is known of {it_text(absent)} in this "
                    f"step{last}",
                ),
            )  # fmt: skip
        because = [lack_text(each) for each in lack[:1]]
        late = self._late()
        if len(self.rows) > 1 and (late is None or late.seconds < COVERS * seconds):
            latest = min(self.rows, key=lambda rank: self.rows[rank]["collective"])
            least = self.rows[latest]["collective"]
            if least < HARDLY * seconds:
                text = f"rank {latest} was in it for {format_seconds(least)} only: it came late, why is not known"
                return Finding(
                    cause="collective", seconds=seconds, rank=self.rank, storage="unknown", confidence="open",
                    because=tuple(because), against=(text,),
                )  # fmt: skip
            because.append(
                f"every rank was in it for {format_seconds(least)} or longer: no rank came late by all of it"
            )
        return Finding(
            cause="collective", seconds=seconds, rank=self.rank, storage="no",
            confidence="sure" if len(self.rows) > 1 else "likely", because=tuple(because),
        )  # fmt: skip

    # ---- storage -------------------------------------------------------------------------------------------------

    def _storage(self, cause: str, seconds: float, view: IoView, *, told: str, rank: int | None = None) -> Finding:
        rank = self.rank if rank is None else rank
        seen_s = self._seen_s(rank, cause, seconds)
        worst, because, against = view.worst, [told] if told else [], []
        starved = self.row["starved"] - (self.record.usual_s(self.number, "starved") or 0.0)
        if seen_s < seconds:
            against.append(f"what came after the dump, {format_seconds(seconds - seen_s)} of it, is not seen")
        if worst is None or worst.slow_s < HARDLY * seen_s:
            per_s = view.bytes / max(self.in_it.get(rank, self.rows[rank]).wall_s, 1e-9)
            if view.before_bytes_per_s > 0 and per_s > 2 * view.before_bytes_per_s:
                because.append(
                    f"commands were as quick as before, but {per_s / view.before_bytes_per_s:.1f} times as many bytes "
                    "a second were asked for"
                )
            elif any(path.slow_from_s is not None for path in view.paths):
                against.append("no command took much longer than they usually do")
            else:
                against.append("nothing was recorded before it to compare with")
            busiest = max(view.paths, key=lambda path: path.busy_s, default=None)
            return Finding(
                cause=cause, seconds=seconds, rank=rank, storage="yes", path=busiest, confidence="likely",
                because=tuple(because), against=tuple(against),
            )  # fmt: skip
        others = [other for each in self.rows if each != rank and (other := self._io(each, cause == "checkpoint"))]
        scope, beside = _scope(worst, view, others)
        if scope in ("node", "path or target") and starved > HARDLY * seconds:
            against.append(
                "this rank lacked CPUs meanwhile, which also delays the thread that takes answers from all paths"
            )
        if not view.complete:
            against.append("the ring of events does not reach back to the begin of the step, or a device has none")
        if scope == "path or target":
            against.append("no other path to this target was in use: path and target cannot be told apart")
        sure = worst.slow_s >= COVERS * seen_s and cause not in ("blocked", WAIT) and not against
        return Finding(
            cause=cause, seconds=seconds, rank=rank, storage="yes", path=worst, scope=scope, beside=beside,
            confidence="sure" if sure else "likely", because=tuple(because), against=tuple(against),
        )  # fmt: skip

    def _from_window(self, cause: str, seconds: float) -> Finding:
        """Without events: the paths of a stretch of time around the step, as the watch wrote them."""
        window = self._window()
        paths = sorted(window.get("paths", ()), key=lambda each: -each["p99_s"]) if window else []
        views = tuple(_of_window(self.rank, each) for each in paths)
        lacks = "there are no I/O events of this rank: a dump of its black box would tell single commands"
        if self.rank in self.before_it:
            lacks = "there are no I/O events of this step: the dump of this rank is from before it"
        elif self.rank in self.in_it and self._io(self.rank) is not None:
            lacks = "the dump was written before this rank came to it: of what came then there are no I/O events"
        elif self.record.dump is not None and self._io(self.rank) is None:
            lacks = "there are no I/O events of this rank: its dump has none, no device of headrace was open that tells"
        return Finding(
            cause=cause, seconds=seconds, rank=self.rank, storage="yes" if cause == "fetch" else "unknown",
            path=views[0] if views else None, beside=views[1:], confidence="likely" if cause == "fetch" else "open",
            because=("the loader waited for reads",) if cause == "fetch" else (),
            against=(lacks,),
        )  # fmt: skip

    def _io(self, rank: int, writes: bool = False) -> IoView | None:
        """None: there are no events of it, or none of this step."""
        key = rank, writes
        if key not in self._views:
            dump, row = self.evidence.ranks[rank].dump, self.rows.get(rank)
            self._views[key] = None
            if dump is None or row is None or rank in self.before_it:
                return None
            if any(_tells(device) for device in dump.devices):
                self._views[key] = look(dump, row.started_ns, row.ended_ns, WRITES if writes else READS)
        return self._views[key]

    def _unwaited(self, findings: Sequence[Finding]) -> PathView | None:
        if any(each.storage == "yes" for each in findings):
            return None
        views = [view for writes in (False, True) if (view := self._io(self.rank, writes)) is not None]
        slow = [view.worst for view in views if view.worst is not None]
        worst = max(slow, key=lambda path: path.slow_s, default=None)
        seen = self.in_it.get(self.rank, self.row)
        return worst if worst is not None and worst.slow_s >= HARDLY * seen.wall_s else None

    # ---- counters, collectives -----------------------------------------------------------------------------------

    def _window(self) -> Any:
        """Counters that cover the step: taken at it, or at the first after it."""
        if self.row.window is not None:
            return self.row.window
        later = [row for number, row in self.record.steps.items() if number > self.number and row.window is not None]
        first = min(later, key=lambda row: row.step, default=None)
        if first is None or first.window is None:
            return None
        begun_ns = first.ended_ns - first.window.get("window_s", 0.0) * 1e9
        return first.window if begun_ns < self.row.ended_ns else None

    def _counters(self, cause: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        window = self._window() or {}
        because = []
        if cause == "starved" and window.get("throttled_s", 0.0) > 0:
            because.append(f"the CPU limit of the container stopped it for {format_seconds(window['throttled_s'])}")
        if cause == "starved" and self.io_lacked_s > 0:
            because.append(
                f"{format_seconds(self.io_lacked_s)} of it was waiting for reads or writes while the thread that takes "
                "their answers lacked a CPU"
            )
        if cause in ("straggler", "compute") and len(self.rows) > 1:
            others = stats.median(row["compute"] for rank, row in self.rows.items() if rank != self.rank)
            because.append(f"it computed {format_seconds(self.row['compute'])}, the others {format_seconds(others)}")
        if cause in ("preparation", "other") and window.get("major_faults"):
            because.append(f"{window['major_faults']} major faults")
        against: tuple[str, ...] = ()
        if cause == "compute" and self.hidden == "compute" and self.evidence.world > 1:
            against = ("collectives were not timed apart: the wait for another rank would be in it",)
        if cause in ("compute", "straggler", "copy", "other", "preparation") and self.row.rough:
            against = (*against, "it had not been asked yet how long the thread lacked a CPU in this step")
        return tuple(because), against

    def _lacking(self) -> tuple[Lacking, ...]:
        """Of a step that hangs. Dumps are not written at one moment: in a job that goes on, some are a step ahead."""
        if not self.stands_out or not any(row.under_way for row in self.rows.values()):
            return ()
        return tuple(lacking(self.evidence.flights, self.evidence.world))

    def _late(self) -> Late | None:
        """Of the collectives of this step the one to which a rank came last by most."""
        asked: dict[tuple[str, str, int], dict[int, tuple[float, Any]]] = {}
        for record in self.evidence.flights:
            ours, row = self.evidence.ranks.get(record.rank), self.rows.get(record.rank)
            if ours is None or row is None:
                continue
            shift = self.clocks[record.rank].shift_ns - ours.to_realtime_ns
            for each in record.between(row.started_ns + ours.to_realtime_ns, row.ended_ns + ours.to_realtime_ns):
                if not each.is_p2p:
                    key = each.group, each.description, each.sequence
                    asked.setdefault(key, {})[record.rank] = ((each.created_ns + shift) * 1e-9, each)
        best: Late | None = None
        for of_rank in asked.values():
            if len(of_rank) < 2:
                continue
            rank = max(of_rank, key=lambda each: of_rank[each][0])
            seconds = of_rank[rank][0] - min(at for at, _ in of_rank.values())
            if best is None or seconds > best.seconds:
                each = of_rank[rank][1]
                best = Late(description=each.description, sequence=each.sequence, name=each.name, rank=rank,
                            seconds=seconds, where=each.where)  # fmt: skip
        return best if best is not None and best.seconds >= HARDLY * self.took_s else None


def _where(frames: Sequence[str]) -> tuple[str, ...]:
    """The innermost first, without those of the box itself, which is called where a collective fails."""
    found = list(reversed(frames))
    own = [at for at, frame in enumerate(found) if any(name in frame for name in _OWN)]
    return tuple(found[own[-1] + 1 if own else 0 :])


#: In the frames of a thread that dumps.
_OWN = ("/headrace/measure/blackbox/", "/headrace/measure/watch/failures.py")


def _tells(device: DumpedDevice) -> bool:
    return not device.why_not or device.recorded > 0


def _scope(worst: PathView, mine: IoView, others: Iterable[IoView]) -> tuple[Scope, tuple[PathView, ...]]:
    """How far the slowness goes, and what says so."""

    def quick(path: PathView) -> bool:
        # On a busy machine some commands are slow on any path; by far slower than usual, or nearly as slow as the
        # worst, is another matter.
        far = max(10 * (path.slow_from_s or 0.0), 0.1 * worst.p99_s)
        return not path.is_slow or (path.slow_s < COVERS / 2 * worst.slow_s and path.p99_s < far)

    rest = [path for path in mine.paths if path is not worst and path.commands]
    same = [path for path in rest if path.target == worst.target]
    else_where = [path for path in rest if path.target != worst.target]
    of_others = [path for view in others for path in view.paths if path.target == worst.target]
    if any(map(quick, same)):
        return "path", tuple(filter(quick, same))
    if of_others:
        ways = [path for path in of_others if quick(path)]
        if len(ways) < len(of_others):
            return "target", tuple(of_others)
        # Others have no trouble with it: it is the way from here, or all ways where there were several.
        return "node" if rest else "path", tuple(ways)
    if else_where and not any(map(quick, else_where)):
        return "node", tuple(else_where)
    if same:
        return "target", (*same, *else_where)
    return "path or target", tuple(else_where)


def _of_window(rank: int, path: Any) -> PathView:
    return PathView(
        rank=rank, device=path["device"], path=path["path"], target="", commands=int(path["commands"]),
        bytes=int(path["read_bytes"]), p50_s=0.0, p99_s=path["p99_s"], max_s=path["p99_s"], before_p99_s=None,
        slow_from_s=None, slow=int(bool(path.get("slow"))), busy_s=0.0, slow_s=0.0, errors=int(path.get("errors", 0)),
        losses=int(path.get("losses", 0)), hung=None, usable=bool(path.get("usable", True)), why="",
    )  # fmt: skip
