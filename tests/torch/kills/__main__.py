"""See the package."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.torch.kills.rounds import Rounds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch.kills")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rounds = Rounds(Path(folder), given.seed)
        try:
            for number in range(1, given.rounds + 1):
                rounds.run()
                if number % 10 == 0 or number == given.rounds:
                    print(f"{number} rounds, {time.monotonic() - began:.0f} s", flush=True)
        except BaseException:
            print("\n".join(rounds.log[-40:]))
            raise
        finally:
            rounds.close()
            print(", ".join(f"{what}: {count}" for what, count in sorted(rounds.counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
