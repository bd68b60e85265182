"""The most accelerators that a place can feed, on one node or on many: trials, the search, and what is said of it.

Where a trial fails, the same accelerators run once with loaders that read nothing. Where they fail, too, it is this
machine that cannot emulate so many, and not storage that cannot feed them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from headrace.bench import figures
from headrace.bench.accelerators.bracket import Found, search
from headrace.bench.accelerators.emulator import FEWEST_STEPS, Loader, Trial, emulate, longest_s
from headrace.bench.accelerators.samples import Samples, WholeFiles, samples_of
from headrace.bench.accelerators.workloads import Workload
from headrace.bench.cache import DIRECT, DROPPED
from headrace.bench.meeting import SLACK_S, Meeting
from headrace.bench.patterns.options import MOST_UNDER_WAY, Options
from headrace.bench.places.protocol import Pending, Place, Ranges, Reader, Tell
from headrace.bench.sustained import rate
from headrace.errors import HeadraceError, MeetingFailed, UsageError
from headrace.units import MIB

#: More are more threads than a process runs evenly: two an accelerator.
MOST_ACCELERATORS = 512
#: Ranges are cut into requests of this length, so that a sample of 146 MB is read by several at once, too.
_REQUEST_BYTES = 1 * MIB
#: A loader has its `depth` requests under way as so many pieces, and asks for the next when one has come.
_PIECES = 2


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """What came of it. `host`: the trial without reads, of as many accelerators as failed; None where none did."""

    path: str
    workload: Workload
    found: Found
    trials: tuple[Trial, ...]
    host: Trial | None
    cache: str
    notes: tuple[str, ...]
    ranks: int = 1

    @property
    def host_limits(self) -> bool:
        return self.host is not None and self.host.au < self.found.threshold

    @property
    def where(self) -> str:
        return self.path if self.ranks == 1 else f"{self.path}, by {self.ranks} ranks"

    @property
    def best(self) -> Trial | None:
        """The last trial of as many as passed."""
        return next((one for one in reversed(self.trials) if one.accelerators == self.found.largest), None)

    @property
    def sentence(self) -> str:
        text = f"{self.workload.name}: {self.found.sentence}"
        if self.best is not None:
            text += f", read at {rate(self.best.rate)}"
        if self.host_limits and self.host is not None:
            text += (
                f". It is not storage that ends it: without any reads AU of {self.host.accelerators} is "
                f"{self.host.au:.1%} on this machine; take more processes or nodes"
            )
        return text


class PlaceLoader:
    """Reads batches of samples from a place, the pieces of the next ones under way while one is waited for."""

    def __init__(self, reader: Reader, samples: Samples | WholeFiles, depth: int) -> None:
        self._reader = reader
        self._pieces = self._endless(samples, max(1, depth // _PIECES))
        # A file is a piece, and as many again wait for the reader's threads: a long one holds up no other.
        self._most = 2 * depth if isinstance(samples, WholeFiles) else _PIECES
        self._under_way: deque[tuple[Pending, bool]] = deque()
        self._stopped = False

    def batch(self) -> int:
        moved = 0
        while True:
            while len(self._under_way) < self._most:
                ranges, last = next(self._pieces)
                self._under_way.append((self._reader.start(ranges), last))
            pending, last = self._under_way.popleft()
            pending.wait()
            moved += pending.bytes
            if last or self._stopped:
                return moved

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        """What is under way ends before its buffers and connections do."""
        for pending, _ in self._under_way:
            with suppress(HeadraceError):
                pending.wait()
        self._reader.close()

    @staticmethod
    def _endless(samples: Samples | WholeFiles, most_ranges: int) -> Iterator[tuple[Ranges, bool]]:
        while True:
            before: Ranges | None = None
            for piece in samples.next(most_ranges, _REQUEST_BYTES):
                if before is not None:
                    yield before, False
                before = piece
            assert before is not None, "a batch has a byte or more"
            yield before, True


class _Nothing:
    """A loader that reads nothing: what is left is what this machine takes for itself."""

    def batch(self) -> int:
        return 0

    def stop(self) -> None:
        return

    def close(self) -> None:
        return


def run(
    place: Place,
    workload: Workload,
    *,
    most: int,
    seconds: float,
    budget_s: float,
    start: int = 1,
    only: bool = False,
    depth: int = 8,
    cache: str = DROPPED,
    seed: int = 0,
    data_bytes: int,
    whole: bool = False,
    meeting: Meeting | None = None,
    tell: Tell = lambda fraction, text: None,
) -> Emulation:
    """Search for the most accelerators, at most `most`, with trials of `seconds`, for about `budget_s` seconds.

    `only`: no search, one trial of `start` accelerators. `data_bytes`: what is prepared and read. With a `meeting` the
    accelerators are spread over its ranks; each has its own place, and all have the same answer. `whole`: of a place
    that was opened so; a sample is a file, or files of one name, and as long as those there are in the mean.
    """
    if not 1 <= start <= most <= MOST_ACCELERATORS * (meeting.seat.world if meeting else 1):
        raise UsageError("accelerators", expected=f"{start} to {MOST_ACCELERATORS} a process", found=str(most))
    Options(depth=depth, cache=cache, seconds=seconds)
    here = -(-most // (meeting.seat.world if meeting else 1))
    if here * depth > MOST_UNDER_WAY:
        raise UsageError(
            "requests under way", expected=f"at most {MOST_UNDER_WAY} a process", found=f"{here} loaders with {depth}",
            next_step="give a smaller --depth or --most",
        )  # fmt: skip
    place.prepare(data_bytes, tell=tell)
    lengths = [item.length_bytes for item in place.items]
    if whole:
        workload = of_whole_files(workload, place)
    notes: list[str] = []
    held = len(samples_of(place.items)) if whole else sum(lengths) // workload.sample_bytes
    room = _fewest(held, meeting, budget_s)
    if start <= room < most:
        # Accelerator by accelerator it would be found out only when many trials had been done.
        most = room
        notes.append(f"the data hold {room} samples: no more accelerators were tried; prepare more (--size)")
    trials: list[Trial] = []
    states: list[str] = []
    again = [0.0]
    rank, world = (meeting.seat.rank, meeting.seat.world) if meeting else (0, 1)
    begun_s = time.monotonic()
    up = [False]

    def loader_of(index: int, count: int) -> Loader:
        samples: Samples | WholeFiles
        if whole:
            samples = WholeFiles(
                place.items, batch=workload.batch, seed=seed + len(trials), accelerator=index, accelerators=count,
            )  # fmt: skip
        else:
            samples = Samples(
                lengths, batch=workload.batch, sample_bytes=workload.sample_bytes, seed=seed + len(trials),
                samples_per_file=workload.samples_per_file, accelerator=index, accelerators=count,
            )  # fmt: skip
        again[0] = max(again[0], seconds / workload.compute_s / max(1, samples.before_again))
        return PlaceLoader(place.reader(depth=depth, cache=cache), samples, depth)

    def measure(count: int, *, reads: bool = True) -> Trial:
        """`count` accelerators in all, every `world`th of them on this rank."""
        tell(
            min(1.0, (time.monotonic() - begun_s) / budget_s),
            f"{workload.name}: {count} accelerators" + ("" if reads else ", without reads"),
        )
        mine = range(rank, count, world)
        if reads:
            states.append(place.forget(cache))
        asked = {"accelerators": count, "reads": reads, "seconds": seconds, "depth": depth, "cache": cache}
        _start_together(meeting, {**asked, "workload": figures.to_json(workload)}, budget_s)
        own = None
        if mine:
            take: Callable[[int], Loader] = (lambda i: loader_of(mine[i], count)) if reads else (lambda i: _Nothing())
            own = emulate(workload, take, len(mine), seconds=seconds)
        trial = own if meeting is None and own is not None else _merged(meeting, own, workload, seconds)
        up[0] = _time_is_up(meeting, begun_s, budget_s)
        return trial

    def tried(count: int) -> Trial:
        trials.append(measure(count))
        return trials[-1]

    found = search(
        tried, threshold=workload.au, start=start, most=start if only else most, time_is_up=lambda: up[0] or only,
    )  # fmt: skip
    if only:
        found = replace(found, only=True)
    host = None
    if found.fails_at is not None:
        host = measure(found.fails_at, reads=False)
    return Emulation(
        path=place.name, workload=workload, found=found, trials=tuple(trials), host=host, ranks=world,
        cache=states[-1] if states else "", notes=(*notes, *_notes(again[0], cache, trials, meeting, whole=whole)),
    )  # fmt: skip


def of_whole_files(workload: Workload, place: Place) -> Workload:
    """The workload with samples as long as the files of `place` are in the mean. UsageError: there are none."""
    count = len(samples_of(place.items))
    if not count:
        raise UsageError("no files to be read are there", where=place.name)
    mean = round(sum(item.length_bytes for item in place.items) / count)
    return replace(workload, sample_bytes=mean, name=f"{workload.name}, files of {mean:,} bytes")


#: "reads alone": AU of the lowest accelerator, were waits for its reads all that it loses. Far above AU, this machine
#: loses the rest.
COLUMNS = ("accelerators", "AU", "reads alone", "rate", "steps", "")


def rows(found: Emulation) -> list[list[str]]:
    """A trial each."""
    enough = found.found.threshold
    of = [(one, "reads") for one in found.trials] + ([(found.host, "without reads")] if found.host else [])
    return [
        [
            str(one.accelerators), f"{one.au:.1%}", f"{min(one.each):.1%}", rate(one.rate) if one.rate else "",
            str(one.steps), ("enough" if one.au >= enough else "too little") if how == "reads" else how,
        ]
        for one, how in of
    ]  # fmt: skip


def to_json(found: Emulation) -> dict[str, Any]:
    """All of it, with the sentence."""
    return {
        "sentence": found.sentence, "path": found.path, "ranks": found.ranks, "accelerators": found.found.largest,
        "fails_at": found.found.fails_at, "complete": found.found.complete, "threshold": found.found.threshold,
        "host_limits": found.host_limits, "cache": found.cache, "notes": list(found.notes),
        "workload": figures.to_json(found.workload), "trials": [_without_workload(one) for one in found.trials],
        "without_reads": None if found.host is None else _without_workload(found.host),
    }  # fmt: skip


def _without_workload(trial: Trial) -> dict[str, Any]:
    said: dict[str, Any] = figures.to_json(trial)
    return {name: value for name, value in said.items() if name != "workload"}


def planned(workload: Workload, seconds: float, most: int) -> float:
    """About how long a search takes, in seconds: what is said before it begins."""
    trials = 2 * max(1, most).bit_length() + 2
    return trials * max(seconds, FEWEST_STEPS * workload.compute_s)


def _fewest(samples: int, meeting: Meeting | None, budget_s: float) -> int:
    """Samples of the rank that has the fewest. Ranks wait here for those that still write what is read."""
    if meeting is None:
        return samples

    def answer(values: list[Any]) -> int:
        for rank, value in enumerate(values):
            if not isinstance(value, int):
                raise MeetingFailed(f"{meeting.names([rank])} did not say how many samples it has")
        return int(min(values))

    return int(meeting.gather(samples, answer, within_s=budget_s + SLACK_S))


def _start_together(meeting: Meeting | None, asked: Any, budget_s: float) -> None:
    if meeting is not None:
        begin_s = meeting.start(asked, within_s=budget_s + SLACK_S)
        time.sleep(max(0.0, begin_s - time.monotonic()))


def _time_is_up(meeting: Meeting | None, begun_s: float, budget_s: float) -> bool:
    """Rank 0 says it for all: ranks that disagree would try different numbers."""
    passed = time.monotonic() - begun_s >= budget_s
    if meeting is None:
        return passed
    return bool(meeting.gather(None, lambda _: passed, within_s=SLACK_S))


def _merged(meeting: Meeting | None, own: Trial | None, workload: Workload, seconds: float) -> Trial:
    """One trial of what all ranks had: AU is the mean of all accelerators, rates add."""
    assert meeting is not None
    mine = None if own is None else {
        "au": own.au, "each": list(own.each), "steps": own.steps, "seconds": own.seconds, "bytes": own.bytes,
        "cut": own.cut,
    }  # fmt: skip

    def answer(values: list[Any]) -> Any:
        found = [_checked(value, rank, meeting) for rank, value in enumerate(values) if value is not None]
        count = sum(len(one["each"]) for one in found)
        return {
            "au": sum(one["au"] * len(one["each"]) for one in found) / count,
            "each": [au for one in found for au in one["each"]],
            "steps": min(one["steps"] for one in found),
            "seconds": max(one["seconds"] for one in found),
            "bytes": sum(one["bytes"] for one in found),
            "rate": sum(one["bytes"] / one["seconds"] for one in found),
            "cut": any(one["cut"] for one in found),
        }

    all_of = meeting.gather(mine, answer, within_s=longest_s(workload, seconds) + SLACK_S)
    each = tuple(float(au) for au in all_of["each"])
    return Trial(
        accelerators=len(each), au=float(all_of["au"]), each=each, steps=int(all_of["steps"]),
        seconds=float(all_of["seconds"]), bytes=int(all_of["bytes"]), rate=float(all_of["rate"]),
        workload=workload, cut=bool(all_of["cut"]),
    )  # fmt: skip


def _checked(value: Any, rank: int, meeting: Meeting) -> dict[str, Any]:
    """What a rank says it found, if that can be."""
    numbers = ("au", "steps", "seconds", "bytes")
    good = isinstance(value, dict) and all(
        isinstance(value.get(name), int | float) and math.isfinite(value[name]) for name in numbers
    )
    good = good and isinstance(value.get("each"), list) and 0 < len(value["each"]) <= MOST_ACCELERATORS
    good = good and all(isinstance(au, int | float) and 0 <= au <= 1 for au in [*value["each"], value["au"]])
    if not good or not value["seconds"] > 0 or value["bytes"] < 0:
        raise MeetingFailed(f"{meeting.names([rank])} sent no result of a trial")
    return dict(value)


def _notes(again: float, cache: str, trials: list[Trial], meeting: Meeting | None, *, whole: bool) -> Iterator[str]:
    if again > 1 and cache != DIRECT:
        yield (
            f"a trial reads what there is about {again:.1f} times over: caches of this machine may answer; prepare more"
        )
    if any(one.cut for one in trials):
        yield f"a trial was given up before {FEWEST_STEPS} steps were done: its AU is of all of its time"
    if meeting is not None:
        yield "accelerators wait for each other after each step on their own node, not across nodes"
    sizes = "each file is opened, read and closed" if whole else "every sample has its mean size"
    yield f"{sizes}; batches are read, not kept: no copy to an accelerator is in it, as in MLPerf"
