"""The table, as text; and a page with the picture."""

from __future__ import annotations

from collections.abc import Sequence

from examples.nfs_cure.judge import Row
from examples.nfs_cure.world import PATHS, World
from headrace.measure import charts
from headrace.measure.report import Page, badge

_JOBS = {"images": "images with captions", "text": "text tokens"}
_COLUMNS = [
    "training",
    "path",
    "bench: rate",
    "AU by bench",
    "by plan",
    "by watch",
    "AU in all",
    "watch says",
    "plan says",
]


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    return _COLUMNS, [
        [
            _JOBS[row.job], PATHS[row.path], f"{row.rate / 1e6:,.0f} MB/s", f"{row.bench_au:.1%}",
            f"{row.plan_au:.1%}", f"{row.watch_au:.1%}", f"{row.whole_au:.1%}", _watch(row), _plan(row),
        ]
        for row in rows
    ]  # fmt: skip


def _watch(row: Row) -> str:
    return f"storage: {row.storage_share:.0%} waited" if row.cause in ("fetch", "blocked") else "not storage"


def _plan(row: Row) -> str:
    return (
        f"storage: +{row.plan_gain:.0f} points with a faster one" if row.plan_problem != "no" else "nothing to change"
    )


def text(rows: Sequence[Row]) -> str:
    columns, lines = table(rows)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [columns, ["---"] * len(columns), *lines])


def page(rows: Sequence[Row], world: World, found: Sequence[str]) -> str:
    """HTML that needs nothing but itself. `found`: where they disagree."""
    sick, cured = rows[0], rows[1]
    verdict = (
        f"Over NFS storage leaves {sick.watch_au:.0%} of a step, over NVMe/TCP {cured.watch_au:.0%}: "
        f"the plan said +{sick.plan_gain:.0f} points, {100 * (cured.watch_au - sick.watch_au):+.0f} were seen. "
    )
    verdict += "They do not agree on all of it." if found else "For text storage is not the problem."
    made = Page("Multimodal training over NFS, and its cure", verdict=verdict, subtitle="one medium, one link")
    made.section(
        "Where a step's time went",
        charts.legend([("compute", "computing"), ("data_wait", "waiting for data"), ("idle", "other")]),
        charts.stacked_bars(
            [
                charts.Bar(
                    label=f"{row.job}, {row.path}",
                    parts=[
                        ("compute", 100 * row.whole_au), ("data_wait", 100 * row.storage_share),
                        ("idle", max(0.0, 100 * (1 - row.whole_au - row.storage_share))),
                    ],
                    title=row.watch_sentence,
                )
                for row in rows
            ],
            x_label="training, path", y_label="% of accelerator time",
        ),
        note="As it was watched.",
    )  # fmt: skip
    made.table(
        "What each says",
        *table(rows),
        note="AU: the share of the time in which accelerators compute, as far as storage goes, and in all.",
    )
    agree = badge(not found, "within 5 points, on cause, size and cure" if not found else "; ".join(found))
    made.table("Do they agree?", ["", ""], [["watch, bench and plan", agree]])
    made.facts(
        "In their words",
        {f"{row.job}, {row.path}": f"watch: {row.watch_sentence} plan: {row.plan_sentence}" for row in rows},
    )
    made.facts(
        "How it was measured",
        {
            "link": f"{world.link_bytes_per_s * 8e-9:g} Gbit/s, round trip {world.rtt_s * 1e3:g} ms",
            "medium": f"{world.disk_bytes_per_s / 1e9:g} GB/s, two disks that share it",
            "accelerators": f"{world.accelerators} emulated, {world.readers} readers of files",
            "slower than there": f"{world.dilation:g} times, all of it",
        },
    )
    return made.html()
