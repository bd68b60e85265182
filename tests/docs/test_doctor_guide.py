"""The guide of the doctor: what it says to type is typed, and its words and options are those that there are."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from headrace.cli import main
from headrace.cli.app import app
from headrace.doctor.verdict import WORDS
from headrace.testing.serve import free_port
from tests.waiting import until

GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "guides" / "doctor.md"


def test_what_the_guide_says_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    text = GUIDE.read_text().replace(":4420", f":{free_port()}").replace("/tmp/headrace-doctor", f"{tmp_path}/a")
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
    served, said, seen = [], tmp_path / "said", 0
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
            status = main(arguments)
            printed = capsys.readouterr()
            assert status == 0, (line, printed.err, printed.out)
            assert "Storage" in printed.out
            if "--expect" in line:
                assert "Of 1 claims of crusoe/disk: 1 met" in printed.out
            elif "nvme+tcp" in line:
                assert re.search(r"headrace +persistent +none +accepted", printed.out), printed.out
                assert (tmp_path / "doctor.html").stat().st_size > 4000
            seen += 1
    finally:
        for process in served:
            process.kill()
            process.wait()
    assert seen == 5 and len(served) == 1 and (tmp_path / "doctor-record/proc/self/mountinfo").exists()


def test_words_and_options_that_are_told_are_there() -> None:
    text = GUIDE.read_text()
    section = text.partition("## The five words")[2].partition("## ")[0]
    assert tuple(re.findall(r"^\| `([a-z -]+)` \|", section, re.M)) == WORDS
    doctor = typer.main.get_command(app).commands["doctor"]  # type: ignore[attr-defined]
    known = {option for given in doctor.params for option in (*given.opts, *given.secondary_opts)}
    told = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", text)) - {"--listen", "--nqn", "--ntasks-per-node"}
    assert told == {option for option in known if option.startswith("--")} - {"--measure"}
