"""What the paths of a rank did during one step: how long commands took, against the same path before, and the others.

A command is slow where it took, or has taken by now, much longer than commands of its kind usually do: on its own path
before the step, or on the quickest other path, whichever is less. So both a path that became slow and one that always
was are seen. One of more bytes than any before may take as many times longer. Two measures say what that meant for the
step, as seconds of it: those in which anything of a kind was under way, and those in which something slow was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.device.events import NO_PATH, EventKind, Events
from headrace.measure.blackbox.dump import Dump, DumpedPath

#: A command is slow from so many times what nineteen of twenty take, and so much more than it.
SLOW_TIMES, SLOW_S = 3.0, 0.001
#: So many commands tell what is usual.
ENOUGH = 16

READS = (EventKind.READ, EventKind.RECALLED, EventKind.WAITING_READ)
WRITES = (EventKind.WRITE, EventKind.FLUSH, EventKind.OTHER, EventKind.WAITING_WRITE)
_WORDS = {
    EventKind.READ: "read", EventKind.WAITING_READ: "read", EventKind.WRITE: "write", EventKind.WAITING_WRITE: "write",
    EventKind.FLUSH: "flush",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Hung:
    """A command that was under way when it was dumped."""

    kind: str
    offset: int
    bytes: int
    age_s: float
    #: It waits to be sent: no path has it.
    waits: bool


@dataclass(frozen=True, kw_only=True)
class PathView:
    """One path during one step of one rank, of one kind of commands."""

    rank: int
    device: str
    path: str
    target: str
    commands: int
    bytes: int
    #: Of those that were answered, or for how long they had not been, seconds.
    p50_s: float
    p99_s: float
    max_s: float
    #: Before the step, on the same path; None: too few to tell.
    before_p99_s: float | None
    #: From what on a command is called slow; None: nothing to compare with.
    slow_from_s: float | None
    slow: int
    #: Of the step: something was under way here; something slow was.
    busy_s: float
    slow_s: float
    errors: int
    losses: int
    #: The oldest of those without an answer.
    hung: Hung | None
    #: As it was when it was dumped.
    usable: bool
    why: str

    @property
    def is_slow(self) -> bool:
        return self.slow > 0


@dataclass(frozen=True, kw_only=True)
class IoView:
    """All paths of a rank during a step, of one kind of commands, those that cost it most first."""

    paths: tuple[PathView, ...]
    #: Over all paths: of the step.
    busy_s: float
    slow_s: float
    #: In the step; and in a step of the same length before it.
    bytes: int
    before_bytes_per_s: float
    #: The rings reach back to the begin of the step.
    complete: bool
    #: Why devices have no events; empty where all have.
    why_not: tuple[str, ...]

    @property
    def worst(self) -> PathView | None:
        """The path that held the step up most, if any was slow."""
        found = max(self.paths, key=lambda path: (path.slow_s, path.p99_s), default=None)
        return found if found is not None and found.is_slow else None


def look(dump: Dump, start_ns: int, end_ns: int, kinds: Iterable[EventKind]) -> IoView:
    """`start_ns`, `end_ns`: of the step, CLOCK_MONOTONIC."""
    now = dump.dumped.monotonic_ns
    events = dump.events
    ended = np.where(events["ended_ns"] == 0, now, events["ended_ns"])
    of_kind = np.isin(events["kind"], [*kinds])
    inside = of_kind & (ended > start_ns) & (events["started_ns"] < end_ns)
    before = of_kind & (ended <= start_ns) & (events["status"] == 0)
    usual = _usual(dump, ended, inside, before)
    by_size = _by_size(events, ended, before)
    slow = _slow(events, by_size, inside, usual)
    seen = [_path(dump, key, ended, inside, slow, start_ns, end_ns, usual) for key in _keys(events, inside)]
    spans = _spans(events["started_ns"][inside], ended[inside], start_ns, end_ns)
    slow_spans = _spans(events["started_ns"][slow], ended[slow], start_ns, end_ns)
    first = int(events["started_ns"][before].min()) if before.any() else start_ns
    moved = int(events["bytes"][before].sum())
    # What waited for its turn, and not for long, is no path.
    seen = [path for path in seen if path.path or path.is_slow]
    return IoView(
        paths=tuple(sorted(seen, key=lambda path: (-path.slow_s, -path.p99_s))),
        busy_s=spans, slow_s=slow_spans, bytes=int(events["bytes"][inside].sum()),
        before_bytes_per_s=moved / ((start_ns - first) * 1e-9) if start_ns > first else 0.0,
        complete=_complete(dump, start_ns),
        why_not=tuple(device.why_not for device in dump.devices if device.why_not),
    )  # fmt: skip


def open_commands(dump: Dump) -> tuple[int, str, Hung] | None:
    """Commands without an answer when it was dumped: how many, the path of the oldest, and that one. None: there is
    none."""
    commands = np.isin(dump.events["kind"], [kind for kind in EventKind if kind.command])
    found = np.flatnonzero(commands & (dump.events["ended_ns"] == 0))
    oldest = _hung(dump, dump.events, found)
    if oldest is None:
        return None
    event = dump.events[found[int(np.argmin(dump.events["started_ns"][found]))]]
    paths = dump.devices[int(event["device"])].paths
    return len(found), paths[int(event["path"])].name if int(event["path"]) < len(paths) else "", oldest


def _complete(dump: Dump, start_ns: int) -> bool:
    for number, device in enumerate(dump.devices):
        if device.why_not and not device.recorded:
            return False
        if device.lost:
            of_device = dump.events["ended_ns"][(dump.events["device"] == number) & (dump.events["ended_ns"] > 0)]
            if not len(of_device) or int(of_device.min()) > start_ns:
                return False
    return bool(dump.devices)


Key = tuple[int, int]


def _keys(events: Events, where: npt.NDArray[np.bool_]) -> list[Key]:
    found = np.unique(events["device"][where].astype(np.int64) << 16 | events["path"][where])
    return [(int(key) >> 16, int(key) & 0xFFFF) for key in found]


def _usual(
    dump: Dump, ended: npt.NDArray[np.int64], inside: npt.NDArray[np.bool_], before: npt.NDArray[np.bool_]
) -> dict[Key, tuple[float | None, float | None]]:
    """By path: p99 before, and from what on a command is slow; seconds."""
    events = dump.events
    scheme = [device.uri.partition(":")[0] for device in dump.devices]
    latency = (ended - events["started_ns"]) * 1e-9
    keys = [key for key in _keys(events, inside | before) if key[1] != NO_PATH]
    own: dict[Key, tuple[float, float] | None] = {}
    quick: dict[Key, float | None] = {}
    for key in keys:
        on_it = (events["device"] == key[0]) & (events["path"] == key[1])
        past = latency[on_it & before]
        own[key] = (float(np.quantile(past, 0.95)), float(np.quantile(past, 0.99))) if len(past) >= ENOUGH else None
        all_of_it = latency[on_it & (before | (inside & (events["ended_ns"] > 0)))]
        quick[key] = float(np.quantile(all_of_it, 0.95)) if len(all_of_it) >= ENOUGH else None
    found: dict[Key, tuple[float | None, float | None]] = {}
    for key in keys:
        past_p95 = own[key]
        # A medium of the node is no measure for a path over a network.
        others = [
            p95
            for other, p95 in quick.items()
            if other != key and p95 is not None and scheme[other[0]] == scheme[key[0]]
        ]
        base = min([*([past_p95[0]] if past_p95 else []), *others], default=None)
        slow_from = None if base is None else max(SLOW_TIMES * base, base + SLOW_S)
        found[key] = (past_p95[1] if past_p95 else None, slow_from)
    return found


def _by_size(
    events: Events, ended: npt.NDArray[np.int64], before: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:  # fmt: skip
    """How long commands took, seconds; of those of more bytes than any before: for so many bytes."""
    largest = max(1, int(events["bytes"][before].max(initial=0)))
    more = np.maximum(1.0, events["bytes"] / largest)
    # What waits to be sent waits for a path, whatever its size.
    more[(events["path"] == NO_PATH) | (not before.any())] = 1.0
    return np.asarray((ended - events["started_ns"]) * 1e-9 / more)


def _slow(
    events: Events, latency: npt.NDArray[np.float64], inside: npt.NDArray[np.bool_],
    usual: dict[Key, tuple[float | None, float | None]],
) -> npt.NDArray[np.bool_]:  # fmt: skip
    found = np.zeros(len(events), bool)
    for (device, path), (_, slow_from) in usual.items():
        if slow_from is not None:
            found |= inside & (events["device"] == device) & (events["path"] == path) & (latency >= slow_from)
    # Whatever waits for a path, or its turn behind others, for as long as that.
    known = [slow_from for _, slow_from in usual.values() if slow_from is not None]
    waits = inside & (events["path"] == NO_PATH)
    found |= waits & (latency >= (min(known) if known else SLOW_S))
    return found


def _path(
    dump: Dump, key: Key, ended: npt.NDArray[np.int64], inside: npt.NDArray[np.bool_],
    any_slow: npt.NDArray[np.bool_], start_ns: int, end_ns: int, usual: dict[Key, tuple[float | None, float | None]],
) -> PathView:  # fmt: skip
    events = dump.events
    device = dump.devices[key[0]]
    mine = (events["device"] == key[0]) & (events["path"] == key[1])
    here = inside & mine
    slow = any_slow & here
    latency = (ended[here] - events["started_ns"][here]) * 1e-9
    open_ones = np.flatnonzero(here & (events["ended_ns"] == 0))
    before_p99, slow_from = usual.get(key, (None, None))
    lost = mine & (events["kind"] == EventKind.PATH_LOST)
    lost &= (events["started_ns"] >= start_ns) & (events["started_ns"] < end_ns)
    known = device.paths[key[1]] if key[1] < len(device.paths) else None
    return PathView(
        rank=dump.rank, device=device.uri, path=known.name if known else "", target=_target(device.paths, known),
        commands=int(here.sum()), bytes=int(events["bytes"][here].sum()),
        p50_s=float(np.quantile(latency, 0.5)), p99_s=float(np.quantile(latency, 0.99)), max_s=float(latency.max()),
        before_p99_s=before_p99, slow_from_s=slow_from, slow=int(slow.sum()),
        busy_s=_spans(events["started_ns"][here], ended[here], start_ns, end_ns),
        slow_s=_spans(events["started_ns"][slow], ended[slow], start_ns, end_ns),
        errors=int((events["status"][here] != 0).sum()), losses=int(lost.sum()),
        hung=_hung(dump, events, open_ones) if end_ns >= dump.dumped.monotonic_ns else None,
        usable=known.usable if known else False, why=known.why if known else "no path could take it",
    )  # fmt: skip


def _hung(dump: Dump, events: Events, open_ones: npt.NDArray[np.intp]) -> Hung | None:
    if not len(open_ones):
        return None
    oldest = events[open_ones[int(np.argmin(events["started_ns"][open_ones]))]]
    kind = EventKind(int(oldest["kind"]))
    return Hung(
        kind=_WORDS.get(kind, "command"),
        offset=int(oldest["offset"]), bytes=int(oldest["bytes"]),
        age_s=(dump.dumped.monotonic_ns - int(oldest["started_ns"])) * 1e-9, waits=kind.waits,
    )  # fmt: skip


def _target(paths: Sequence[DumpedPath], known: DumpedPath | None) -> str:
    if known is not None:
        return known.target
    targets = {path.target for path in paths}
    return targets.pop() if len(targets) == 1 else ""


def _spans(started: Any, ended: Any, start_ns: int, end_ns: int) -> float:
    """Seconds of the time between `start_ns` and `end_ns` that lie in any of the spans."""
    if not len(started):
        return 0.0
    begin = np.clip(np.asarray(started, np.int64), start_ns, end_ns)
    end = np.clip(np.asarray(ended, np.int64), start_ns, end_ns)
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    # What has been reached by those before.
    reached = np.concatenate(([start_ns], np.maximum.accumulate(end)[:-1]))
    return float(np.clip(end - np.maximum(begin, reached), 0, None).sum()) * 1e-9
