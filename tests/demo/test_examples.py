"""Every example runs as it stands and says what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
SAYS = {
    "first_volume.py": ["1048576 numbers", "hello, turbine"],
    "train_loop.py": ["Storage cost", "of accelerator time"],
    "two_paths.py": ["step 19: usable 127.0.0.1:"],
}


def test_every_example_is_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", sorted(SAYS))
def test_it_runs(name: str, tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    for text in SAYS[name]:
        assert text in answer.stdout
    assert list(tmp_path.iterdir()) == []
