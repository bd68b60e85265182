"""`python -m benchmarks SUITE`: JSON lines on standard output, a table on standard error.

Exit status 1 when a figure misses its bound, unless `--no-bounds` (a busy machine proves nothing).
"""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks import figures

SUITES = {
    "fabric": "the NVMe/TCP host and target beside bare sockets",
    "fabric-scale": "many controllers on one target",
    "fabric-nodes": "sixteen targets and one client, nodes of their own, over a shaped link",
    "volume": "objects beside the same bytes moved raw, over NVMe/TCP",
    "volume-scale": "what a volume of a million objects costs to open, to load and to commit to",
    "volume-copy": "a folder of files into a volume and out of it, beside cp -r",
    "checkpoint": "saves and loads of a sharded state, beside raw I/O and its other stores; bytes of a restore",
    "checkpoint-blocked": "how long an asynchronous save holds up training, beside one copy of the state",
    "checkpoint-beside-feed": "what a save that nobody waits for costs the reads of training, and what it gets",
    "stage": "a dataset staged on this node, beside a bare copy through the same host to the same medium",
    "feed": "batches of tokens for a training loop, beside the loaders of PyPI (makes .venv-peers when first run)",
    "dlio": "the DLIO benchmark from a volume over a shaped link (makes .venv-dlio when first run)",
    "records": "records of 0.1 to 15 MB in random order over a shaped link, beside a bare socket",
    "watch": "what headrace.measure.Watch costs a loop of short steps, and how good its predictions are",
    "soak": "whether memory or descriptors grow over many connects and half an hour of verified traffic",
}

#: Not in `all`: what it compares with is installed from the network first.
ALONE = ("feed", "dlio")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=[*SUITES, "all"], help="; ".join(f"{k}: {v}" for k, v in SUITES.items()))
    parser.add_argument("--only", metavar="FIGURE", action="append", default=[], help="this figure; may be given again")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rounds, about a minute a suite")
    parser.add_argument("--json", action="store_true", help="only the JSON lines, no table")
    parser.add_argument("--no-bounds", action="store_true", help="a missed bound is shown, and is no failure")
    parser.add_argument("--plot", metavar="FILE", help="a picture of the suite, by the ending of FILE (feed)")
    options = parser.parse_args(arguments)
    if options.plot and options.suite != "feed":
        parser.error(f"there is no picture of suite {options.suite}")
    got: list[figures.Figure] = []
    for suite in [name for name in SUITES if name not in ALONE] if options.suite == "all" else [options.suite]:
        module = importlib.import_module(f"benchmarks.{suite.replace('-', '_')}")
        names = getattr(module, "FIGURES", {})
        if unknown := [name for name in options.only if name not in names]:
            parser.error(f"suite {suite} has no figure {', '.join(unknown)}; it has: {', '.join(names)}")
        for figure in module.run(options.quick, options.only) if options.only else module.run(options.quick):
            print(figure.json_line(), flush=True)
            got.append(figure)
    if not options.json:
        figures.show(got)
    if options.plot:
        importlib.import_module("benchmarks.feed").plot(got, options.plot)
    missed = [f"{figure.suite}/{figure.figure}" for figure in got if not figure.holds]
    if missed:
        print(f"missed its bound: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed and not options.no_bounds else 0


if __name__ == "__main__":
    sys.exit(main())
