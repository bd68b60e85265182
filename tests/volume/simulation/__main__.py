"""See the package."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from headrace.testing import Quirks
from tests.volume.simulation.rules import HARSH, STORMS, UNKNOWN_FATE
from tests.volume.simulation.run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.volume.simulation")
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="print every command")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first that fails")
    parser.add_argument("--resent-ghosts", action="store_true", help="writes that were sent again land late, too")
    parser.add_argument(
        "--storm", choices=["harsh", "unknown fate", *sorted(STORMS)], help="one weather for all of them"
    )
    given = parser.parse_args()
    undrained = {"harsh": HARSH, "unknown fate": UNKNOWN_FATE}
    storms = STORMS | {name: (weather, Quirks(fences_without_draining=True)) for name, weather in undrained.items()}
    seeds = [given.seed] if given.seed is not None else range(given.first, given.first + given.seeds)
    counts: Counter[str] = Counter()
    failed: list[int] = []
    started = time.monotonic()
    for done, seed in enumerate(seeds, 1):
        try:
            made = run(seed, trace=given.trace, storm=storms.get(given.storm), resent_ghosts=given.resent_ghosts)
            counts.update(made.counts)
            counts["step"] += made.steps
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            if not given.keep_going:
                traceback.print_exc()
                print(f"again: python -m tests.volume.simulation --seed {seed} --trace")
                break
        if done % 100 == 0:
            print(f"{done} seeds, {len(failed)} failed, {time.monotonic() - started:.0f} s", flush=True)
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    print(f"{len(failed)} of {len(seeds)} seeds failed" + (f": {failed}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
