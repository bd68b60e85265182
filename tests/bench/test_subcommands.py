"""`headrace bench sustained`, `accelerators` and `compare` as they are typed; several ranks as torchrun starts them."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from headrace.accidents.relay import Relay
from headrace.bench.accelerators.run import Emulation, run
from headrace.bench.accelerators.workloads import Workload
from headrace.bench.figures import Series
from headrace.bench.meeting import Meeting
from headrace.bench.patterns import sustained, sustained_write
from headrace.bench.patterns.flows import Measured
from headrace.bench.patterns.options import Options
from headrace.bench.places import open_place
from headrace.cli import main
from headrace.testing.serve import free_port
from headrace.units import KIB, MIB
from headrace.volume import Volume
from tests.bench.conftest import target
from tests.bench.crew import Crew
from tests.waiting import PATIENCE_S


def quiet(fraction: float, text: str) -> None:
    """Progress that nobody looks at."""


@contextmanager
def behind_a_link(bytes_per_s: float) -> Iterator[tuple[str, Relay]]:
    """A namespace in memory, the way to which carries so much."""
    with target() as serving:
        uri = urlsplit(serving.uri())
        assert uri.port is not None
        with Relay(uri.port, bytes_per_s=bytes_per_s) as relay:
            yield serving.uri().replace(f":{uri.port}", f":{relay.port}"), relay


# ---- sustained ----


def test_a_path_that_is_throttled_on_the_way_is_found() -> None:
    """A namespace behind a link that falls to a tenth, as one that is out of credits."""
    for _ in range(3):
        with behind_a_link(5e6) as (uri, relay), open_place(uri) as place:
            place.prepare(8 * MIB, tell=quiet)
            options = Options(flows=2, depth=8, seconds=4.0, request_bytes=4 * KIB)
            falls = threading.Timer(2.0, relay.limit, [0.5e6])
            falls.start()
            outcome, found = sustained.run(place, options, quiet)
            falls.join()
        first, last = found.segments[0], found.segments[-1]
        # It is never faster than its link, whatever else the machine does; that may be a level of its own.
        assert last.rate <= 5.5e6 and outcome.figure("lasts").value == last.rate
        if found.kind == "throttled" and first.rate > 3 * last.rate and 1.0 < last.start_s < 3.5:
            break
    else:
        pytest.fail(f"not found three times: {found}")
    assert re.search(r"reading: .* then .*: a burst credit of about [\d.]+ MB, or throttling", outcome.notes[0])


def test_a_path_that_stands_at_the_end_is_not_steady(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was under way when the time was up comes late, and is not counted: the series ends where the path stood."""
    series = Series(started_s=0.0, every_s=0.1, bytes=[300 * MIB] * 30)
    measured = Measured(
        bytes=series.total_bytes, requests=1, seconds=2.99, series=series, latencies=None, exhausted=False
    )
    monkeypatch.setattr(sustained, "measure", lambda *_: measured)
    with open_place(str(folder)) as place:
        place.prepare(4 * MIB, tell=quiet)
        outcome, found = sustained.run(place, Options(seconds=6.0), quiet)
    assert found.kind == "stopped" and "did not go on within 3 s" in found.sentence
    assert outcome.seconds == 6.0


