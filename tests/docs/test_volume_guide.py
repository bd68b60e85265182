"""The guide of the volume: its commands run, in its order, in one folder."""

from __future__ import annotations

import filecmp
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from headrace.cli.app import app
from headrace.volume import Volume

GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "guides" / "volume.md"


def test_what_the_guide_says_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results"
    (results / "plots").mkdir(parents=True)
    (results / "metrics.json").write_text('{"loss": 2.25}\n')
    (results / "run.log").write_text("step 1\n" * 1000)
    (results / "plots" / "loss.bin").write_bytes(bytes(range(256)) * 20_000)
    said: dict[str, str] = {}
    for code in re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(), re.M | re.S):
        for line in code.splitlines():
            command, *arguments = shlex.split(line)
            if command == "export":
                monkeypatch.setenv(*arguments[0].split("=", 1))
                continue
            assert (command, arguments[0]) == ("headrace", "volume")
            into = None
            if ">" in arguments:
                into = tmp_path / arguments[-1]
                arguments = arguments[:-2]
            answer = subprocess.run(
                [sys.executable, "-m", "headrace", *arguments],
                cwd=tmp_path, capture_output=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            assert answer.returncode == 0, f"{line}: {answer.stderr.decode()}"
            said[line] = answer.stdout.decode()
            if into is not None:
                into.write_bytes(answer.stdout)
    for name in ("metrics.json", "run.log", "plots/loss.bin"):
        assert filecmp.cmp(results / name, tmp_path / "restored" / name, shallow=False)
    assert (tmp_path / "metrics.json").read_text() == (results / "metrics.json").read_text()
    with Volume.open([f"file:{tmp_path}/{name}.img" for name in "ab"]) as volume:
        assert [info.name for info in volume.list()] == [
            "archive/results/metrics-1.json",
            "archive/results/metrics.json",
            "archive/results/plots/loss.bin",
        ]
    assert filecmp.cmp(
        results / "plots" / "loss.bin",
        tmp_path / "rescued" / "archive" / "results" / "plots" / "loss.bin",
        shallow=False,
    )
    assert "4 objects" in next(text for line, text in said.items() if "--prefix archive/ --yes" in line)


def test_every_command_and_the_options_that_are_told_are_there() -> None:
    text = GUIDE.read_text()
    volume = typer.main.get_command(app).commands["volume"]  # type: ignore[attr-defined]
    for name in volume.commands:
        assert re.search(rf"\b{name}\b", text), name
    known = {option for command in volume.commands.values() for given in command.params for option in given.opts}
    told = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", text))
    assert len(told) > 15 and told <= known


def test_the_python_that_follows_a_volume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    shorter = re.sub(r"timeout_s=\d+", "timeout_s=0.1", first)
    assert shorter.count("timeout_s=0.1") == 2
    with Volume.create(f"file:{tmp_path}/a.img?create=16MiB") as volume, volume.session() as session:
        with session.transaction() as tx:
            tx.put("shards/00017.bin", b"tokens")
        names = {"uris": volume.uris, "volume": volume}
        exec(compile(shorter, str(GUIDE), "exec"), names)
        assert names["info"].length_bytes == 6 and capsys.readouterr().out == ""  # type: ignore[attr-defined]
        names["volume"] = volume
        exec(compile(second, str(GUIDE), "exec"), names)
        assert names["sequence"] == volume.sequence
