"""See the package."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.volume.commands.rounds import KINDS, Rounds, command, hold


def main() -> int:
    if sys.argv[1:2] == ["--command"]:
        return command(sys.argv[2:])
    if sys.argv[1:2] == ["--hold"]:
        return hold(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(prog="python -m tests.volume.commands")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--target", action="store_true", help="over NVMe/TCP, else in files")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Rounds(Path(folder), given.seed, target=given.target) as rounds:
        try:
            for number in range(given.rounds):
                rounds.run(KINDS[number % len(KINDS)])
                print(f"{number + 1} rounds, {time.monotonic() - began:.0f} s: {rounds.log[-1]}", flush=True)
        except BaseException:
            print("\n".join(rounds.log[-20:]))
            raise
        print(", ".join(f"{what}: {count}" for what, count in sorted(rounds.counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
