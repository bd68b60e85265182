"""What is asked in a process of its own: answers, silence, and what it was at."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.accidents.apart import ask_apart


@pytest.mark.parametrize(
    ("program", "timeout_s", "found"),
    [
        ("echo '{\"a\": 1}'", 60.0, ("answered", {"a": 1}, None)),
        # Each line is a sign of life: together they take longer than the silence that is borne.
        (
            'for i in 1 2 3 4; do echo \'{"at": "x"}\'; sleep 0.5; done; echo \'{"a": 2}\'',
            1.5,
            ("answered", {"a": 2}, None),
        ),
        ('echo \'{"at": "/mnt/x"}\'; printf half; exec sleep 60', 1.5, ("silent", None, "/mnt/x")),
        ("exec sleep 60", 0.3, ("silent", None, None)),
        ("echo nonsense; exit 3", 60.0, ("not asked", None, "exit status 3")),
    ],
)
def test_answers_and_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, timeout_s: float, found: tuple[object, ...]
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert ask_apart("any", "kind", "/path", timeout_s=timeout_s) == found
