"""A picture of what the suite `feed` found, run by the environment of the peers: matplotlib comes with one of them.

python -m benchmarks.feed_plot FILE < {"NAME": {"samples": ..., "cpu": ..., "memory": ..., "first": ...}}
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

#: Figures of each loader: title, and what is better.
PANELS = {
    "samples": ("samples/s", "more"),
    "cpu": ("CPU s/GB", "less"),
    "memory": ("peak memory, MiB", "less"),
    "first": ("first batch, s", "less"),
}


def main() -> None:
    # Nothing to look up where it is not installed.
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    loaders: dict[str, dict[str, float]] = json.load(sys.stdin)
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 0.4 * len(loaders) + 1.5), sharey=True)
    names = list(loaders)
    for axis, (key, (title, better)) in zip(axes, PANELS.items(), strict=True):
        values = [loaders[name].get(key, 0.0) for name in names]
        bars = axis.barh(names, values, color=["tab:blue" if n.startswith("headrace") else "tab:gray" for n in names])
        axis.bar_label(bars, fmt="%.3g", padding=2)
        axis.margins(x=0.25)
        axis.set_title(f"{title} ({better} is better)", fontsize=9)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(sys.argv[1], dpi=120)


if __name__ == "__main__":
    main()
