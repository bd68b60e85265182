"""Advice in error messages and help names commands that are there."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from headrace.cli.app import app

SOURCES = Path(__file__).parents[2] / "src" / "headrace"


def test_commands_that_are_advised_exist() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    wrong, found = [], 0
    for path in SOURCES.rglob("*.py"):
        for first, second in re.findall(r"`headrace ([a-z-]+)(?: ([a-z-]+))?", path.read_text(encoding="utf-8")):
            found += 1
            command = commands.get(first)
            if command is None or (second and second not in getattr(command, "commands", {second: None})):
                wrong.append(f"{path.name}: headrace {first} {second}")
    assert found > 5 and not wrong
