"""An explanation for people: one sentence, then what it rests on, and what it leaves open."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from headrace.measure import arithmetic
from headrace.measure.blackbox.commands import PathView
from headrace.measure.blackbox.explanation import AtDump, Explanation, Finding, lack_text, ranks_text
from headrace.measure.watch.causes import CAUSES
from headrace.measure.watch.tell import MOST_RANKS
from headrace.measure.watch.verdict import gpu_time, money
from headrace.units import format_bytes, format_seconds

Table = tuple[Sequence[str], Sequence[Sequence[str]]]

#: What a rank did, for a time.
_DID = {
    "fetch": "waited {} for reads",
    "blocked": "waited {} for a loader that was blocked",
    "wait": "waited {} for a batch",
    "preparation": "prepared data on the CPU for {}",
    "starved": "waited {} for a CPU",
    "copy": "copied batches to the device for {}",
    "collective": "was in collectives for {}",
    "straggler": "computed {} longer than the others",
    "compute": "computed for {}",
    "checkpoint": "stood still for a save for {}",
    "restart": "loaded its state for {}",
    "other": "spent {} in what nobody marked",
}
#: Dumps in the middle of a step that are told of, and frames of each.
_MOST_DUMPS, _MOST_FRAMES = 3, 2
#: In frames of what is no code of the job.
_OTHERS = ("/headrace/", "/site-packages/", "/lib/python", "<frozen ")
#: Of what the box saw, characters.
_MOST_DETAIL = 160
#: A path is told with what it is held against, so many at most.
_MOST_BESIDE = 2


def sentence(found: Explanation, gpu_hour_price: float | None = None) -> str:
    """What a person wants to know first."""
    main = found.main
    if main is None:
        return f"{_took(found)}; nothing was lost in it that was watched."
    verdicts = {
        "yes": "it was storage",
        "no": "it was not storage",
        "unknown": "whether it was storage is not known",
    }
    verdict = verdicts[main.storage]
    others = found.findings[1:]
    if main.storage != "yes" and any(each.storage == "yes" for each in others):
        verdict = "it was storage only in part"
    if found.stands_out:
        text = f"{_took(found)}, and {verdict}: {_what(found, main)}"
    else:
        text = f"{_took(found)}; of what it lost most, {verdict}: {_what(found, main)}"
    text += f". {'So far it costs' if found.under_way else 'It cost'} {cost(found, gpu_hour_price)}"
    if others:
        text += f"; besides, {', and '.join(_what(found, each, brief=True) for each in others)}"
    return f"{text}."


def cost(found: Explanation, gpu_hour_price: float | None) -> str:
    text = gpu_time(found.gpu_s)
    return text if gpu_hour_price is None else f"{text}, {money(found.gpu_s, gpu_hour_price)}"


def _took(found: Explanation) -> str:
    took = format_seconds(found.took_s)
    usual = None if found.usual_s is None else format_seconds(found.usual_s)
    if found.under_way:
        text = f"Step {found.step} was under way for {took}"
        return text if usual is None else f"{text}, where steps take {usual}"
    if usual is None:
        return f"Step {found.step} took {took}"
    if not found.stands_out:
        return f"Step {found.step} took {took}, about as long as the others ({usual})"
    return f"Step {found.step} took {took} instead of {usual}"


def _what(found: Explanation, finding: Finding, *, brief: bool = False) -> str:
    seconds = format_seconds(finding.seconds)
    if found.stands_out and finding.cause in ("preparation", "compute", "copy", "other"):
        seconds += " more than usual"
    whom = f"rank {finding.rank}" + (f" on {found.host}" if found.host and finding.rank == found.rank else "")
    all_of_them = len(found.rows) == found.world
    if finding.cause == "collective" and len(found.rows) > 1:
        who = "all ranks" if all_of_them else f"{len(found.rows)} of {found.world} ranks"
        text = f"{who} were in collectives for {seconds}"
    else:
        did = _DID["other" if finding.cause == "compute" and not found.compute_marked else finding.cause]
        text = f"{whom if not brief else f'rank {finding.rank}'} {did.format(seconds)}"
    if finding.storage == "yes" and finding.path is not None:
        text += f" {path_text(finding, under_way=found.under_way)}"
    if not brief and found.world > 1 and all_of_them and finding.cause not in ("collective", "checkpoint"):
        text += f"; the other {'rank' if found.world == 2 else f'{found.world - 1} ranks'} waited for it"
    return text


def path_text(finding: Finding, *, under_way: bool = True) -> str:
    """By which way, and how slow it was beside what it is held against."""
    path = finding.path
    assert path is not None
    target = path.target or path.device
    if finding.scope == "target":
        text = f"from target {target}, by all its paths{f' ({path.path} the slowest)' if path.path else ''}"
    elif finding.scope == "node":
        text = f"by all paths of its node (the slowest: {path.path} to {target})"
    else:
        text = f"by path {path.path or 'none'} to {target}"
    if finding.cause == "checkpoint":
        text += f" from rank {path.rank}"
    if path.hung is not None and (path.slow_from_s is None or path.hung.age_s >= path.slow_from_s):
        hung = path.hung
        what = f"a {hung.kind} of {format_bytes(hung.bytes)} at byte {hung.offset}"
        state = "waited for a path" if hung.waits else "had no answer"
        text += f", where {what} {state} for {format_seconds(hung.age_s)}"
        text += "" if under_way else " when it was dumped"
    elif path.p99_s:
        text += f", p99 {format_seconds(path.p99_s)}"
    before = "before" if path.hung is None else "p99 before"
    against = [] if path.before_p99_s is None else [f"{before} {format_seconds(path.before_p99_s)}"]
    if finding.scope in ("path", "node"):
        for other in finding.beside[:_MOST_BESIDE]:
            on = "" if other.rank == path.rank else f" on rank {other.rank}"
            against.append(f"{format_seconds(other.p99_s)} by {other.path}{on}")
    if against:
        text += f" ({'; '.join(against)})"
    if path.losses:
        text += f", lost {path.losses} {'time' if path.losses == 1 else 'times'}"
    elif not path.usable and path.why:
        text += f", not usable: {path.why}"
    return text


# ---- what it rests on ----------------------------------------------------------------------------------------------


def facts(found: Explanation) -> dict[str, str]:
    told: dict[str, str] = {}
    reasons = [reason for each in found.findings for reason in each.because]
    if reasons:
        told["because"] = "; ".join(dict.fromkeys(reasons))
    if found.main is not None:
        told["confidence"] = found.main.confidence
    if found.open_questions:
        told["against it"] = "; ".join(found.open_questions)
    if found.unwaited is not None:
        slow = found.unwaited
        before = "" if slow.before_p99_s is None else f", before {format_seconds(slow.before_p99_s)}"
        told["nobody waited"] = (
            f"path {slow.path} to {slow.target or slow.device} was slow (p99 {format_seconds(slow.p99_s)}{before}), "
            "but the step did not wait for it"
        )
    for each in found.mismatches:
        asked = ", ".join(f"{name} on {ranks_text(ranks)}" for name, ranks in each.names.items())
        told["mismatch"] = (
            f"ranks asked for different collectives, number {each.sequence} of {each.description}: {asked}"
        )
    for each_lacking in found.lacking[:1]:
        told["collective"] = lack_text(each_lacking)
    if found.late is not None and "collective" not in told:
        late = found.late
        where = f" ({late.where})" if late.where else ""
        error = found.clocks[late.rank].error_s
        by = "" if error is None else f" ± {format_seconds(error)}"
        told["collective"] = (
            f"Flight Recorder: rank {late.rank} came to {late.name} number {late.sequence} of {late.description}{where}"
            f" {format_seconds(late.seconds)}{by} after the first"
        )
    if found.missing:
        told["missing"] = (
            f"nothing is known of {ranks_text(found.missing)} of {found.world}: {_one_of(found.missing)} may have been "
            "slower"
        )
    if len(found.rows) > MOST_RANKS:
        told["ranks"] = f"{MOST_RANKS} are shown, those that something was found of first; all of them: --json"
    if not found.compute_marked:
        told["compute"] = "all that is in no watched part is taken for it, for nothing is marked by watch.compute()"
    for rank, each_dump in sorted(found.at_dump.items(), key=lambda each: each[0] != found.rank)[:_MOST_DUMPS]:
        told["at the dump" if rank == found.rank else f"of rank {rank}"] = _at_dump(rank, each_dump)
    no_events = []
    if found.without_events:
        no_events.append(f"of {ranks_text(found.without_events)}: only the file of the watch is there")
    if found.dumped_before:
        no_events.append(f"of {ranks_text(found.dumped_before)}: the dump is from before this step")
    if no_events:
        told["no I/O events"] = "; ".join(no_events)
    if found.unread:
        told["not read"] = "; ".join(found.unread)
    if len(found.clocks) > 1:
        told["clocks"] = _clocks(found)
    if found.at_dump and (why := sorted(set(found.why.values()) - {"request"})):
        told["dumped by"] = ", ".join(why)
        if found.rank in found.why and (detail := found.detail[found.rank]):
            told["dumped by"] = f"{found.why[found.rank]}: {textwrap.shorten(detail, _MOST_DETAIL)}"
    return told


def _at_dump(rank: int, each: AtDump) -> str:
    """What was open when it was dumped."""
    since = "" if each.cause_s is None else f" for {format_seconds(each.cause_s)}"
    at = {"wait": "the wait for a batch", "other": "what nobody marked"}.get(each.cause, each.cause)
    text = f"{format_seconds(each.into_s)} into the step rank {rank} was in {at}{since}"
    if each.oldest is None:
        text += "; no command of headrace's devices was open"
    else:
        commands = "1 command was" if each.open_commands == 1 else f"{each.open_commands} commands were"
        where = f", by path {each.path}" if each.path else ""
        text += f"; {commands} without an answer, the oldest a {each.oldest.kind} of {format_bytes(each.oldest.bytes)}"
        text += f"{where}, for {format_seconds(each.oldest.age_s)}"
    if each.where:
        told = list(each.where[:_MOST_FRAMES])
        # Where the job itself was, behind what it has called.
        own = next((frame for frame in each.where if not any(name in frame for name in _OTHERS)), None)
        if own is not None and own not in told:
            told.append(own)
        text += f"; Python was at {' < '.join(map(_frame, told))}"
    return text


def _frame(frame: str) -> str:
    """Of `/a/long/way/train.py:12 save` the last part."""
    place, _, function = frame.rpartition(" ")
    return f"{place.rpartition('/')[2]} {function}"


def _one_of(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "one of them"


def _clocks(found: Explanation) -> str:
    first, *others = sorted(found.clocks)
    by: dict[str, list[int]] = {}
    for rank in others:
        by.setdefault(found.clocks[rank].by, []).append(rank)
    errors = [found.clocks[rank].error_s for rank in others]
    known = [error for error in errors if error is not None]
    text = f"beside rank {first}: " + "; ".join(f"{ranks_text(ranks)} by {name}" for name, ranks in by.items())
    if len(known) < len(errors):
        return f"{text}: how far those are apart is not known"
    return f"{text}, within {format_seconds(max(known))}"


def findings_table(found: Explanation, gpu_hour_price: float | None = None) -> Table:
    columns = ["slow because of", "seconds", "time of GPUs", *([] if gpu_hour_price is None else ["money"]),
               "storage", "rank", "path", "confidence"]  # fmt: skip
    rows = []
    for each in found.findings:
        gpu_s = arithmetic.gpu_seconds(each.seconds, found.world)
        paid = [] if gpu_hour_price is None else [money(gpu_s, gpu_hour_price)]
        path = "" if each.path is None or each.storage != "yes" else f"{each.path.path} ({each.scope or 'the busiest'})"
        rows.append(
            [each.cause, format_seconds(each.seconds), gpu_time(gpu_s), *paid, each.storage, str(each.rank), path,
             each.confidence]
        )  # fmt: skip
    return columns, rows


def shown_ranks(found: Explanation, most: int = MOST_RANKS) -> list[int]:
    """Of too many the one that the others waited for, and those that something was found of; in order."""
    told = {each.rank for each in found.findings}
    return sorted(sorted(found.rows, key=lambda rank: (rank != found.rank, rank not in told, rank))[:most])


def ranks_table(found: Explanation) -> Table:
    """What each rank did in the step; of that what took a two-hundredth of it."""
    shown = [
        cause for cause in ("wait", *CAUSES) if any(row[cause] >= 0.005 * found.took_s for row in found.rows.values())
    ]
    rows = [
        [str(rank), *(format_seconds(row[cause]) if row[cause] else "" for cause in shown),
         (row.cause or "other") if row.under_way else ""]
        for rank in shown_ranks(found)
        for row in (found.rows[rank],)
    ]  # fmt: skip
    return ["rank", *shown, "was at"], rows


def paths_table(found: Explanation) -> Table:
    seen: dict[tuple[int, str, str], PathView] = {}
    for each in found.findings:
        for path in (*([each.path] if each.path else []), *each.beside):
            seen.setdefault((path.rank, path.device, path.path), path)
    rows = [
        [str(path.rank), path.path, path.target or path.device, str(path.commands), format_bytes(path.bytes),
         format_seconds(path.p50_s), format_seconds(path.p99_s), format_seconds(path.max_s),
         "" if path.before_p99_s is None else format_seconds(path.before_p99_s),
         str(path.slow or ""), str(path.losses or "")]
        for path in seen.values()
    ]  # fmt: skip
    columns = ("rank", "path", "target", "commands", "bytes", "p50", "p99", "longest", "before", "slow", "losses")
    return columns, rows


# ---- for machines --------------------------------------------------------------------------------------------------


def to_json(found: Explanation, gpu_hour_price: float | None = None) -> dict[str, Any]:
    told: dict[str, Any] = {
        "sentence": sentence(found, gpu_hour_price), "step": found.step, "under_way": found.under_way,
        "took_s": found.took_s, "usual_s": found.usual_s, "of_steps": found.of_steps, "stands_out": found.stands_out,
        "world": found.world, "rank": found.rank, "host": found.host, "storage": found.storage,
        "lost_s": found.lost_s, "lost_gpu_s": found.gpu_s, "storage_gpu_s": found.storage_gpu_s,
        "findings": [asdict(each) for each in found.findings],
        "unwaited": None if found.unwaited is None else asdict(found.unwaited),
        "compute_marked": found.compute_marked,
        "at_dump": {rank: asdict(each) for rank, each in found.at_dump.items()},
        "ranks_dumped_before": list(found.dumped_before),
        "missing_ranks": list(found.missing), "ranks_without_events": list(found.without_events),
        "collectives_lacking": [asdict(each) for each in found.lacking],
        "collectives_mismatched": [asdict(each) for each in found.mismatches],
        "not_read": list(found.unread),
        "late": None if found.late is None else asdict(found.late),
        "clocks": {rank: asdict(clock) for rank, clock in found.clocks.items()}, "dumped_why": found.why,
        "dumped_detail": found.detail,
        "ranks": {
            rank: {"wall_s": row.wall_s, "spent": dict(row.spent), "under_way": row.under_way, "cause": row.cause}
            for rank, row in found.rows.items()
        },
    }  # fmt: skip
    if gpu_hour_price is not None:
        told["lost_money"] = arithmetic.dollars(found.gpu_s, gpu_hour_price)
    return told
