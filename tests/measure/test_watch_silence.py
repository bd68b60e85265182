"""A step that never ended is in no file: a job that hangs is not told as one whose storage is fine."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from headrace.cli import main
from headrace.cli.watch import show
from headrace.measure.watch.join import recent
from headrace.measure.watch.silence import waiting
from tests.measure.watches import header, step, write


def job(folder: Path, began_s: float, steps: int = 9) -> Path:
    lines = [header(0, 1), *(step(n, began_s + n, compute=1.0) for n in range(steps))]
    return write(folder / "rank-00000.jsonl", lines)


def test_a_black_box_behind_the_last_step_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    box, html = job(tmp_path, 1000.0).with_suffix(".blackbox"), tmp_path / "page.html"
    box.touch()
    for ended, told in ((1009.0 + 20.0, True), (1009.0 + 4.0, False), (1000.0, False)):
        os.utime(box, (ended, ended))
        assert main(["watch", "show", str(tmp_path), "--html", str(html)]) == 0
        sentence = capsys.readouterr().out.splitlines()[0]
        assert sentence.startswith("Storage is not your problem")
        assert ("A black box was written 20.0 s after the last one had" in sentence) is told
        assert ("watch explain" in html.read_text()) is told
        assert main(["watch", "show", str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["sentence"] == sentence


def test_who_follows_a_job_hears_that_no_step_ends(tmp_path: Path) -> None:
    found = recent([job(tmp_path, 1000.0)])
    assert not waiting(found, 1009.0 + 4.9)
    assert waiting(found, 1009.0 + 30.0).startswith(
        "No step has ended for 30.0 s, where half of them took less than 1.0 s"
    )
    # Long steps, short steps with a long one among them: nothing is late yet.
    write(tmp_path / "rank-00000.jsonl", [header(0, 1), *(step(n, n * 20.0, compute=20.0) for n in range(5))])
    assert not waiting(recent([tmp_path / "rank-00000.jsonl"]), 100.0 + 59.0)
    assert waiting(recent([tmp_path / "rank-00000.jsonl"]), 100.0 + 61.0)


def test_following_says_it_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job(tmp_path, 1000.0)

    def enough(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", enough)
    monkeypatch.setattr(time, "time", lambda: 1060.0)
    main(["watch", "show", str(tmp_path), "--follow"])
    assert capsys.readouterr().out.startswith("No step has ended for 51.0 s")
    Console(width=200).print(show._view(recent([tmp_path / "rank-00000.jsonl"]), None, 200))
    assert capsys.readouterr().out.startswith("No step has ended for 51.0 s")
