"""`headrace bench` as it is typed: what it says before, what comes out, what is refused; Ctrl-C leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.bench import merge
from headrace.bench import suite as suite_module
from headrace.bench.figures import Outcome
from headrace.bench.meeting import Meeting
from headrace.bench.patterns.options import Options
from headrace.bench.places import open_place
from headrace.bench.places.protocol import Place, Tell
from headrace.bench.suite import Result, SuiteOptions, budget_of, run_suite
from headrace.cli import main
from headrace.errors import DeviceTimeout
from headrace.testing.serve import free_port
from headrace.units import MIB
from tests.bench.crew import Crew
from tests.waiting import PATIENCE_S, until

QUICK = ("--size", "2MiB", "--seconds", "0.05", "--rounds", "2", "--flows", "1,2")


def test_a_run_says_what_it_will_do_and_what_came_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder.parent / "bench.html"
    assert (
        main(["bench", str(folder), *QUICK, "-p", "random", "-p", "latency", "-p", "ingest", "--html", str(page)]) == 0
    )
    out, err = capsys.readouterr()
    assert "writes 4.0 MiB at a time" in err and "which it removes" in err
    assert re.search(
        r"6 pieces of work in 2 rounds: about .*, at most .*; writes at most 10\.0 MiB, reads at most", err
    )
    assert re.search(r"random samples +128.0 KiB +2 +read +[\d.]+ \w+/s +± ", out)
    assert "durable when (sequential ingest): fsync" in out and "cache (random samples" in out
    assert out.splitlines()[-1].startswith(f"{folder}: random samples of 128.0 KiB")
    text = page.read_text()
    assert "<svg" in text and "http" not in text.replace("http://www.w3.org", "") and "<script" not in text
    assert "More flows" in text and str(folder) in text
    assert not [*folder.iterdir()]


def test_json_has_every_round(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a").write_bytes(os.urandom(MIB))
    arguments = ["bench", "run", str(folder), *QUICK, "-p", "sequential", "--existing", "--cache", "warm", "--json"]
    assert main(arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["sentence"].startswith(str(folder)) and said["kind"] == "folder" and said["stopped"] == ""
    assert [one["flows"] for one in said["outcomes"]] == [1, 2]
    one = said["outcomes"][0]
    assert one["figures"][0]["n"] == 2 and len(one["rounds"]["read"]) == 2
    assert sum(one["series"]["bytes"]) == one["bytes"] > 0 and one["latencies"]["count"] > 0
    assert any("page cache" in note for note in said["notes"])
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_devices_are_read_and_asked_for_before_they_are_written(
    namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", namespace, *QUICK, "-p", "latency"]) == 0
    assert "writes nothing" in capsys.readouterr().err
    assert main(["bench", namespace, *QUICK, "-p", "ingest"]) == 2
    assert "--scratch" in capsys.readouterr().err
    assert main(["bench", namespace, *QUICK, "-p", "ingest", "--scratch"]) == 2
    err = capsys.readouterr().err
    assert "OVERWRITES" in err and "--yes" in err
    assert main(["bench", namespace, *QUICK, "-p", "ingest", "--scratch", "--yes"]) == 0
    assert "takes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--pattern", "everything"), "no such pattern"),
        (("--flows", "1,,2"), "--flows"),
        (("--flows", "0"), "flows"),
        (("--flows", "99999"), "flows"),
        (("--flows", "²"), "--flows"),
        (("--sample", "lots"), "--sample"),
        (("--sample", "1"), "request_bytes"),
        (("--size", "0"), "size"),
        (("--save", "1"), "save"),
        (("--seconds", "nan"), "seconds"),
        (("--rounds", "-1"), "rounds"),
        (("--limit", "inf"), "limit"),
        (("--depth", "0"), "depth"),
        (("--flows", "256", "--depth", "256"), "flows times depth"),
        (("--flows", "64", "--depth", "64", "--sample", "256MiB"), "memory"),
        (("--cache", "cold"), "cache"),
        (("--model", "9b", "-p", "checkpoint"), "layout"),
        (("--ranks", "9", "-p", "checkpoint"), "ranks"),
        (("--scale", "2"), "scale"),
        (("--scale", "nan"), "scale"),
        (("--existing",), "no files"),
        (("--scratch",), "--scratch"),
        (("--size", "9EiB"), "--size"),
        (("--size", "900TiB"), "too little space"),
        (("--html", "/no/such/folder/a.html"), "no folder"),
        (("--html", "/"), "a folder"),
        (("--html", "/dev/null"), "a device"),
    ],
)
def test_what_cannot_be_meant_is_one_line_before_any_work(
    folder: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.chmod(0o555)
    try:
        assert main(["bench", str(folder), *QUICK, *arguments]) == 2
    finally:
        folder.chmod(0o755)
    out, err = capsys.readouterr()
    assert not out and said in err.splitlines()[-1] and len(err.splitlines()) == 1, err
    assert not [*folder.iterdir()]


class Clock:
    """That of the suite, put forward."""

    ahead_s = 0.0
    time, sleep = staticmethod(time.time), staticmethod(time.sleep)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (suite_module, merge):
        monkeypatch.setattr(module, "time", made)
    return made


def test_time_that_is_up_ends_it_with_what_there_is(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = SuiteOptions(
        patterns=["latency", "sequential"], flows=[1], size_bytes=2 * MIB, seconds=0.05, rounds=50, limit_s=3600,
        cache="warm",
    )  # fmt: skip
    read = suite_module._RUN["sequential"]

    def last(place: Place, options: Options, tell: Tell) -> Outcome:
        clock.ahead_s = 2 * 3600
        return read(place, options, tell)

    monkeypatch.setitem(suite_module._RUN, "sequential", last)
    with open_place(str(folder)) as place:
        result = run_suite(place, suite, budget_of(place, suite), lambda fraction, text: None)
    assert ", 2 of 100 rounds: " in result.stopped
    assert [one.pattern for one in result.outcomes] == ["latency", "sequential"]


def test_time_that_is_up_ends_a_load_of_several_ranks_with_what_there_is(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all of them alike, whichever it is that does not come to its end."""
    suite = SuiteOptions(
        patterns=["latency", "load"], flows=[1], size_bytes=2 * MIB, seconds=0.05, rounds=1, limit_s=3600, cache="warm"
    )
    load = suite_module._RUN["load"]
    other_ended = threading.Event()

    def slow(place: Place, options: Options, tell: Tell) -> Outcome:
        if threading.current_thread().name != "rank-1":
            found = load(place, options, tell)
            other_ended.set()
            return found
        assert other_ended.wait(PATIENCE_S)
        clock.ahead_s = 2 * 3600
        tell(0.1, "model load")
        raise AssertionError("it goes on")

    def work(meeting: Meeting) -> Result:
        with open_place(str(folder)) as place:
            return run_suite(place, suite, budget_of(place, suite), lambda fraction, text: None, meeting)

    monkeypatch.setitem(suite_module._RUN, "load", slow)
    found = Crew(work, [0, 1], 2, join_s=PATIENCE_S, port=free_port()).join()
    for rank in (0, 1):
        assert isinstance(found[rank], Result), found
        assert found[rank].stopped.startswith("stopped in the middle of round 2 of 2"), found
        assert [one.pattern for one in found[rank].outcomes] == ["latency"]


