"""See the package."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from headrace.errors import HeadraceError
from tests.volume.processes.roles import ROLES, say
from tests.volume.processes.rounds import Rounds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.volume.processes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0, help="at most, for a round, besides what it waits for")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--role", choices=sorted(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("uris", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role is not None:
        try:
            ROLES[given.role](given.uris, given.number, given.ranks)
        except (HeadraceError, BrokenPipeError) as error:
            # A killed target, rank or session is the end of a process.
            say(ended=f"{type(error).__name__}: {error}", lost=type(error).__name__ == "SessionLost")
        return 0
    print(f"seed {given.seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rounds = Rounds(Path(folder), given.seed)
        try:
            for number in range(1, given.rounds + 1):
                rounds.run(given.seconds)
                if number % 10 == 0:
                    print(f"{number} rounds, {time.monotonic() - began:.0f} s", flush=True)
            rounds.empty()
        except BaseException:
            print("\n".join(rounds.log[-60:]))
            raise
        finally:
            rounds.close()
            print(", ".join(f"{what}: {count}" for what, count in sorted(rounds.counts.items())))
            for end in sorted(set(rounds.ends)):
                print(f"ended: {end}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
