"""Steps that somebody asks a running job to keep: pinned with its next commit, before retention comes to them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from headrace.checkpoint import CheckpointId, Retention, list_checkpoints
from headrace.checkpoint.requests import ask
from headrace.checkpoint.retention import read_pin
from headrace.errors import UsageError
from headrace.volume import Session, Volume
from tests.checkpoint.steps import save_step


def test_a_step_that_is_asked_for_stays(
    session: Session, volume: Volume, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "asked"
    folder.mkdir()
    keeps = {"retention": Retention(keep_last=1), "pin_requests": str(folder)}
    for step in (1, 2):
        save_step(session, step, retention=Retention(keep_last=2))
    save_step(session, 1, run="other")
    file = ask(folder, CheckpointId("run", 1), "before the spike")
    # Asked for twice; asked of another job; the step that comes with the commit; one that is not there any more.
    ask(folder, CheckpointId("run", 1), "again")
    others = ask(folder, CheckpointId("other", 1))
    ask(folder, CheckpointId("run", 3))
    ask(folder, CheckpointId("run", 99))
    # What is no request is nobody's business here.
    strange = [folder / "notes.txt", folder / "pin-0123456789abcdef.json"]
    for path in strange:
        path.write_text("[" * 10_000)
    strange += [folder / "pin-00000000000000aa.json", folder / "pin-00000000000000bb.json"]
    # An open of it would wait for somebody who writes; and a note that is longer in a pin than here.
    os.mkfifo(strange[-2])
    strange[-1].write_text(f'{{"checkpoint": "run/step-2", "note": "{"é" * 2000}"}}')
    save_step(session, 3, **keeps)
    assert [(info.step, info.pinned) for info in list_checkpoints(volume, "run")] == [(1, True), (3, True)]
    pin = read_pin(volume, CheckpointId("run", 1))
    assert pin is not None and pin.note in ("before the spike", "again")
    assert not file.exists() and set(folder.iterdir()) == {others, *strange}
    assert any("run/step-00000099 is not there" in record.getMessage() for record in caplog.records)
    # Nobody asks any more: nothing is pinned again.
    save_step(session, 4, **keeps)
    assert [(info.step, info.pinned) for info in list_checkpoints(volume, "run")] == [(1, True), (3, True), (4, False)]


def test_a_folder_that_is_not_there_keeps_no_save_from_its_commit(
    session: Session, volume: Volume, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "headrace"):
        save_step(session, 1, pin_requests=str(tmp_path / "nowhere"))
    assert [info.step for info in list_checkpoints(volume, "run")] == [1]
    assert "nobody can ask for pins" in caplog.text
    with pytest.raises(OSError, match="nowhere"):
        ask(tmp_path / "nowhere", CheckpointId("run", 1))
    with pytest.raises(UsageError, match="too long"):
        ask(tmp_path, CheckpointId("run", 1), "x" * 5000)
    assert not list(tmp_path.glob("pin-*"))
