"""An emulation as one HTML page: AU over the number of accelerators, and every trial."""

from __future__ import annotations

from headrace.bench.accelerators.run import COLUMNS, Emulation, rows
from headrace.bench.sustained import rate
from headrace.measure import charts
from headrace.measure.report import Page


def build(found: Emulation) -> Page:
    work = found.workload
    page = Page("headrace bench accelerators", verdict=found.sentence, subtitle=found.where)
    page.cards(
        [
            (str(found.found.largest), "accelerators", "" if found.found.complete else "and perhaps more"),
            (rate(work.demand_bytes_per_s), "an accelerator reads", "when it never waits"),
            (f"{work.au:.0%}", "AU that is enough", work.name),
        ]
    )
    points = sorted((float(count), 100 * au) for count, au in found.found.tried)
    if len(points) > 1:
        lines = [
            charts.Series(name="AU", points=points, style="s0", dots=True),
            charts.Series(
                name="enough", style="s1",
                points=[(points[0][0], 100 * work.au), (points[-1][0], 100 * work.au)],
            ),
        ]  # fmt: skip
        page.section(
            "Utilisation over accelerators", charts.legend([("s0", "AU"), ("s1", "enough")], lines=True),
            charts.line_chart(
                lines, x_label="accelerators", y_label="AU, %", from_zero=True, x_at=[at for at, _ in points]
            ),
        )  # fmt: skip
    page.table("Trials", list(COLUMNS), rows(found))
    page.facts(
        "The workload",
        {
            "name": work.name, "from": work.source, "samples of a batch": str(work.batch),
            "bytes of a sample": f"{work.sample_bytes:,}", "computing": f"{work.compute_s:g} s a step",
            "batches ahead": str(work.ahead), "caches": found.cache,
        },
    )  # fmt: skip
    page.table("Worth knowing", [""], [[note] for note in found.notes], note="None of it is an MLPerf result.")
    return page
