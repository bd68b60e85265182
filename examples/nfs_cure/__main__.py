"""Multimodal training over NFS, over NVMe/TCP with headrace, and from a local disk: python -m examples.nfs_cure"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from examples.nfs_cure.judge import disagreements, judge, too_busy
from examples.nfs_cure.picture import page, text
from examples.nfs_cure.run import measure
from examples.nfs_cure.world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.nfs_cure", description=__doc__)
    parser.add_argument("--html", default="nfs-cure.html", help="the page with the picture")
    parser.add_argument("--readers", type=int, default=World.readers, help="threads that read files")
    parser.add_argument("--dilation", type=float, default=World.dilation, help="how much slower it runs than there")
    parser.add_argument("--rtt-ms", type=float, default=World.rtt_s * 1e3, help="round trip, there")
    parser.add_argument("--steps", type=int, default=20, help="that are watched")
    parser.add_argument("--timeout", type=float, default=1200, help="of the guest, seconds")
    parser.add_argument("--json", action="store_true", help="what was measured, too")
    options = parser.parse_args()
    world = World(
        dilation=options.dilation, readers=options.readers, rtt_s=options.rtt_ms / 1e3, steps=options.steps,
        bench_steps=options.steps,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measured = measure(world, folder, timeout_s=options.timeout, tell=lambda line: print(line, file=sys.stderr))
        rows = judge(world, measured, folder / "share" / "watch")
    found = [*filter(None, [too_busy(rows)]), *disagreements(rows)]
    Path(options.html).write_text(page(rows, world, found))
    if options.json:
        print(json.dumps(measured, indent=1))
    print(text(rows))
    print(*(found or ["watch, bench and plan agree on cause, size and cure, within 5 points of AU."]), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
