"""What no step tells: that none ends any more. A rank writes down steps that ended, so one that hangs, or in which it
was killed, is in no figure, however long it took."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from headrace.measure.watch.join import Attribution
from headrace.units import format_seconds

#: A silence is told from so many seconds on, and from so many times the 99th percentile of the steps.
LEAST_S, TIMES = 5.0, 3.0


def silence_s(found: Attribution, now_s: float) -> float | None:
    """`now_s`: by the system's clock. Seconds since the last step ended, where steps are much shorter."""
    if found.ended_s is None:
        return None
    seconds = now_s - found.ended_s
    return seconds if seconds >= max(LEAST_S, TIMES * found.step_p99_s) else None


def dumped_s(found: Attribution, files: Iterable[Path]) -> float | None:
    """So long after the end of the last step a black box beside one of these files was written, where that is long."""
    written = []
    for file in files:
        with suppress(OSError):
            written.append(file.with_suffix(".blackbox").stat().st_mtime)
    return silence_s(found, max(written)) if written else None


def waiting(found: Attribution, now_s: float) -> str:
    """Of a job that is followed; empty where steps come as they did."""
    seconds = silence_s(found, now_s)
    if seconds is None:
        return ""
    return (
        f"No step has ended for {format_seconds(seconds)}, where half of them took less than "
        f"{format_seconds(found.step_p50_s)}: one takes long, or hangs, or the job is over. Of those before: "
    )


def unfinished(found: Attribution, files: Iterable[Path]) -> str:
    """Of files that are looked at once; empty where nothing is known of a step behind the last one."""
    seconds = dumped_s(found, files)
    if seconds is None:
        return ""
    return (
        f" That is of steps that ended. A black box was written {format_seconds(seconds)} after the last one had: "
        "what the job was in then is told by `headrace watch explain`."
    )
