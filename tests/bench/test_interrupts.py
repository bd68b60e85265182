"""Ctrl-C at moments that come seldom: while threads are started, while what was written is removed."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.bench.patterns import ingest, sequential
from headrace.bench.patterns.options import Options
from headrace.bench.places import open_place
from headrace.bench.places.protocol import Place
from headrace.units import MIB

OPTIONS = Options(flows=3, seconds=0.05, budget_bytes=4 * MIB, cache="warm")


def _quiet(fraction: float, text: str) -> None:
    """Of progress."""


def _prepare(place: Place) -> None:
    place.prepare(2 * MIB, tell=_quiet)


@pytest.mark.parametrize(
    "work",
    [_prepare, lambda place: ingest.run(place, OPTIONS, _quiet), lambda place: sequential.run(place, OPTIONS, _quiet)],
    ids=["writing what is read", "ingest", "reading"],
)
def test_while_threads_are_started_it_is_heard(
    folder: Path, work: Callable[[Place], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Thread.start` waits for the thread to begin, and is where Ctrl-C finds who starts several: those that come after
    cannot be joined."""
    begin = threading.Thread.start
    started: list[str] = []

    def start(self: threading.Thread) -> None:
        if threading.current_thread() is threading.main_thread():
            started.append(self.name)
            if len(started) == 2:
                raise KeyboardInterrupt
        begin(self)

    with pytest.raises(KeyboardInterrupt), open_place(str(folder)) as place:
        if work is not _prepare:
            _prepare(place)
        monkeypatch.setattr(threading.Thread, "start", start)
        work(place)
    assert started[0].startswith("bench-") and not [*folder.iterdir()]
    assert not [one for one in threading.enumerate() if one.name == started[0]]


def test_while_what_was_written_is_removed_it_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it comes."""
    remove = shutil.rmtree

    def interrupted(path: str, ignore_errors: bool = False) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        # Who does not wait for this has left the folder by then.
        time.sleep(0.2)
        remove(path, ignore_errors=ignore_errors)

    with pytest.raises(KeyboardInterrupt), open_place(str(folder)) as place:
        _prepare(place)
        monkeypatch.setattr(shutil, "rmtree", interrupted)
    assert not [*folder.iterdir()]
