"""An attribution for people, as text: one sentence, then what it was made from."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.measure import statistics
from headrace.measure.watch.causes import CAUSES, LOST
from headrace.measure.watch.join import Attribution
from headrace.measure.watch.predict import Stalls
from headrace.measure.watch.ranks import RankRow
from headrace.measure.watch.verdict import activity_text, bytes_text, gpu_time, money, percent, step_text
from headrace.units import format_bytes, format_seconds

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
#: Ranks that have a row or a bar of their own.
MOST_RANKS = 64


def facts(found: Attribution) -> dict[str, str]:
    ranks = len(found.ranks)
    told = {
        "steps": f"{found.steps} of {ranks} {'rank' if ranks == 1 else 'ranks'}, "
        f"p50 {format_seconds(found.step_p50_s)}, p99 {format_seconds(found.step_p99_s)}"
        + (f", longest {format_seconds(found.longest[0])} (step {found.longest[1]})" if found.longest[1] >= 0 else ""),
        "compute": f"{percent(found.share('compute'))} of accelerator time{_unmarked(found)}",
        "clock": ", ".join(sorted(found.clocks)),
        "activity": activity_text(found),
    }
    if found.behind is not None:
        rank, last, furthest = found.behind
        since = f"none after {last}" if last >= 0 else "none"
        told["behind"] = f"rank {rank} wrote {since}, others up to {furthest}: what it did then is not known"
    if ranks > MOST_RANKS:
        told["ranks"] = f"the {MOST_RANKS} that were the slowest most often are shown; all of them: --json"
    if found.missing:
        told["missing"] = f"there is no file of {found.missing} of {found.world} ranks, which may have been slower"
    if said := bytes_text(found):
        told["data"] = said
    if found.starts > 1:
        again = f"{found.repeated_steps} steps done again"
        if found.repeats_unknown:
            again = "not known which steps were done again (Watch.resume says where a job goes on)"
        told["restarts"] = f"{found.starts - 1}, down for {format_seconds(found.down_s)}, {again}"
    if found.outside_s > 0.01 * found.total_gpu_s / max(1, ranks):
        told["outside"] = f"{format_seconds(found.outside_s)} between steps are in no figure here"
    return told


def _unmarked(found: Attribution) -> str:
    return "" if found.compute_marked else ": all that is in no watched part"


#: A share that is told; all of them are in `--json`.
_TOLD = 0.0005


def lost_table(found: Attribution, gpu_hour_price: float | None) -> Table:
    """What it was lost to, the most first."""
    columns = ["lost to", "share", "time of GPUs"] + ([] if gpu_hour_price is None else ["money"]) + ["what it is"]
    rows = []
    for cause in sorted(LOST, key=lambda name: -found.spent_gpu_s[name]):
        gpu_s = found.spent_gpu_s[cause]
        if found.share(cause) < _TOLD:
            continue
        row = [cause, percent(found.share(cause)), gpu_time(gpu_s)]
        if gpu_hour_price is not None:
            row.append(money(gpu_s, gpu_hour_price))
        rows.append([*row, LOST[cause]])
    return columns, rows


def shown_ranks(found: Attribution) -> Sequence[RankRow]:
    """Of too many those that the others waited for most often; in order."""
    slowest = sorted(found.ranks.values(), key=lambda row: (-row.slowest, row.rank))[:MOST_RANKS]
    return sorted(slowest, key=lambda row: row.rank)


def ranks_table(found: Attribution) -> Table:
    """Each rank: how often it was the slowest, and what it did itself; of that what is a hundredth of any rank's."""
    ranks = shown_ranks(found)
    shares = {cause: [statistics.share(row.spent[cause], row.wall_s) for row in ranks] for cause in CAUSES}
    causes = [cause for cause in CAUSES if max(shares[cause]) >= 0.005]
    nodes = len({row.node for row in ranks}) > 1
    rows = []
    for at, row in enumerate(ranks):
        told = [f"{shares[cause][at] * 100:.0f} %" for cause in causes]
        rows.append([str(row.rank), *([row.node] if nodes else []), str(row.slowest), *told, _cpu(row)])
    return ["rank", *(["node"] if nodes else []), "slowest in", *causes, "CPU"], rows


def _cpu(row: RankRow) -> str:
    """Cores it kept busy, and what it waited for one."""
    window = row.windows["window_s"]
    if not window:
        return ""
    cores = (row.windows["cpu_user_s"] + row.windows["cpu_system_s"] + row.windows["helpers_cpu_s"]) / window
    text = f"{cores:.1f} cores"
    if row.windows["throttled_s"]:
        text += f", throttled {format_seconds(row.windows['throttled_s'])}"
    return text


def worst_table(found: Attribution) -> Table:
    rows = [
        [str(step.step), format_seconds(step.wall_s), format_seconds(step.lost_s), str(step.slowest), step_text(step)]
        for step in found.worst
        if step.lost_s > 0
    ]
    return ["step", "took", "lost", "rank", "to what"], rows


def facts_of_stalls(found: Stalls) -> dict[str, str]:
    """Three runs of a loop, and what is known of its reads."""
    means = {"synthetic": found.synthetic, "cached": found.cached, "storage": found.storage}
    told = {
        name: f"{format_seconds(mean.mean_s)} ± {format_seconds(mean.error_s)} a step, {mean.steps} steps"
        for name, mean in means.items()
    }
    if found.step_bytes:
        told["a step reads"] = format_bytes(found.step_bytes)
    ways = {0.0: "when it is asked", 1.0: "ahead", None: "not known whether ahead"}
    told["the loader reads"] = ways.get(found.overlap, f"ahead by {found.overlap}")
    return told