def test_time_that_is_up_while_data_are_written_is_an_error(folder: Path) -> None:
    suite = SuiteOptions(patterns=["latency"], flows=[1], size_bytes=2 * MIB)
    with open_place(str(folder)) as place, pytest.raises(DeviceTimeout, match="before what is read was written"):
        run_suite(place, suite, replace(budget_of(place, suite), limit_s=0.0), lambda fraction, text: None)
    (folder / "a").write_bytes(bytes(MIB))
    with open_place(str(folder), existing=True) as place:
        budget = replace(budget_of(place, suite), limit_s=0.0)
        assert budget.write_bytes == 0
        with pytest.raises(DeviceTimeout, match="before the first round"):
            run_suite(place, suite, budget, lambda fraction, text: None)
    assert [path.name for path in folder.iterdir()] == ["a"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(folder: Path, number: signal.Signals) -> None:
    """While it writes what is read, or reads; or while ranks save."""
    pattern = "random" if number == signal.SIGINT else "checkpoint"
    command = [
        sys.executable,
        "-m",
        "headrace",
        "bench",
        str(folder),
        "-p",
        pattern,
        "--rounds",
        "100",
        "--seconds",
        "60",
    ]
    process = subprocess.Popen(
        [*command, "--size", "64MiB", "--ranks", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: [*folder.rglob("*.pt" if pattern == "checkpoint" else "data/*")], "it writes")
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number, err
    assert err.splitlines()[-1] == "headrace: error: interrupted", err
    assert not [*folder.iterdir()]
