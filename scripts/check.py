"""Everything that reads the source without running it. One line a check, its output only where it fails.

python scripts/check.py [NAME ...]      all, or those named
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PYTHON_SOURCES = ("src", "tests", "benchmarks", "examples", "scripts")

CHECKS: dict[str, list[str]] = {
    "ruff": [str(BIN / "ruff"), "check", *PYTHON_SOURCES],
    "ruff-format": [str(BIN / "ruff"), "format", "--check", *PYTHON_SOURCES],
    # Where nobody comes back, what it found is not kept.
    "mypy": [str(BIN / "mypy"), *(["--cache-dir=/dev/null"] if os.environ.get("CI") else [])],
    "imports": [str(BIN / "lint-imports")],
    "rustfmt": ["cargo", "fmt", "--all", "--check"],
    "clippy": ["cargo", "clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"],
}


def main() -> int:
    wanted = sys.argv[1:] or list(CHECKS)
    unknown = [name for name in wanted if name not in CHECKS]
    if unknown:
        print(f"no check named {', '.join(unknown)}; there are {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    failed = []
    for name in wanted:
        begun = time.monotonic()
        answer = subprocess.run(
            CHECKS[name],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        verdict = "failed" if answer.returncode else "ok"
        print(f"check {name:12} {verdict} ({time.monotonic() - begun:.0f} s)", flush=True)
        if answer.returncode:
            failed.append(name)
            print(answer.stdout, flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
