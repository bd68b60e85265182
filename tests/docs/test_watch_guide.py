"""The guide of the watch: what it says to type is typed, and its table is the causes that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from headrace.cli import main
from headrace.cli.app import app
from headrace.measure.watch.causes import CAUSES, LOST

GUIDE = (Path(__file__).resolve().parent.parent.parent / "docs" / "guides" / "watch.md").read_text()


def test_what_the_guide_says_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"^```python\n(.*?)^```", GUIDE, re.M | re.S):
        exec(compile(block, "docs/guides/watch.md", "exec"), {})
    said = capsys.readouterr().out
    assert said.startswith("Storage is your problem: fetch stall")
    assert "With storage of 500 MB/s utilisation would" in said
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```", GUIDE, re.M | re.S) for line in block.splitlines()]
    assert len(lines) == 5
    for line in lines:
        command, *arguments = shlex.split(line)
        assert command == "headrace" and main(arguments) == 0, line
        said = capsys.readouterr().out
        assert ("and whether it was storage is not known" if "explain" in line else "problem") in said
    assert (tmp_path / "watch.html").stat().st_size > 5000


def test_causes_and_options_that_are_told_are_there() -> None:
    table = GUIDE.partition("## The parts of a step")[2].partition("\n\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == {*CAUSES, *LOST}
    watch = typer.main.get_command(app).commands["watch"]  # type: ignore[attr-defined]
    known = {option for each in watch.commands.values() for given in each.params for option in given.opts}
    assert set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", GUIDE)) <= known
