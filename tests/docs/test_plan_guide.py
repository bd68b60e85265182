"""The guide of plans: what it says to type is typed, what it shows is what comes, its file and its Python work."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
import typer

from headrace.cli import main
from headrace.cli.app import app
from headrace.plan import load_catalogue

GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "guides" / "plan.md"
TEXT = GUIDE.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.M | re.S)


def test_what_the_guide_says_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = []
    for line in "".join(blocks("sh")).splitlines():
        command, _, file = line.partition(" > ")
        name, *arguments = shlex.split(command)
        assert name == "headrace"
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert main(arguments) == 0, line
        assert said.getvalue()
        first.append(" ".join(said.getvalue().partition("\n")[0].split()))
        if file:
            Path(file).write_text(said.getvalue())
    assert Path("plan.html").stat().st_size > 10_000
    shown = [" ".join(block.split()) for block in blocks("text")]
    assert len(shown) == 2 and all(text in first for text in shown)


def test_the_file_of_ones_own(tmp_path: Path) -> None:
    (block,) = blocks("toml")
    (tmp_path / "ours.toml").write_text(block)
    assert load_catalogue([tmp_path / "ours.toml"]).find("ours").key == "ours/array"


def test_the_python_of_the_guide_runs() -> None:
    (block,) = blocks("python")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(block, str(GUIDE), "exec"), {})
    assert "read: below: measured 0.559 GiB/s per gpu, 55.9 % of what is claimed" in said.getvalue()


def test_every_option_is_told() -> None:
    plan = typer.main.get_command(app).commands["plan"]  # type: ignore[attr-defined]
    known = {option for given in plan.params for option in given.opts if option.startswith("--")}
    told = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", TEXT))
    assert told - {"--filter", "--expect"} == known
