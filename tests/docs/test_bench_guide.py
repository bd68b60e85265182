"""The guide of the bench: what it says to type is typed (in small); options and patterns are those that there are."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from headrace.bench.suite import PATTERNS
from headrace.cli import main
from headrace.cli.app import app
from headrace.testing.serve import free_port
from tests.waiting import until

GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "guides" / "bench.md"
TEXT = GUIDE.read_text()
SMALL = ["--size", "2MiB", "--seconds", "0.05", "--rounds", "1", "--flows", "1,2"]


def test_what_the_guide_says_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    data, said = tmp_path / "data", tmp_path / "said"
    data.mkdir()
    text = TEXT.replace(":4420", f":{free_port()}").replace("/mnt/data", str(data))
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
    served, seen = [], []
    try:
        for line in lines:
            command, *arguments = shlex.split(line)
            assert command == "headrace"
            if arguments[0] == "serve":
                with said.open("w") as out:
                    served.append(
                        subprocess.Popen([sys.executable, "-m", "headrace", *arguments], stdout=out, stderr=out)
                    )
                until(lambda: "control socket" in said.read_text(), said.read_text())
                continue
            small = [*SMALL, "--ranks", "2", "--save", "2MiB"] if "--ranks" not in arguments else SMALL
            status = main([*arguments, *small])
            printed = capsys.readouterr()
            assert status == 0, (line, printed.err, printed.out)
            seen.append(printed.out)
    finally:
        for process in served:
            process.kill()
            process.wait()
    whole, reads, saves = seen
    assert all(name in whole for name in ("sequential ingest", "model load", "feeding while saving", "checkpoint"))
    assert (tmp_path / "bench.html").stat().st_size > 8000 and not [*data.iterdir()]
    assert "random samples" in reads and "1.0 MiB" in reads and "4.0 KiB" in reads
    assert {one["pattern"] for one in json.loads(saves)["outcomes"]} == {"checkpoint", "mixed"}


def test_options_and_patterns_that_are_told_are_there() -> None:
    section = TEXT.partition("## The patterns")[2].partition("## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", section, re.M)) == PATTERNS
    bench = typer.main.get_command(app).commands["bench"].commands["run"]  # type: ignore[attr-defined]
    known = {option for given in bench.params for option in given.opts if option.startswith("--")}
    told = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", TEXT)) - {"--listen", "--nqn"}
    assert told == known
