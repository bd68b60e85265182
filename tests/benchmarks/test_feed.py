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
from benchmarks.figures import Figure


def test_a_picture_or_why_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "python", lambda: sys.executable)
    names = [f"{kind}_{name}" for kind in PANELS for name in LOADERS]
    figures = [Figure(suite="feed", figure=name, value=number + 0.5, unit="") for number, name in enumerate(names)]
    path = tmp_path / "feed.svg"
    if importlib.util.find_spec("matplotlib"):
        feed.plot(figures, str(path))
        assert "31.5" in path.read_text(), "the last value of the last panel"
    else:
        with pytest.raises(SystemExit, match=r"no picture: .*matplotlib"):
            feed.plot(figures, str(path))
        assert not path.exists()


def test_other_suites_have_no_picture(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["volume", "--plot", "x.png"])
    assert "no picture of suite volume" in capsys.readouterr().err
