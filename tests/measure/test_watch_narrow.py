"""What `headrace watch` shows on terminals: no word is broken, no line is longer than the screen, nothing is lost."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from headrace.cli import main
from headrace.cli.output import print_facts, print_table
from headrace.cli.watch import show
from headrace.measure.blackbox import dump_name, write_dump
from headrace.measure.watch.join import recent
from tests.measure.dumps import Rank
from tests.measure.watches import header, step, write

SPENT = {
    "fetch": 0.2, "blocked": 0.1, "preparation": 0.1, "starved": 0.1, "copy": 0.1, "collective": 0.1, "compute": 1.0,
    "checkpoint": 0.3, "restart": 0.1, "other": 0.1,
}  # fmt: skip


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["watch", *arguments]) == 0
    return printed(capsys)


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


def words(text: str) -> set[str]:
    return {word.strip(",:;.") for word in text.split()}


@pytest.fixture
def job(tmp_path: Path) -> str:
    """Every cause, on two nodes with long names, and dumps of a slow path."""
    window = {"window_s": 2.0, "cpu_user_s": 3.0, "cpu_system_s": 1.0, "helpers_cpu_s": 0.0, "throttled_s": 1.0}
    for rank in range(2):
        node = header(rank, 2, node=f"compute-node-{rank}.cluster.example")
        lines = [step(n, 1000.0 + 3 * n, window if n == 5 else None, **SPENT) for n in range(8)]
        write(tmp_path / "all" / f"rank-{rank:05d}.jsonl", [node, *lines])
    quick = Rank(0, 2).usual().step(fetch=0.002, compute=0.02, collective=0.503)
    slow = Rank(1, 2).usual().step(slow={(0, 1): 0.4}, fetch=0.3, preparation=0.2, compute=0.02, collective=0.005)
    (tmp_path / "dumps").mkdir()
    for rank in (quick, slow):
        write_dump(tmp_path / "dumps" / dump_name(rank.rank), rank.dump("watchdog"))
    return str(tmp_path)


@pytest.mark.parametrize("columns", [80, 120, 200])
@pytest.mark.parametrize("command", ["show all", "show all --gpu-hour-price 2.5", "explain dumps", "explain all"])
def test_no_word_is_broken(
    job: str, command: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, folder, *options = command.split()
    wide = shown(capsys, name, f"{job}/{folder}", *options)
    assert not [line for line in wide.splitlines() if line != line.rstrip()]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = shown(capsys, name, f"{job}/{folder}", *options)
    assert max(map(len, narrow.splitlines())) <= columns
    # A row that is told in lines has the names of its columns, and not the cells in which nothing stands.
    assert words(narrow) == words(wide)
    if columns == 80 and folder == "all" and name == "show":
        told = "rank 1: node compute-node-1.cluster.example, slowest in 0, fetch 9 %, blocked 5 %, preparation 5 %"
        assert told in " ".join(narrow.split())


def test_what_says_nothing_is_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for rank in range(2):
        lines = [step(n, 1000.0 + n, compute=1.0, collective=0.1, copy=0.0001) for n in range(4)]
        write(tmp_path / f"rank-{rank:05d}.jsonl", [header(rank, 2, node="a"), *lines])
    text = shown(capsys, "show", str(tmp_path))
    # Copies are a ten thousandth.
    assert "copy" in shown(capsys, "show", str(tmp_path), "--json") and "copied" not in text
    table = text.splitlines()[-3:]
    assert table == [
        "rank  slowest in  collective  compute",
        "   0           4         9 %     91 %",
        "   1           0         9 %     91 %",
    ]
    print_table(["a", "b"], [["1", ""]], page=True)
    assert capsys.readouterr().out == "a\n1\n"
    # For programs every column stays.
    print_table(["a", "b"], [["1", ""]])
    assert capsys.readouterr().out == "1\t\n"


def test_of_a_thousand_ranks_those_that_others_waited_for_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(100):
        spent = {"fetch": 0.4, "collective": 0.01} if rank == 97 else {"collective": 0.41}
        lines = [step(n, 1000.0 + n, compute=0.5, **spent) for n in range(4)]
        write(tmp_path / f"rank-{rank:05d}.jsonl", [header(rank, 100), *lines])
    assert main(["watch", "show", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    text = capsys.readouterr().out
    rows = [line.split()[0] for line in text.partition("slowest in")[2].splitlines() if line.split()[:1]]
    assert [row for row in rows if row.isdecimal()] == [*map(str, range(63)), "97"]
    assert "the 64 that were the slowest most often are shown" in " ".join(text.split())
    assert (tmp_path / "page.html").read_text().count("rank 97: slowest in 4 of 4 steps") == 1
    assert main(["watch", "explain", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "64 are shown, those that something was found of first" in " ".join(text.split())
    assert re.search(r"^ *97 ", text, re.M) and not re.search(r"^ *80 ", text, re.M)


def test_facts_end_their_lines_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "50")
    print_facts({"a": "short", "longer": "word " * 20})
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "a       short" and rest[0].startswith("longer  word word")
    assert all(line.startswith("        word") and len(line) < 50 for line in rest[1:]) and len(rest) == 3


@pytest.mark.parametrize("width", [44, 80])
def test_who_follows_a_job_reads_addresses_as_they_are(
    tmp_path: Path, width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = {"device": "nvme+tcp://[fe80::1]:4420/nqn.a[/b]", "path": "[fe80::1]:4420", "p99_s": 0.25, "commands": 9,
            "read_bytes": 1}  # fmt: skip
    slow = step(0, window={"window_s": 1.0, "paths": [path]}, fetch=0.5, compute=0.5)
    file = write(tmp_path / "rank-00000.jsonl", [header(0, 1), slow])
    Console(width=width).print(show._view(recent([file]), None, width))
    assert "path [fe80::1]:4420 to nqn.a[/b]" in " ".join(capsys.readouterr().out.split())


def test_nothing_in_a_file_steers_a_terminal_or_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nasty = "\x1b[2J\udcff"
    path = {"device": nasty, "path": nasty, "p99_s": 0.25, "commands": 9, "read_bytes": 1}
    for rank in range(2):
        slow = step(0, window={"window_s": 1.0, "paths": [path]}, fetch=0.5, compute=0.5, collective=0.1 * rank)
        write(tmp_path / "all" / f"rank-{rank:05d}.jsonl", [header(rank, 2, node=nasty, sm_activity=nasty), slow])
    (tmp_path / "dumps").mkdir()
    hangs = Rank(host=nasty).usual().step(cause="wait", hangs=(0, 0), wait=9.0).dump("watchdog")
    write_dump(tmp_path / "dumps" / dump_name(0), replace(hangs, detail=nasty, threads={"MainThread (1)": [nasty]}))
    for command in ("show all", "explain all", "explain dumps"):
        name, folder = command.split()
        assert main(["watch", name, str(tmp_path / folder), "--html", str(tmp_path / "page.html")]) == 0
        said = capsys.readouterr().out + (tmp_path / "page.html").read_text(encoding="utf-8")
        assert "\x1b" not in said and "\udcff" not in said and "\ufffd[2J\ufffd" in said


@pytest.mark.parametrize("columns", [90, 97, 98, 120, 160])
def test_of_two_sentences_beside_each_other_none_is_cut_off(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    row = [f"by {'nqn' * 21}", "the loader waited for reads of compute-node-17.cluster.example, and for nothing else"]
    print_table(["path", "why"], [row], page=True)
    lines = printed(capsys).splitlines()
    assert max(map(len, lines)) <= columns and words(" ".join(lines)) >= words(" ".join(row))
