"""Long commands on a real terminal: a bar while they run, the cursor back and no bar left when they end."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.cli.output import print_sentence
from headrace.volume import Volume

BAR, HIDE, SHOW = "━", "\x1b[?25l", "\x1b[?25h"


def test_a_sentence_on_a_terminal_is_folded_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = f"by path 10.0.0.1:4420 to {'nqn.' + 60 * 'x'}, which is slower than the others"
    print_sentence(sentence)
    assert capsys.readouterr().out == sentence + "\n"
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_sentence(sentence)
    lines = capsys.readouterr().out.splitlines()
    # What a person copies, as an address, stays whole.
    assert len(lines) > 2 and " ".join(lines) == sentence


def start(*arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """`headrace ARGUMENTS` with a terminal for standard error, and our end of that."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "headrace.cli", *arguments]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=theirs, env=environment
    )
    os.close(theirs)
    return process, ours


def hear(ours: int, until: str | None = None) -> str:
    """What the command writes, until that is in it or the command has ended."""
    heard = b""
    end = time.monotonic() + 60
    while until is None or until.encode() not in heard:
        assert select.select([ours], [], [], max(0.0, end - time.monotonic()))[0], heard.decode(errors="replace")
        try:
            piece = os.read(ours, 65536)
        except OSError:
            # A terminal whose other end is closed.
            break
        if not piece:
            break
        heard += piece
    return heard.decode(errors="replace")


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("progress")
    uri = f"file:{folder / 'member'}"
    with Volume.create([f"{uri}?create=160MiB"]) as volume, volume.session() as session, session.transaction() as tx:
        tx.put("blob", os.urandom(48 << 20))
    return uri


@pytest.mark.parametrize("command", ["verify", "scrub", "cp", "salvage"])
def test_a_bar_is_drawn_and_taken_away(command: str, volume: str, tmp_path: Path) -> None:
    more = {"cp": [":blob", str(tmp_path / "blob"), "-V", volume], "salvage": [volume]}
    process, ours = start("volume", command, *more.get(command, [volume]))
    heard = hear(ours)
    os.close(ours)
    assert process.wait(60) == 0, heard
    assert BAR in heard and "Traceback" not in heard
    assert heard.count(HIDE) == heard.count(SHOW) > 0 and heard.rindex(SHOW) > heard.rindex(BAR)


def test_an_interrupted_command_leaves_the_terminal_as_it_was(volume: str) -> None:
    # So slow that it cannot end by itself.
    process, ours = start("volume", "scrub", volume, "--rate", "1MiB")
    heard = hear(ours, until=BAR)
    process.send_signal(signal.SIGINT)
    heard += hear(ours)
    os.close(ours)
    assert process.wait(60) == 130, heard
    assert "Traceback" not in heard and heard.count(HIDE) == heard.count(SHOW)
