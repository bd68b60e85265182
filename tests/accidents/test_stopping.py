"""Processes that are stopped: every thread of them, of those that are there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.accidents import stopping


def test_a_thread_that_ends_while_it_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    glob = Path.glob

    def with_one_that_is_gone(path: Path, pattern: str) -> Iterator[Path]:
        yield path / "0" / "stat"
        yield from glob(path, pattern)

    monkeypatch.setattr(Path, "glob", with_one_that_is_gone)
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with stopping.stopped(child.pid):
            assert stopping._thread_states(child.pid) == ["T"]
    finally:
        child.kill()
        child.communicate()
