"""The job that the guide to checkpoints shows, run as it stands: begun, told to stop, gone on with."""

from __future__ import annotations

import builtins
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.volume import Volume

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "checkpoints.md"


def the_job() -> Callable[[list[str], int], None]:
    [code] = [
        code for code in re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S) if "def train(" in code
    ]
    names: dict[str, Any] = {}
    exec(compile(code, str(GUIDE), "exec"), names)
    train: Callable[[list[str], int], None] = names["train"]
    return train


def test_the_job_of_the_guide_resumes_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from tests.dataset.corpora import ingest_texts

    said = {}
    for name, parts in (("unbroken", [6]), ("broken", [2, 4, 6])):
        folder = tmp_path / name
        folder.mkdir()
        uris = [f"file:{folder}/member"]
        with Volume.create([f"{uris[0]}?create=32MiB"]) as volume:
            ingest_texts(volume, folder, count=40)
        torch.manual_seed(1)
        for steps in parts:
            the_job()(uris, steps)
            # Nothing but the checkpoint may carry over.
            torch.manual_seed(steps)
        said[name] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(said["unbroken"]) == 6 and said["broken"] == said["unbroken"]

    # Told to stop in step 8 of 100.
    def told(text: str) -> None:
        if text.startswith("step 8 "):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(builtins, "print", lambda *words, **_: told(str(words[0])))
    the_job()(uris, 100)
    monkeypatch.undo()
    the_job()(uris, 9)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")] == ["9"]