def test_sustained_reads_and_writes_as_typed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder.parent / "page.html"
    small = ("--seconds", "0.8", "--size", "4MiB", "--flows", "1")
    assert main(["bench", "sustained", str(folder), *small, "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    assert "reads for 800.0 ms, at most 1.1 TB" in err and "which it removes" in err
    assert out.splitlines()[-1].startswith(f"{folder}: reading: ") and "cache: past the page cache" in out
    assert "<svg" in page.read_text()
    assert main(["bench", "sustained", str(folder), *small, "--write", "--most", "512MiB", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["sentence"].startswith("writing: ") and said["outcome"]["durable"]
    # However short, it has a rate.
    assert said["segments"][0]["rate"] > 0
    # Two files, written over and over for as long as the time or the budget allows.
    assert 64 * MIB <= said["outcome"]["bytes"] <= 2 * 512 * MIB
    assert [*folder.iterdir()] == []
    assert main(["bench", "sustained", str(folder), "--html", str(folder / "no" / "page.html")]) == 2


def test_a_volume_is_written_for_long_where_that_is_allowed(volume: str) -> None:
    options = Options(flows=1, seconds=0.2, budget_bytes=16 * MIB)
    with open_place(f"headrace://{volume}", scratch=True) as place:
        assert sustained_write.room_bytes(place, options, 0) == 64 * MIB
        with pytest.raises(Exception, match="space"):
            sustained_write.run(place, options, quiet)


# ---- accelerators ----

SMALL = Workload(name="small", batch=4, sample_bytes=32 * KIB, compute_s=0.02)


def test_accelerators_of_a_place_are_fed_by_what_its_link_gives() -> None:
    """Each asks for 6.5 MB/s; the link gives 30, of which the protocol takes little: four, fewer on a busy machine."""
    with behind_a_link(30e6) as (uri, _), open_place(uri) as place:
        found = run(place, SMALL, most=16, seconds=0.8, budget_s=60, data_bytes=16 * MIB, tell=quiet)
    assert found.found.complete and found.found.fails_at == found.found.largest + 1
    # Never more than the link can carry.
    assert found.found.largest <= 5, found.sentence
    assert found.best is None or found.best.rate <= 36e6
    assert found.host is not None and found.host.accelerators == found.found.fails_at


def test_the_search_ends_where_the_data_do(folder: Path) -> None:
    easy = Workload(name="easy", batch=1, sample_bytes=MIB, compute_s=0.01, au=0.02)
    with open_place(str(folder)) as place:
        found = run(place, easy, most=16, seconds=0.05, budget_s=60, data_bytes=3 * MIB, tell=quiet)
    assert (found.found.largest, found.found.complete) == (3, True)
    assert any("the data hold 3 samples" in note for note in found.notes)


def test_ranks_with_other_batches_do_not_measure(namespace: str) -> None:
    def work(meeting: Meeting) -> Emulation:
        mine = Workload(name="small", batch=4 + meeting.seat.rank, sample_bytes=32 * KIB, compute_s=0.02)
        with open_place(namespace) as place:
            return run(place, mine, most=3, seconds=0.1, budget_s=60, data_bytes=MIB, meeting=meeting, tell=quiet)

    found = Crew(work, [0, 1], 2, join_s=PATIENCE_S, port=free_port()).join()
    assert all("rank 1 (node1) measures something else" in str(one) for one in found.values()), found


def test_an_empty_volume_is_written_first_where_that_is_allowed(
    volume: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["-w", "resnet50-h100", "--batch", "4", "--size", "8MiB", "--seconds", "0.05", "-n", "1"]
    assert main(["bench", "accelerators", f"headrace://{volume}", *small]) != 0
    assert "--scratch" in capsys.readouterr().err
    assert main(["bench", "accelerators", f"headrace://{volume}", *small, "--scratch", "--yes"]) == 0
    with Volume.open(volume) as opened:
        assert list(opened.list()) == []


def test_a_machine_that_cannot_emulate_so_fast_is_not_taken_for_slow_storage(namespace: str) -> None:
    """Steps of half a millisecond, of which sleeping alone takes a tenth more."""
    fast = Workload(name="fast", batch=1, sample_bytes=4 * KIB, compute_s=0.0005, au=0.99)
    with open_place(namespace) as place:
        found = run(place, fast, most=4, seconds=0.2, budget_s=60, data_bytes=MIB, tell=quiet)
    assert found.host_limits and found.found.largest == 0
    assert "It is not storage that ends it: without any reads AU of 1 is " in found.sentence


def test_files_are_read_whole_each_opened_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image and its caption are a sample: never half of one, and no file stays open for the next read."""
    length = {f"{number:02}.{kind}": 1000 * number + most for number in range(1, 9) for kind, most in
              (("jpg", 300), ("txt", 7))}  # fmt: skip
    for name, size in length.items():
        (tmp_path / name).write_bytes(bytes(size))
    opened: list[str] = []
    read: list[tuple[int, int]] = []
    real_open, real_read = os.open, os.preadv

    def noted_open(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if threading.current_thread().name == "bench-read":
            opened.append(Path(path).name)
        return real_open(path, flags, mode, dir_fd=dir_fd)

    def noted_read(file: int, into: list[memoryview], offset: int) -> int:
        got = real_read(file, into, offset)
        read.append((offset, got))
        return got

    monkeypatch.setattr(os, "open", noted_open)
    monkeypatch.setattr(os, "preadv", noted_read)
    words = f"accelerators {tmp_path} --existing --whole-files -n 2 --batch 2 --compute 0.01 --depth 4 --seconds 0.1"
    assert main(["bench", *words.split(), "--cache", "warm", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    mean = sum(length.values()) // 8
    assert said["workload"]["sample_bytes"] == mean and f"files of {mean:,} bytes" in said["workload"]["name"]
    # Eight samples were read, and again after that, each file as often as it was opened, from its begin to its end.
    assert set(opened) == set(length) and len(read) == len(opened) > 2 * len(length)
    assert sorted(read) == sorted((0, length[name]) for name in opened)
    moved = said["trials"][0]["bytes"]
    assert moved and moved <= sum(got for _, got in read)
    for wrong in (["--sample", "4KiB"], ["--per-file", "3"]):
        assert main(["bench", *words.split(), *wrong]) == 2
    assert main(["bench", *words.replace("--existing", "").split()]) == 2
    assert main(["bench", "accelerators", "mem:1MiB", "--existing", "--whole-files"]) == 2


def test_ranks_emulate_their_share_and_have_one_answer(namespace: str) -> None:
    def work(meeting: Meeting) -> Emulation:
        with open_place(namespace) as place:
            return run(
                place, SMALL, most=3, seconds=0.2, budget_s=60, start=3, data_bytes=8 * MIB, meeting=meeting, tell=quiet
            )

    found = Crew(work, [0, 1], 2, join_s=PATIENCE_S, port=free_port()).join()
    assert all(isinstance(one, Emulation) for one in found.values()), found
    assert found[0].found == found[1].found
    for one in found.values():
        assert one.ranks == 2 and all(len(trial.each) == trial.accelerators for trial in one.trials)
        assert one.trials[0].accelerators == 3
        assert any("not across nodes" in note for note in one.notes)


def test_accelerators_as_typed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder.parent / "page.html"
    small = ["-w", "resnet50-h100", "--batch", "4", "--compute", "0.01", "--size", "8MiB", "--seconds", "0.1"]
    assert main(["bench", "accelerators", str(folder), *small, "-n", "2", "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    assert "which it removes" in err and "about" in err
    assert out.splitlines()[-1].startswith("resnet50-h100, changed: ") and re.search(r"^ +2 +\d+\.\d%", out, re.M)
    assert "MLPerf result" in page.read_text()
    assert main(["bench", "accelerators", str(folder), *small, "--most", "2", "--au", "0.01", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["accelerators"], said["complete"], said["ranks"]) == (2, True, 1)
    assert len(said["trials"]) == 2 and said["workload"]["batch"] == 4
    assert main(["bench", "accelerators", "--list"]) == 0
    assert "unet3d-b200" in capsys.readouterr().out
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["accelerators"], "which path?"),
        (["accelerators", ".", "-w", "unet"], "cosmoflow-h100"),
        (["accelerators", ".", "--batch", "0"], "samples in a batch"),
        (["accelerators", ".", "--compute", "nan"], "computing"),
        (["accelerators", ".", "--seconds", "0"], "--seconds"),
        (["accelerators", ".", "--most", "0"], "accelerators"),
        (["accelerators", ".", "--depth", "0"], "depth"),
        (["accelerators", ".", "--depth", "200", "-n", "100"], "--depth"),
        (["accelerators", ".", "--cache", "cold"], "cache"),
        (["accelerators", ".", "--meet-port", "1234"], "one process"),
        (["accelerators", ".", "--size", "1MiB"], "too little to be read"),
        (["sustained", ".", "--seconds", "nan"], "seconds"),
        (["sustained", ".", "--flows", "0"], "flows"),
        (["sustained", ".", "--scratch"], "--scratch"),
        (["compare", "."], "two or three"),
        (["compare", ".", ".", ".", "."], "two or three"),
        (["compare", ".", ".", "-p", "mixed"], "no such pattern"),
        (["compare", ".", ".", "--rounds", "0"], "rounds"),
        (["compare", ".", "./not there"], "not there"),
        (["run", ".", "--meet", "."], "one process"),
        (["compare", ".", ".", "--rounds", "100"], "rounds"),
    ],
)
def test_what_cannot_be_meant_is_one_line(
    arguments: list[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["bench", *arguments]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("headrace: error: ") and said in last
    assert [*folder.iterdir()] == []


# ---- compare ----


def test_a_slow_path_and_a_fast_one_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    with behind_a_link(4e6) as (slow, _), target() as serving:
        paths = [slow, serving.uri()]
        arguments = ["bench", "compare", *paths, "-p", "random", "--seconds", "0.2", "--flows", "2", "--size", "8MiB"]
        assert main([*arguments, "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    assert "1 kind of work on 2 paths in 6 rounds: about 2.4 s" in err and err.count("writes nothing") == 2
    assert re.fullmatch(
        rf"B \({re.escape(paths[1])}\) is [\d.]+ times A \({re.escape(paths[0])}\) \([\d.]+ to [\d.]+\) "
        r"for random samples of 128.0 KiB, 2 flows",
        out.splitlines()[-1],
    ), out
    assert "B is faster" in page.read_text()


def test_one_path_beside_itself_is_no_faster(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_text", full)
    page = tmp_path / "page.html"
    arguments = ["bench", "compare", str(folder), f"{folder}/.", "--seconds", "0.05", "--size", "4MiB", "--rounds", "2"]
    assert main([*arguments, "-p", "ingest", "-p", "latency", "--json", "--html", str(page)]) == 2
    out, err = capsys.readouterr()
    # A page that meets a full disk takes nothing along.
    assert f"the page was not written at {page}: " in err and "No space left" in err
    said = json.loads(out)
    assert said["sentence"].startswith("2 rounds cannot tell paths apart: that takes 7")
    assert [one["ratios"]["B/A"]["faster"] for one in said["works"]] == [None, None]
    assert [len(one["values"]["A"]) for one in said["works"]] == [2, 2]
    assert [*folder.iterdir()] == []


# ---- several ranks ----


def ranks(count: int, *arguments: str) -> list[tuple[int, str, str]]:
    """`headrace bench ARGUMENTS` as torchrun starts it: status, output and errors of every rank."""
    port = str(free_port())
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "headrace", "bench", *arguments, "--meet-port", port],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **common, "RANK": str(rank)},
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        found = []
        for process in started:
            out, err = process.communicate(timeout=2 * PATIENCE_S)
            found.append((process.returncode, out, err))
        return found
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_two_ranks_measure_together_and_rank_0_tells(folder: Path) -> None:
    small = ["--size", "2MiB", "--seconds", "0.3", "--rounds", "1", "--flows", "1", "--json"]
    first, second = ranks(2, "run", str(folder), "-p", "latency", *small)
    assert first[0] == second[0] == 0 and second[1] == "", (first, second)
    said = json.loads(first[1])
    outcome = said["outcomes"][0]
    assert any("2 ranks on 1 node" in note for note in said["notes"])
    assert outcome["latencies"]["count"] == sum(outcome["latencies"]["histogram"].values())
    assert "other runs" not in said["facts"]
    assert said["budget"][-1] == "so does each of 2 ranks: all of them write at most 4.0 MiB, and read at most 4.0 MiB"
    assert sum(outcome["series"]["bytes"]) == outcome["bytes"] == 4096 * outcome["latencies"]["count"]
    assert [*folder.iterdir()] == []


def test_a_rank_without_its_path_ends_all_of_them(folder: Path) -> None:
    gone = folder / "gone"
    for status, out, err in ranks(2, "accelerators", str(gone), "-n", "2"):
        assert status != 0 and out == ""
        assert str(gone) in err.splitlines()[-1] and err.splitlines()[-1].startswith("headrace: error: ")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["run", ".", "--scratch"], "--scratch, with several ranks"),
        (["accelerators", ".", "--scratch"], "--scratch, with several ranks"),
        (["compare", ".", "."], "expected one process"),
        (["sustained", "."], "expected one process"),
        (["accelerators", ".", "--meet", "./gone"], "--meet"),
        (["accelerators", ".", "--meet-port", "99999"], "--meet-port"),
    ],
)
def test_what_several_ranks_cannot_do(
    arguments: list[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
