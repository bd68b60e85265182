"""The guide to checkpoints: its commands run, in their order, on a run that was saved before; its options are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from headrace.checkpoint import list_checkpoints
from headrace.cli import main
from headrace.cli.app import app
from headrace.volume import Volume

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "checkpoints.md"


def test_its_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    from headrace.torch import VolumeWriter

    monkeypatch.chdir(tmp_path)
    Volume.create("file:a.img?create=32MiB").close()
    with VolumeWriter("file:a.img", "pretrain") as writer:
        for step in (100, 200):
            model = {"w": torch.full((10, 10), float(step)), "b": torch.ones(10)}
            writer.save({"model": model, "step": step}, f"pretrain/step-{step}")
    said: dict[str, str] = {}
    for code in re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(), re.M | re.S):
        for line in code.splitlines():
            command, *arguments = shlex.split(line)
            if command == "export":
                monkeypatch.setenv(*arguments[0].split("=", 1))
                continue
            assert command == "headrace"
            status = main(arguments)
            out, err = capsys.readouterr()
            assert status == 0, f"{line}: {err}"
            said[line] = out
    assert (
        "model.w\tdiffers\t100\t100\t100\t100" in said["headrace checkpoint diff pretrain/step-100 pretrain/step-200"]
    )
    assert (tmp_path / "model" / "model.safetensors").exists()
    with Volume.open("file:a.img") as volume:
        assert [str(info.id) for info in list_checkpoints(volume)] == [
            "elsewhere/step-00000100",
            "pretrain/step-00000200",
        ]
    assert "every byte is good" in said["headrace checkpoint verify pretrain"]


def test_the_commands_and_options_that_are_told_are_there() -> None:
    group: Any = typer.main.get_command(app).commands["checkpoint"]  # type: ignore[attr-defined]
    part = GUIDE.read_text().split("## On the command line")[1].split("\n## ")[0]
    for name in group.commands:
        assert f"headrace checkpoint {name} " in part or f"headrace checkpoint {name}\n" in part, name
    known = {option for command in group.commands.values() for given in command.params for option in given.opts}
    told = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", part))
    assert len(told) > 2 and told <= known
