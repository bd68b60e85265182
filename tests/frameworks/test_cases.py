"""The cases (`tests/frameworks/cases`), with the Python of their environment: real frameworks, real ranks, killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.environments import ROOT

CASES = Path("tests/frameworks/cases")


@pytest.mark.timeout(900)
def test_frameworks_train_are_killed_and_go_on(
    framework_python: Path, framework_environment: dict[str, str], tmp_path: Path
) -> None:
    command = [
        framework_python, "-m", "pytest", CASES, "-o", "python_files=cases_*.py", "-o", "timeout=300", "-q",
        "-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", tmp_path / "cases", "--durations=15",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=framework_environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False, timeout=840,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout
