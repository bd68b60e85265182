"""The picture of the suite `feed`: made where matplotlib is, and refused in words where it is not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks import __main__ as command
from benchmarks import feed, peers
from benchmarks.feed_loaders import LOADERS
from benchmarks.feed_plot import PANELS
from benchmarks.feed_record_loaders import LOADERS as RECORD_LOADERS
from benchmarks.figures import Figure


def test_a_picture_or_why_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "python", lambda: sys.executable)
    tokens = [f"{kind}_{name}" for kind in PANELS if kind != "rate" for name in LOADERS]
    records = [f"records_{kind}_{name}" for kind in PANELS if kind != "samples" for name in RECORD_LOADERS]
    figures = [
        Figure(suite="feed", figure=name, value=number + 0.5, unit="", version="package 1.2")
        for number, name in enumerate([*tokens, *records])
    ]
    # Who offers no states.
    figures[-1] = Figure(suite="feed", figure=records[-1], value=None, unit="offers no states")
    path = tmp_path / "feed.svg"
    if importlib.util.find_spec("matplotlib"):
        feed.plot(figures, str(path))
        drawn = path.read_text()
        assert all(f"<!-- {told} -->" in drawn for told in ("39.5", "68.5", "none", "memmap (package 1.2)"))
    else:
        with pytest.raises(SystemExit, match=r"no picture: .*matplotlib"):
            feed.plot(figures, str(path))
        assert not path.exists()


def test_other_suites_have_no_picture(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["volume", "--plot", "x.png"])
    assert "no picture of suite volume" in capsys.readouterr().err
