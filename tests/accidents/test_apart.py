"""What is asked in a process of its own: answers, silence, and what it was at."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.accidents import apart
from headrace.accidents.apart import ask_apart


class Clock:
    """Each look at it takes so long; behind `looks` of them the time is up."""

    def __init__(self, step_s: float, looks: int) -> None:
        self._step_s, self._looks, self._count = step_s, looks, 0

    def monotonic(self) -> float:
        self._count += 1
        return self._count * self._step_s if self._count <= self._looks else 1e9


FOR_EVER = 1_000_000


@pytest.mark.parametrize(
    ("program", "clock", "found"),
    [
        ("echo '{\"a\": 1}'", Clock(0, FOR_EVER), ("answered", {"a": 1}, None)),
        # Each line is a sign of life: together they take longer than the silence that is borne.
        (
            'for i in 1 2 3 4; do echo \'{"at": "x"}\'; sleep 0.2; done; echo \'{"a": 2}\'',
            Clock(20, FOR_EVER),
            ("answered", {"a": 2}, None),
        ),
        # The time is up when it has said where it is.
        ('echo \'{"at": "/mnt/x"}\'; printf half; exec sleep 60', Clock(0, 3), ("silent", None, "/mnt/x")),
        ("exec sleep 60", Clock(0, 1), ("silent", None, None)),
        ("echo nonsense; exit 3", Clock(0, FOR_EVER), ("not asked", None, "exit status 3")),
    ],
)
def test_answers_and_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, clock: Clock, found: tuple[object, ...]
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(apart, "time", clock)
    assert ask_apart("any", "kind", "/path", timeout_s=60.0) == found
