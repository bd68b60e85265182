"""The guide of long runs, emulated accelerators and comparisons: what it says to type is typed (in small)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from headrace.bench.accelerators.bracket import NEAR, REPEATS
from headrace.bench.compare import CHANCE, LEAST, rounds_needed
from headrace.bench.meeting import DEFAULT_PORT, JOIN_S
from headrace.bench.sustained import LEAST_CHANGE, LEAST_SHARE, LEAST_SLOTS
from headrace.cli import main

TEXT = (Path(__file__).resolve().parent.parent.parent / "docs" / "guides" / "bench-accelerators.md").read_text()
SMALL = {
    "sustained": ["--seconds", "0.3", "--size", "4MiB", "--flows", "1"],
    "accelerators": ["--seconds", "0.05", "--size", "64MiB", "--compute", "0.01", "--most", "2", "--batch", "1"],
    "compare": ["--seconds", "0.05", "--size", "2MiB", "--rounds", "1"],
}


def test_what_the_guide_says_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "nfs").mkdir()
    (tmp_path / "samples").mkdir()
    for number in range(4):
        for kind in ("jpg", "txt"):
            (tmp_path / "samples" / f"{number}.{kind}").write_bytes(bytes(5000))
    blocks = re.findall(r"^```sh\n(.*?)^```", TEXT, re.M | re.S)
    lines = [line for block in blocks for line in block.replace("/mnt/", f"{tmp_path}/").splitlines()]
    for line in lines:
        command, bench, name, *arguments = shlex.split(line)
        assert (command, bench) == ("headrace", "bench")
        small = [] if "--list" in arguments else SMALL[name]
        status = main([bench, name, *arguments, *small])
        assert status == 0, (line, capsys.readouterr())
    pages = sorted(path.name for path in tmp_path.glob("*.html"))
    assert pages == ["accelerators.html", "compare.html", "sustained.html"]
    assert not [*(tmp_path / "data").iterdir(), *(tmp_path / "nfs").iterdir()]


def test_the_numbers_of_the_guide_are_those_of_the_code() -> None:
    assert (LEAST_CHANGE, LEAST_SHARE, LEAST_SLOTS) == (0.15, 0.03, 5)
    assert (NEAR, REPEATS, CHANCE, LEAST, JOIN_S) == (0.02, 3, 0.05, 0.03, 60)
    assert rounds_needed(3, 2) == 7 and str(DEFAULT_PORT) in TEXT
