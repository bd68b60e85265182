"""An explanation as one HTML page: the sentence, and a time line of the step, ranks above, paths below."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import numpy as np

from headrace.device.events import NO_PATH, EventKind, Events
from headrace.measure import charts
from headrace.measure.blackbox import tell
from headrace.measure.blackbox.dump import Dump
from headrace.measure.blackbox.evidence import Evidence, StepOfRank
from headrace.measure.blackbox.explanation import Explanation
from headrace.measure.report import Page, table
from headrace.measure.watch.causes import CAUSES, WAIT
from headrace.measure.watch.page import STYLE
from headrace.measure.watch.verdict import gpu_time, money
from headrace.units import format_bytes, format_seconds

#: Ranks and paths that are drawn: the one that was waited for first; commands of a path: the longest.
MOST_RANKS, MOST_PATHS, MOST_SPANS = 16, 16, 300
_STYLES = {**STYLE, WAIT: STYLE["blocked"]}


def page(found: Explanation, evidence: Evidence, *, gpu_hour_price: float | None = None) -> str:
    made = Page("headrace watch explain", verdict=tell.sentence(found, gpu_hour_price))
    cards = [
        (format_seconds(found.took_s), f"step {found.step}", _usual(found)),
        (gpu_time(found.gpu_s), "lost", f"{found.world} {'rank' if found.world == 1 else 'ranks'}"),
        (_storage(found), "of it to storage", found.main.confidence if found.main else ""),
    ]
    if gpu_hour_price is not None:
        cards.append((money(found.gpu_s, gpu_hour_price), "lost", f"at ${gpu_hour_price:g} an hour"))
    made.cards(cards)
    shown = [cause for cause in (WAIT, *CAUSES) if any(row[cause] > 0 for row in found.rows.values())]
    made.section(
        "The step by rank", charts.legend([(_STYLES[cause], cause) for cause in shown]),
        charts.timeline(list(_ranks(found, shown)), markers=[_end(found)]),
        note="How long each rank did what; within a rank they are put in one order, for only their lengths are known.",
    )  # fmt: skip
    lanes = list(_paths(found, evidence))
    if lanes:
        made.section(
            "Commands by path",
            charts.legend([("compute", "as usual"), ("data_wait", "slow"), ("bad", "no answer yet, or failed")]),
            charts.timeline(lanes, markers=[_end(found)]),
            note="From the begin of the step on. Commands that were sent before it begin at 0.",
        )  # fmt: skip
    columns, rows = tell.findings_table(found, gpu_hour_price)
    made.table("What made it slow", columns, rows or [["nothing", *[""] * (len(columns) - 1)]])
    columns, rows = tell.paths_table(found)
    if rows:
        made.section("Paths", table(columns, rows))
    made.facts("What it rests on", tell.facts(found))
    return made.html()


def _storage(found: Explanation) -> str:
    """What may have been storage is not told as nothing."""
    return gpu_time(found.storage_gpu_s) if found.storage_gpu_s or found.storage != "unknown" else "unknown"


def _usual(found: Explanation) -> str:
    return "no other step is known" if found.usual_s is None else f"others take {format_seconds(found.usual_s)}"


def _end(found: Explanation) -> charts.Marker:
    return charts.Marker(x=found.took_s, text="dumped" if found.under_way else "the step ends", style="idle")


def _first(ranks: Iterable[int], which: int) -> list[int]:
    return sorted(ranks, key=lambda rank: (rank != which, rank))[:MOST_RANKS]


def _ranks(found: Explanation, shown: list[str]) -> Iterable[charts.Lane]:
    for rank in tell.shown_ranks(found, MOST_RANKS):
        row, at = found.rows[rank], 0.0
        spans = []
        for cause in _in_order(row, shown):
            seconds = row[cause]
            spans.append(
                charts.Span(
                    start=at, end=at + seconds, style=_STYLES[cause], label=cause,
                    title=f"rank {rank}: {cause} {format_seconds(seconds)}",
                )
            )  # fmt: skip
            at += seconds
        yield charts.Lane(name=f"rank {rank}", spans=spans)


def _in_order(row: StepOfRank, shown: list[str]) -> list[str]:
    """As a step goes; what one under way is at comes last."""
    now = (row.cause or "other") if row.under_way else None
    if now == "other" and not row["other"]:
        # Nothing is marked as computing: it is taken for that.
        now = "compute"
    return sorted((cause for cause in shown if row[cause] > 0), key=lambda cause: (cause == now, shown.index(cause)))


def _paths(found: Explanation, evidence: Evidence) -> Iterable[charts.Lane]:
    slow_from = {
        (path.rank, path.device, path.path): path.slow_from_s
        for each in found.findings
        for path in (*([each.path] if each.path else []), *each.beside)
    }
    if found.unwaited is not None:
        slow = found.unwaited
        slow_from[slow.rank, slow.device, slow.path] = slow.slow_from_s
    lanes = [
        (dump, rank, about.uri, path.name, device, number)
        for rank in _first(found.rows, found.rank)
        if (dump := evidence.ranks[rank].dump) is not None
        for device, about in enumerate(dump.devices)
        for number, path in enumerate(about.paths)
    ]
    # Those that are told of first.
    lanes.sort(key=lambda lane: lane[1:4] not in slow_from)
    drawn = 0
    for dump, rank, uri, name, device, number in lanes:
        row = found.rows[rank]
        events = _within(dump, device, number, row)
        if len(events):
            drawn += 1
            limit = slow_from.get((rank, uri, name))
            yield charts.Lane(name=_lane(rank, name, len(found.rows)), spans=_spans(dump, events, row, limit))
        if drawn == MOST_PATHS:
            return


def _lane(rank: int, path: str, ranks: int) -> str:
    return f"{rank}: {path[-16:]}" if ranks > 1 else path[-18:]


def _within(dump: Dump, device: int, path: int, row: StepOfRank) -> Events:
    events = dump.events
    ended = np.where(events["ended_ns"] == 0, dump.dumped.monotonic_ns, events["ended_ns"])
    here = (events["device"] == device) & (events["path"] == path) & (events["path"] != NO_PATH)
    here &= (
        np.isin(events["kind"], [kind for kind in EventKind if kind.command])
        & (ended > row.started_ns)
        & (events["started_ns"] < row.ended_ns)
    )
    found = events[here]
    if len(found) > MOST_SPANS:
        longest = np.argsort(-(ended[here] - found["started_ns"]), kind="stable")[:MOST_SPANS]
        found = found[np.sort(longest)]
    return cast(Events, found)


def _spans(dump: Dump, events: Events, row: StepOfRank, slow_from_s: float | None) -> list[charts.Span]:
    found = []
    for event in events:
        started, ended = int(event["started_ns"]), int(event["ended_ns"]) or dump.dumped.monotonic_ns
        took = (ended - started) * 1e-9
        style = "compute" if slow_from_s is None or took < slow_from_s else "data_wait"
        if int(event["ended_ns"]) == 0 or int(event["status"]) != 0:
            style = "bad"
        kind = EventKind(int(event["kind"])).name.lower()
        found.append(
            charts.Span(
                start=max(0, started - row.started_ns) * 1e-9, end=(min(ended, row.ended_ns) - row.started_ns) * 1e-9,
                style=style, title=f"{kind} of {format_bytes(int(event['bytes']))}: {format_seconds(took)}",
            )
        )  # fmt: skip
    # Short ones lie on long ones.
    return sorted(found, key=lambda span: span.start - span.end)
