"""What the guide to feeding shows, run as it stands, in its order."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from headrace.cli import main
from headrace.cli.app import app
from tests.dataset.corpora import texts, write_folder

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "feeding.md"


def test_what_the_guide_says_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "texts", texts(60))
    write_folder(tmp_path / "notes", texts(30, seed=2))
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {}
    said: dict[str, str] = {}
    for language, code in re.findall(r"^```(sh|python)\n(.*?)^```", GUIDE.read_text(), re.M | re.S):
        if file := re.match(r"# (\w+\.py)\n", code):
            Path(file[1]).write_text(code)
            continue
        if language == "python":
            exec(compile(code, str(GUIDE), "exec"), names)
            continue
        for line in code.splitlines():
            command, *arguments = shlex.split(line)
            if command == "export":
                monkeypatch.setenv(*arguments[0].split("=", 1))
                continue
            into = None
            if ">" in arguments:
                *arguments, _, into = arguments
            assert command == "headrace"
            status = main(arguments)
            out, err = capsys.readouterr()
            assert status == 0, f"{line}: {err}"
            if into is not None:
                Path(into).write_text(out)
            said[line] = out
    assert said["headrace dataset ls"].split("\t")[4] == "corpus"
    assert "document 0 of 60" in said["headrace dataset peek corpus --count 1"]
    assert "fit together" in said["headrace dataset verify corpus"]


def test_the_options_that_are_told_are_there() -> None:
    root = typer.main.get_command(app)
    known = {option for command in _commands(root) for given in command.params for option in given.opts}
    told = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", GUIDE.read_text()))
    assert len(told) > 8 and told <= known
    for name in root.commands["dataset"].commands:  # type: ignore[attr-defined]
        assert f"headrace dataset {name}" in GUIDE.read_text()


def _commands(command: Any) -> Iterator[Any]:
    yield command
    for each in getattr(command, "commands", {}).values():
        yield from _commands(each)
