"""The guide of the drill: what it says to type is typed, with less to save and a quicker heart."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import typer

from headrace.cli.app import app
from headrace.drill.run import SCENARIOS

GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "guides" / "drill.md"


def test_what_the_guide_says_works() -> None:
    (line,) = re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    command, *arguments = shlex.split(line)
    assert command == "headrace"
    answer = subprocess.run(
        [sys.executable, "-m", "headrace", *arguments, "--size", "256KiB", "--heartbeat", "0.5", "--json"],
        capture_output=True, text=True, timeout=280, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["trusted"] and report["fence"] == "persistent"
    found = {one["scenario"]: one for one in report["scenarios"]}
    assert list(found) == list(SCENARIOS) and all(one["whole"] for one in found.values())
    for name in ("freeze", "cut", "takeover"):
        one = found[name]
        assert one["refused"] + one["held_back"] > 0 and one["late_commit"].startswith("SessionLost"), one
        assert [text.split(":")[0] for text in one["refusals"]] == ["rank 0", "rank 1"], one
        assert one["moved_bytes"] == 0 and one["watched_bytes"] == 48 << 20, one
        # Less what was under way, and aborted, when the other one took over.
        assert one["refused_by_target"] is not None, one
        # That of who took over, two after the one that the job had saved: its own next one was never committed.
        before, last = (int(one[key].removeprefix("step-")) for key in ("acknowledged", "last_step"))
        assert last == before + 2
    assert found["restart"]["last_step"] > found["restart"]["acknowledged"] and len(found["restart"]["did"]) == 3
    assert found["kill"]["last_step"] > found["kill"]["acknowledged"]


def test_scenarios_and_options_that_are_told_are_there() -> None:
    text = GUIDE.read_text()
    table = re.findall(r"^\| `(\w+)` \|", text, re.M)
    assert table == list(SCENARIOS)
    drill = typer.main.get_command(app).commands["drill"]  # type: ignore[attr-defined]
    known = {option for given in drill.params for option in given.opts if option.startswith("--")}
    assert set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", text)) == known
