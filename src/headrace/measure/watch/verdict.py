"""One plain sentence: what the job's accelerators were lost to, whether that is storage, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.measure import arithmetic
from headrace.measure.watch.causes import LOST, PLURAL, SHORT, STORAGE
from headrace.measure.watch.join import Attribution, JobStep
from headrace.units import format_bytes, format_rate, format_seconds

#: Below this share of accelerator time nothing is called a problem.
PROBLEM = 0.02
#: Of what a step lost, what is told of it.
_TOLD = 0.05
#: Of a job that never says what computes.
UNMARKED = "All that is in no watched part is taken for computing, a save too: nothing is marked by watch.compute()."


def percent(share: float) -> str:
    return f"{share * 100:.1f} %" if share >= 0.001 or share == 0 else f"{share * 100:.2f} %"


def money(gpu_s: float, gpu_hour_price: float) -> str:
    amount = arithmetic.dollars(gpu_s, gpu_hour_price)
    if 0 < amount < 1e-4:
        return "below $0.0001"
    return f"${amount:,.2f}" if amount >= 0.01 else f"${amount:.4f}"


def problem(found: Attribution) -> str | None:
    """The cause that cost most; None where none costs enough to be one."""
    cause = max(LOST, key=lambda name: found.spent_gpu_s[name])
    return cause if found.share(cause) >= PROBLEM else None


def sentence(found: Attribution, gpu_hour_price: float | None = None) -> str:
    """What a person wants to know first."""
    worst = problem(found)
    storage = found.storage_share
    maybe = found.share("blocked")
    if worst is None:
        if storage + maybe < PROBLEM:
            text = f"Storage is not your problem, and nothing else is: {_lost(found, gpu_hour_price)}"
        else:
            text = f"No single thing is your problem: {_lost(found, gpu_hour_price)}, {percent(storage)} to storage"
        return f"{text}.{_unmarked(found)}"
    cost = f"{percent(found.share(worst))} of accelerator time"
    cost += f" ({_cost(found.spent_gpu_s[worst], gpu_hour_price)})"
    if worst in STORAGE:
        text = f"Storage is your problem: {SHORT[worst]} cost {cost}"
        if worst != "fetch":
            text = f"{SHORT[worst].capitalize()} are your problem: they cost {cost}"
    elif worst == "blocked":
        text = (
            f"Your loader is your problem: it was blocked for {cost}, while nothing of it was at work on a CPU. "
            "That is storage, the network or a lock, and this loader does not say which: compare with data from memory "
            "(headrace watch compare)"
        )
    elif worst == "other":
        text = (
            f"What nobody marked is your problem: it cost {cost}. A save, logging or validation is not told apart "
            "there: mark them (watch.checkpoint() and so on)"
        )
    elif worst == "collective" and found.behind is not None:
        text = (
            f"Collectives are your problem: they cost {cost}. Rank {found.behind[0]} wrote no more, and may be what "
            "was waited for; why it wrote no more, and whether storage is to blame, is not known here"
        )
    elif worst == "collective" and found.missing:
        text = (
            f"Collectives are your problem: they cost {cost}. Of {found.missing} of {found.world} ranks there is no "
            "file: one of them may be what was waited for, and for storage"
        )
    else:
        which = "greatest problem" if storage + maybe >= PROBLEM else "problem"
        verb = "are" if worst in PLURAL else "is"
        text = f"Storage is not your {which}: {SHORT[worst]} {verb}, which cost {cost}{_where(found, worst)}"
    others = [cause for cause in LOST if cause != worst and found.share(cause) >= PROBLEM]
    if others:
        others.sort(key=lambda cause: -found.spent_gpu_s[cause])
        text += "; besides, " + ", ".join(f"{SHORT[cause]} {percent(found.share(cause))}" for cause in others)
    return f"{text}.{_slowest(found) if worst == 'fetch' else ''}{_unmarked(found)}"


def _unmarked(found: Attribution) -> str:
    return "" if found.compute_marked else f" {UNMARKED}"


def _slowest(found: Attribution) -> str:
    if not found.paths:
        return ""
    return f" Slowest: {path_text(found.paths[0])}, on rank {found.paths[0]['rank']}."


def _lost(found: Attribution, gpu_hour_price: float | None) -> str:
    return f"{percent(found.lost_share)} of accelerator time was lost ({_cost(found.lost_gpu_s, gpu_hour_price)})"


def gpu_time(gpu_s: float) -> str:
    """`"805 GPU-seconds"`."""
    if gpu_s >= 7200:
        return f"{gpu_s / 3600:,.1f} GPU-hours"
    return f"{gpu_s:,.0f} GPU-seconds" if gpu_s >= 100 else f"{gpu_s:.3g} GPU-seconds"


def _cost(gpu_s: float, gpu_hour_price: float | None) -> str:
    text = gpu_time(gpu_s)
    return text if gpu_hour_price is None else f"{text}, {money(gpu_s, gpu_hour_price)}"


def _where(found: Attribution, cause: str) -> str:
    row = found.straggler
    if cause == "straggler" and row is not None:
        return f": rank {row.rank}" + (f" on {row.node}" if row.node else "")
    if cause == "starved":
        counters = [row.windows for row in found.ranks.values()]
        throttled = sum(each["throttled_s"] for each in counters)
        if throttled > 0:
            return f": the CPU limit of the container stopped it for {format_seconds(throttled)}"
    return ""


def path_text(path: Mapping[str, Any]) -> str:
    """Path, target, p99. Of the address of a device its target: by which path it is reached is said already."""
    _, _, target = str(path["device"]).partition("://")[2].partition("/")
    text = f"path {path['path']} to {target or path['device']}, p99 {format_seconds(path['p99_s'])}"
    if not path.get("usable", True):
        text += ", not usable"
    elif path.get("slow"):
        text += ", slower than the others"
    return text


def step_text(step: JobStep) -> str:
    """What was slow in a step; what is a small part of it is left out."""
    parts = sorted(((seconds, cause) for cause, seconds in step.spent.items() if cause != "compute"), reverse=True)
    text = ", ".join(
        f"{cause} {format_seconds(seconds)}" for seconds, cause in parts[:3] if seconds > _TOLD * step.lost_s
    )
    window = step.window or {}
    besides: list[str] = []
    if parts and parts[0][1] == "fetch":
        besides = [path_text(path) for path in window.get("paths", ())[:1]]
    elif parts and parts[0][1] in ("starved", "preparation", "other"):
        besides = _counters(window)
    if besides:
        text += f"; in the {format_seconds(window.get('window_s', 0.0))} around it: {', '.join(besides)}"
    return text


def _counters(window: Mapping[str, Any]) -> list[str]:
    found = []
    if window.get("throttled_s"):
        found.append(f"stopped {format_seconds(window['throttled_s'])} by its CPU limit")
    if window.get("major_faults"):
        found.append(f"{window['major_faults']} major faults")
    if window.get("run_queue_s", 0.0) > 0.01:
        found.append(f"waited {format_seconds(window['run_queue_s'])} for a CPU")
    return found


def activity_text(found: Attribution) -> str:
    """Of the multiprocessors, or why that was not measured."""
    if found.sm_activity is not None:
        return f"{found.sm_activity * 100:.0f} % of the GPU's multiprocessors were busy"
    why = "; ".join(sorted(found.sm_activity_why_not))
    return "of the GPU's multiprocessors: not measured" + (f" ({why})" if why else "")


def bytes_text(found: Attribution) -> str:
    """What the loaders delivered."""
    if not found.bytes or not found.total_gpu_s:
        return ""
    wall = found.total_gpu_s / max(1, len(found.ranks))
    return f"{format_bytes(found.bytes)} of batches, {format_rate(found.bytes / wall)}"
