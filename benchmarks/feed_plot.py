"""A picture of what the suite `feed` found, run by the environment of the peers: matplotlib comes with one of them.

python -m benchmarks.feed_plot FILE < [["TITLE", {"NAME": {"samples": ..., "cpu": ..., ...}}], ...]

A row of panels for each title. Names are what a loader is called, with its version; a value that is null, or is not
there, is written as "none".
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

#: Figures of each loader: title, and what is better.
PANELS = {
    "samples": ("samples/s", "more"),
    "rate": ("MB/s", "more"),
    "cpu": ("CPU s/GB", "less"),
    "memory": ("peak memory, MiB", "less"),
    "first": ("first batch, s", "less"),
    "resume": ("resume at mid-epoch, s", "less"),
}


def main() -> None:
    # Nothing to look up where it is not installed.
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    rows: list[tuple[str, dict[str, dict[str, float | None]]]] = json.load(sys.stdin)
    panels = [[kind for kind in PANELS if any(kind in values for values in loaders.values())] for _, loaders in rows]
    figure = pyplot.figure(
        figsize=(4 * max(map(len, panels)), sum(0.4 * len(loaders) + 1.5 for _, loaders in rows)), layout="constrained"
    )
    parts = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=[len(loaders) + 3 for _, loaders in rows])
    for part, kinds, (title, loaders) in zip(parts[:, 0], panels, rows, strict=True):
        part.suptitle(title, fontsize=10)
        names = list(loaders)
        axes = part.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
        for axis, kind in zip(axes, kinds, strict=True):
            values = [loaders[name].get(kind) for name in names]
            ours = ["tab:blue" if name.startswith("headrace") else "tab:gray" for name in names]
            bars = axis.barh(names, [value or 0.0 for value in values], color=ours)
            axis.bar_label(bars, ["none" if value is None else f"{value:.3g}" for value in values], padding=2)
            axis.margins(x=0.25)
            axis.set_title("{} ({} is better)".format(*PANELS[kind]), fontsize=9)
        axes[0].invert_yaxis()
    figure.savefig(sys.argv[1], dpi=120)


if __name__ == "__main__":
    main()
