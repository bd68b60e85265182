"""An attribution as one HTML page that needs nothing but itself."""

from __future__ import annotations

from headrace.measure import charts
from headrace.measure.report import Page, table
from headrace.measure.watch import tell
from headrace.measure.watch.causes import CAUSES, LOST
from headrace.measure.watch.join import Attribution
from headrace.measure.watch.verdict import gpu_time, money, path_text, percent, sentence
from headrace.units import format_bytes, format_seconds

#: Classes of the page's style, by cause.
STYLE = {cause: cause for cause in (*CAUSES, "straggler")}


def page(
    found: Attribution, *, title: str = "headrace watch", gpu_hour_price: float | None = None, besides: str = ""
) -> str:
    """HTML: the sentence, where the time went, which rank, which steps. `besides`: what is told behind the sentence."""
    facts = tell.facts(found)
    made = Page(title, verdict=sentence(found, gpu_hour_price) + besides, subtitle=f"steps: {facts['steps']}")
    cards = [
        (
            percent(found.share("compute")), "of accelerator time computed",
            facts["activity"] if found.sm_activity is not None
            else "" if found.compute_marked else "all that is not watched: nothing is marked as computing",
        ),
        (percent(found.lost_share), "was lost", gpu_time(found.lost_gpu_s)),
        (percent(found.storage_share), "of all time to storage", "reads, checkpoints, restarts"),
    ]  # fmt: skip
    if gpu_hour_price is not None:
        cards.insert(2, (money(found.lost_gpu_s, gpu_hour_price), "lost", f"at ${gpu_hour_price:g} an hour"))
    made.cards(cards)
    shown = [cause for cause in ("compute", *LOST) if found.spent_gpu_s[cause] > 0]
    made.section(
        "Where a step's time went",
        charts.legend([(STYLE[cause], cause) for cause in shown]),
        charts.stacked_bars(
            [
                charts.Bar(
                    label=str(first),
                    parts=[(STYLE[cause], spent.get(cause, 0.0)) for cause in shown],
                    title=_title(first, count, spent),
                )
                for first, count, spent in found.series
            ],
            x_label="step", y_label="seconds a step",
        ),
        note="The slowest rank of each step; a bar is the mean of the steps from its number on. Its parts stand in the "
        "order of the names, from the bottom up.",
    )  # fmt: skip
    columns, rows = tell.lost_table(found, gpu_hour_price)
    made.table("What it was lost to", columns, rows or [["nothing", *[""] * (len(columns) - 1)]])
    columns, rows = tell.worst_table(found)
    if rows:
        made.table("The worst steps", columns, rows)
    if found.paths:
        made.table(
            "Paths at their slowest", ["path", "step", "rank", "commands", "read"],
            [
                [path_text(path), str(path["step"]), str(path["rank"]), str(path["commands"]),
                 format_bytes(path["read_bytes"])]
                for path in found.paths
            ],
            note="Of each path of headrace's devices the stretch with the highest p99.",
        )  # fmt: skip
    if len(found.ranks) > 1:
        made.section("Ranks", _ranks_chart(found, shown), table(*tell.ranks_table(found)))
    made.facts("How it was measured", facts)
    return made.html()


def _ranks_chart(found: Attribution, shown: list[str]) -> str:
    return charts.stacked_bars(
        [
            charts.Bar(
                label=str(row.rank),
                parts=[(STYLE[cause], row.spent[cause] / max(1, row.steps)) for cause in shown],
                title=f"rank {row.rank}: slowest in {row.slowest} of {row.steps} steps",
            )
            for row in tell.shown_ranks(found)
        ],
        x_label="rank", y_label="seconds a step", height=200,
    )  # fmt: skip


def _title(first: int, count: int, spent: dict[str, float]) -> str:
    parts = ", ".join(f"{cause} {format_seconds(seconds)}" for cause, seconds in spent.items() if seconds > 0)
    return f"{count} {'step' if count == 1 else 'steps'} from {first}: {parts}"
