"""The ranks put together: who pays for what, restarts, damage; the sentence that is made of it; the pages."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.errors import UsageError
from headrace.measure.blackbox.evidence import gather
from headrace.measure.watch import tell
from headrace.measure.watch.differential import stalls_of_files
from headrace.measure.watch.join import BINS, Attribution, attribute, recent
from headrace.measure.watch.page import page
from headrace.measure.watch.record import WatchHeader, WatchStep, files_of, parse_line
from headrace.measure.watch.verdict import sentence, step_text
from tests.measure.test_report import check_page
from tests.measure.watches import header, step, write

PATH = {
    "device": "nvme+tcp://10.0.0.1:4420/nqn.a?nsid=1", "path": "10.0.0.1:4420", "p99_s": 0.25, "commands": 9,
    "read_bytes": 1 << 20, "written_bytes": 0, "errors": 0, "losses": 0, "under_way": 3, "usable": True, "slow": True,
}  # fmt: skip


def job(folder: Path, *ranks: list[dict[str, Any]], **others: Any) -> list[Path]:
    world = len(ranks)
    return [
        write(folder / f"rank-{rank:05d}.jsonl", [header(rank, world, **others), *lines])
        for rank, lines in enumerate(ranks)
    ]


def said(folder: Path, *ranks: list[dict[str, Any]]) -> tuple[Attribution, str]:
    found = attribute(job(folder, *ranks))
    return found, sentence(found)


def test_all_pay_for_what_the_slowest_did(tmp_path: Path) -> None:
    found, text = said(
        tmp_path,
        [step(0, fetch=0.1, compute=1, collective=2.0), step(1, fetch=0.1, compute=1, collective=0.1)],
        [step(0, fetch=2.0, compute=1, collective=0.1), step(1, fetch=0.1, compute=1, collective=0.1)],
    )
    # The first step is that of rank 1, whose own exchange took 0.1 s; what rank 0 waited was for its read.
    assert found.total_gpu_s == pytest.approx(2 * (3.1 + 1.2))
    assert found.spent_gpu_s["fetch"] == pytest.approx(2 * 2.1)
    assert found.spent_gpu_s["collective"] == pytest.approx(2 * 0.2)
    assert [found.ranks[rank].slowest for rank in (0, 1)] == [1, 1]
    assert [(each.step, each.slowest) for each in found.worst] == [(0, 1), (1, 0)]
    assert text.startswith(
        "Storage is your problem: waiting for reads cost 48.8 % of accelerator time (4.2 GPU-seconds)"
    )
    assert "; besides, collectives 4.7 %" in text


def test_waits_that_hide_in_computing_are_told_where_collectives_are_not_seen(tmp_path: Path) -> None:
    found, _ = said(tmp_path, [step(0, compute=3.0)], [step(0, preparation=2.0, compute=1.0)])
    assert {cause: gpu_s for cause, gpu_s in found.spent_gpu_s.items() if gpu_s} == {"preparation": 4.0, "compute": 2.0}


def test_a_rank_that_computes_longer_is_a_straggler(tmp_path: Path) -> None:
    found, text = said(
        tmp_path, *[[step(n, compute=4.0 if rank == 2 else 1.0, collective=0.1 if rank == 2 else 3.1) for n in range(9)]
                    for rank in range(4)]
    )  # fmt: skip
    assert found.spent_gpu_s["straggler"] == pytest.approx(4 * 9 * 3.0)
    assert text.startswith(
        "Storage is not your problem: a rank that computes more slowly than the others is, which cost"
    )
    assert "rank 2 on node2" in text


def test_a_straggler_is_who_was_waited_for_and_not_who_was_last_most_often(tmp_path: Path) -> None:
    ranks = [
        [step(n, 1000.0 + 9 * n, compute=1.0, collective=0.1 if rank == 0 else 0.2) for n in range(8)]
        + [step(8, 1080.0, compute=9.0 if rank else 1.0, collective=0.1 if rank else 8.1)]
        for rank in range(2)
    ]
    found, text = said(tmp_path, *ranks)
    assert found.slowest_rank is not None and found.slowest_rank.rank == 0
    assert "rank 1 on node1" in text


@pytest.mark.parametrize("nodes_apart_s", [0.0, 100.0])
def test_a_wait_for_what_another_rank_saves_is_paid_for_once(tmp_path: Path, nodes_apart_s: float) -> None:
    """It is in the next step of the one that waits, which had begun that while the other one saved."""
    paths = []
    for rank in range(2):
        apart = nodes_apart_s * rank
        lines = [step(n, 1000.0 + n * 0.2 + apart, compute=0.1, collective=0.1) for n in range(8)]
        # It starts later than the other, which is waited for in a first step.
        lines[0] |= {"started_s": 1000.0 + apart - (0.5 if rank == 0 else 0.0)}
        lines.append(step(8, 1001.6 + apart, compute=0.1, collective=0.1, checkpoint=3.0 if rank == 0 else 0.0))
        lines.append(step(9, 1004.8 + apart - 3.0 * rank, compute=0.1, collective=0.1 + 3.0 * rank))
        lines += [step(n, 1003.0 + n * 0.2 + apart, compute=0.1, collective=0.1) for n in range(10, 16)]
        node = header(rank, 2, node=f"node{rank if nodes_apart_s else 0}")
        paths.append(write(tmp_path / f"rank-{rank:05d}.jsonl", [node, *lines]))
    for found in (attribute(paths), recent(paths)):
        assert found.spent_gpu_s["checkpoint"] == pytest.approx(6.0)
        assert found.spent_gpu_s["collective"] == pytest.approx(2 * 16 * 0.1, rel=0.02)
        assert found.total_gpu_s == pytest.approx(2 * (16 * 0.2 + 3.0), rel=0.02)
        assert (found.worst[0].step, found.worst[0].slowest, found.longest[1]) == (8, 0, 8)
        assert sentence(found).startswith("Checkpoints that training waited for are your problem")


def test_a_save_behind_the_first_step_tells_nothing_of_clocks(tmp_path: Path) -> None:
    """Ranks of other nodes begin the second one earlier then: as if their clocks were behind by all of the save."""
    paths, saves = [], {0: 3.0, 20: 3.0}
    for rank in range(4):
        lines, at, waits = [], 1000.0 + 0.05 * (rank // 2), 0.0
        for number in range(40):
            save = saves.get(number, 0.0)
            spent = {"compute": 0.1, "collective": 0.1 + waits, **({"checkpoint": save} if save and not rank else {})}
            lines.append(step(number, at, **spent))
            at, waits = at + sum(spent.values()), save if rank else 0.0
        node = header(rank, 4, node=f"node{rank // 2}")
        paths.append(write(tmp_path / f"rank-{rank:05d}.jsonl", [node, *lines]))
    # Also where each node has one rank.
    for found in (attribute(paths), attribute(paths[::2])):
        ranks = len(found.ranks)
        assert found.spent_gpu_s["checkpoint"] == pytest.approx(ranks * 6.0)
        assert found.spent_gpu_s["collective"] == pytest.approx(ranks * 4.0)
        assert found.total_gpu_s == pytest.approx(ranks * 14.0)


def test_a_clock_that_is_set_makes_nobody_wait(tmp_path: Path) -> None:
    spent = {"compute": 0.9, "collective": 0.1}
    back = [[step(n, 5000.0 + n - 3600.0 * rank * (n >= 30), **spent) for n in range(40)] for rank in range(2)]
    found, _ = said(tmp_path, *back)
    assert found.spent_gpu_s["collective"] == pytest.approx(8.0) and found.total_gpu_s == pytest.approx(80.0)
    assert all(row.wall_s == pytest.approx(1.0) for n in range(40) for row in gather([tmp_path]).at(n).values())


def test_of_ranks_without_a_file_it_is_not_known_whether_they_waited_for_storage(tmp_path: Path) -> None:
    paths = job(tmp_path, *[[step(n, 1000.0 + n, compute=0.5, collective=0.5) for n in range(9)]] * 3)
    assert sentence(attribute(paths)).startswith("Storage is not your problem: collectives are")
    for found in (attribute(paths[:1]), recent(paths[:1])):
        assert sentence(found).startswith("Collectives are your problem: they cost 50.0 %")
        assert "Of 2 of 3 ranks there is no file: one of them may be what was waited for" in sentence(found)
        assert tell.facts(found)["missing"] == "there is no file of 2 of 3 ranks, which may have been slower"


def test_a_rank_that_wrote_no_more_is_told(tmp_path: Path) -> None:
    ranks = [[step(n, 1000.0 + n, compute=1.0) for n in range(count)] for count in (9, 4)]
    found, _ = said(tmp_path, *ranks)
    assert (
        found.behind == (1, 3, 8)
        and tell.facts(found)["behind"] == "rank 1 wrote none after 3, others up to 8: what it did then is not known"
    )
    saves = step(9, 1009.0, checkpoint=5.0, other=0.01)
    assert "behind" not in tell.facts(attribute(job(tmp_path, [*ranks[0], saves], ranks[0])))
    hangs = [step(n, 1000.0 + n, compute=1.0, collective=9.0 if n == 8 else 0.0) for n in range(9)]
    text = said(tmp_path, hangs, ranks[1])[1]
    assert text.startswith("Collectives are your problem") and "Rank 1 wrote no more, and may be what was" in text
    # A save in the last step that all have, however long it is.
    assert said(tmp_path, [*ranks[0][:8], step(8, 1008.0, compute=1.0, checkpoint=30.0)], ranks[0])[0].behind is None
    # A rank that the job had before it was started again with fewer.
    again = [header(0, 1, 1100.0), *(step(n, 1100.0 + n, compute=1.0) for n in range(3))]
    assert said(tmp_path, [*ranks[0], *again], ranks[0])[0].behind is None
    # Where its box has dumped there is more to be read than in a file without a step.
    write(tmp_path / "rank-00000.jsonl", [header(0, 1)])
    for dumped in (False, True):
        if dumped:
            (tmp_path / "rank-00000.blackbox").touch()
        with pytest.raises(UsageError, match="no step was recorded") as refused:
            attribute([tmp_path / "rank-00000.jsonl"])
        assert ("headrace watch explain" in str(refused.value)) == dumped


@pytest.mark.parametrize(
    ("spent", "begin"),
    [
        ({"compute": 1.0, "fetch": 0.001}, "Storage is not your problem, and nothing else is: 0.10 % of"),
        ({"compute": 1.0, "preparation": 1.0}, "Storage is not your problem: preparing data on the CPU is, which"),
        ({"compute": 1.0, "starved": 1.0}, "Storage is not your problem: CPU starvation is, which cost 50.0 %"),
        ({"compute": 1.0, "collective": 1.0}, "Storage is not your problem: collectives are, which cost 50.0 %"),
        ({"compute": 1.0, "copy": 0.5, "fetch": 0.4}, "Storage is not your greatest problem: copies to the device are"),
        ({"compute": 1.0, "checkpoint": 1.0}, "Checkpoints that training waited for are your problem: they cost"),
        ({"compute": 1.0, "other": 1.0}, "What nobody marked is your problem: it cost 50.0 %"),
        ({"compute": 1.0, "blocked": 1.0}, "Your loader is your problem: it was blocked for 50.0 %"),
        ({"compute": 1.0, "fetch": 0.01, "checkpoint": 0.015}, "No single thing is your problem"),
    ],
)  # fmt: skip
def test_the_sentence_names_what_it_was(tmp_path: Path, spent: dict[str, float], begin: str) -> None:
    assert said(tmp_path, [step(n, **spent) for n in range(4)])[1].startswith(begin)


def test_down_time_and_steps_done_again_are_the_restarts(tmp_path: Path) -> None:
    paths = []
    for rank in range(2):
        first = [step(n, 1000.0 + n, compute=1.0) for n in range(6)]
        # The first start dies in a line; the next one goes on with step 4.
        path = write(tmp_path / f"rank-{rank:05d}.jsonl", [header(rank, 2), *first])
        with path.open("a") as file:
            file.write('{"step": 6, "wal\n')
            # One that died in its first line.
            file.write('{"headrace_watch": 1, "ra\n')
            for line in [
                header(rank, 2, 1026.0),
                step(4, 1026.0, restart=2.0, compute=1.0),
                step(5, 1029.0, compute=1.0),
            ]:
                file.write(json.dumps(line) + "\n")
            file.write('{"step": 7, ')
        paths.append(path)
    found = attribute(paths)
    assert (found.starts, found.repeated_steps, found.down_s) == (2, 2, 20.0)
    assert found.spent_gpu_s["restart"] == 2 * (20 + 2 + 2)
    assert found.spent_gpu_s["compute"] == 2 * (4 + 2) and found.total_gpu_s == 2 * (20 + 6 + 2 + 2)
    assert sentence(found).startswith("Restarts are your problem: they cost 80.0 % of accelerator time")


def test_all_until_the_first_step_of_a_start_is_down_time(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rank-00000.jsonl",
        [
            header(0, 1), *(step(n, 1000.0 + n, compute=1.0) for n in range(6)),
            # It came to no step, and the next one loaded for a minute before its first.
            header(0, 1, 1020.0), header(0, 1, 1100.0), step(6, 1160.0, restart=5.0, compute=1.0),
        ],
    )  # fmt: skip
    found = attribute([path])
    assert (found.starts, found.down_s, found.outside_s) == (3, 154.0, 0.0)
    assert found.spent_gpu_s["restart"] == 159 and found.total_gpu_s == 166


def test_a_worst_step_has_the_counters_of_the_stretch_that_it_is_in(tmp_path: Path) -> None:
    slow = {"window_s": 1.0, "paths": [PATH]}
    quick = {"window_s": 1.0, "paths": [{**PATH, "p99_s": 0.001, "slow": False}]}
    found = attribute(
        job(
            tmp_path,
            [
                step(n, window={10: quick, 20: slow, 30: quick}.get(n), fetch=9.0 if n in (3, 14) else 0.1, compute=1.0)
                for n in range(40)
            ],
            # Its counters are of another one.
            [step(n, window=quick if n == 15 else None, compute=1.0) for n in range(40)],
        ),
        worst=2,
    )
    assert [(each.step, each.slowest, each.window) for each in found.worst] == [(3, 0, quick), (14, 0, slow)]
    assert "in the 1.0 s around it: path 10.0.0.1:4420 to" in step_text(found.worst[1])
    # A start that was killed before its counters came has not those of the next one.
    lines = [header(0, 1), step(0, fetch=9.0), header(0, 1, 2000.0), step(1, 2001.0, window=slow, fetch=1.0)]
    again = attribute([write(tmp_path / "again.jsonl", lines)])
    assert [(each.step, each.window) for each in again.worst] == [(0, None), (1, slow)]


@pytest.mark.parametrize(
    ("reads", "prepares_s", "overlap"),
    [
        ({"reads_ahead": False}, 0.0, 0.0),
        ({"reads_ahead": True, "reads_apart": False}, 0.0, 1.0),
        # Helpers may read and prepare, one after the other.
        ({"reads_ahead": True, "reads_apart": False}, 0.5, None),
        ({"reads_ahead": True, "reads_apart": True}, 0.5, 1.0),
        # As older files say.
        ({"reads_ahead": True}, 0.5, None),
        ({}, 0.0, None),
    ],
)
def test_how_a_loader_reads_says_how_far_reads_are_hidden(
    tmp_path: Path, reads: dict[str, bool], prepares_s: float, overlap: float | None
) -> None:
    def run(name: str, **spent: float) -> Path:
        lines = [step(n, bytes=100, window=reads if n == 20 else None, compute=1.0, **spent) for n in range(24)]
        job(tmp_path / name, lines)
        return tmp_path / name

    found = stalls_of_files(
        {
            "synthetic": run("synthetic"), "cached": run("cached", preparation=prepares_s),
            "storage": run("storage", preparation=prepares_s, fetch=2.0),
        }
    )  # fmt: skip
    assert found.overlap == overlap
    told = found.predict(50.0)
    ends = sorted(1 / seconds for seconds in (max(1 + prepares_s, 2.0), 1 + prepares_s + 2.0))
    assert (told.low, told.high) == pytest.approx({0.0: (ends[0],) * 2, 1.0: (ends[1],) * 2}.get(overlap, tuple(ends)))  # type: ignore[arg-type]


def test_a_job_that_never_says_what_computes_does_not_lose_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = [step(n, 1000.0 + n, fetch=0.1, other=0.9) for n in range(9)]
    # The other one is waited for: it has more to read.
    second = [step(n, 1000.0 + n, fetch=0.4, other=0.6) for n in range(9)]
    paths = job(tmp_path, first, second)
    for found in (attribute(paths), recent(paths)):
        assert not found.compute_marked and found.slowest_rank is not None and found.slowest_rank.rank == 1
        assert found.share("fetch") == pytest.approx(0.4) and found.share("compute") == pytest.approx(0.6)
        assert found.share("other") == 0
    assert main(["watch", "show", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Storage is your problem: waiting for reads cost 40.0 % of accelerator time")
    assert "taken for computing, a save too: nothing is marked by watch.compute()" in said
    # One step that says so is enough: what is in no part is lost, then.
    first[4] = step(4, 1004.0, fetch=0.1, compute=0.8, other=0.1)
    found = attribute(job(tmp_path, first, second))
    assert found.compute_marked and found.share("other") > 0.5


@pytest.mark.parametrize("bytes_of_a_step", [0, 1_000_000])
def test_a_comparison_is_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], bytes_of_a_step: int) -> None:
    runs = {"synthetic": {}, "cached": {"preparation": 0.1}, "storage": {"preparation": 0.1, "fetch": 0.4}}
    for name, spent in runs.items():
        lines = [step(n, bytes=bytes_of_a_step, window={"reads_ahead": False}, compute=0.5, **spent) for n in range(12)]
        job(tmp_path / name, lines)
    page = tmp_path / "page.html"
    command = ["watch", "compare", *(str(tmp_path / name) for name in runs), "--html", str(page)]
    rates = ["--rate", "5MB/s", "--rate", "1GB"] if bytes_of_a_step else []
    assert main([*command, *rates]) == 0
    said = capsys.readouterr()
    assert said.err == f"page: {page}\n" and "fetch stall 40.0 % of a step" in said.out
    html = page.read_text().replace("\N{NO-BREAK SPACE}", " ")
    checked = check_page(html)
    assert ("polyline" in checked.tags) is bool(bytes_of_a_step)
    if bytes_of_a_step:
        # It reads when it is asked: 0.5 s of 0.6 s and what 1 MB takes.
        assert "With storage of 5 MB/s utilisation would be 62.5 %" in said.out
        assert "5 MB/s, asked for" in html and "2.5 MB/s, measured" in html and "62.5 %" in html
        assert main([*command, "--rate", "5 things"]) == 2
        assert "--rate: expected a rate such as 500MB/s" in capsys.readouterr().err
    else:
        assert "--step-bytes" in html


def test_starts_that_only_count_their_steps_did_none_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        [step(n, 1000.0 + n, compute=1.0) for n in range(6)],
        [step(n, 1008.0 + n, compute=1.0) for n in range(4)],
    )
    for one in (first, second):
        one[0]["counted"] = True
    path = write(tmp_path / "rank-00000.jsonl", [header(0, 1), *first, header(0, 1, 1008.0), *second])
    found = attribute([path])
    assert (found.starts, found.repeated_steps, found.repeats_unknown) == (2, 0, True)
    assert found.spent_gpu_s["compute"] == 10 and found.spent_gpu_s["restart"] == 2
    assert main(["watch", "show", str(path)]) == 0
    assert "not known which steps were done again" in capsys.readouterr().out


def test_nodes_whose_clocks_are_apart_start_again_together(tmp_path: Path) -> None:
    paths = [
        write(
            tmp_path / f"rank-{rank:05d}.jsonl",
            [
                line
                for first, at in ((0, 1000.0), (5, 1100.0))
                for line in [
                    header(rank, 2, at + ahead), *(step(first + n, at + ahead + n, compute=1.0) for n in range(5))
                ]
            ],
        )
        for rank, ahead in enumerate((0.0, 150.0))
    ]  # fmt: skip
    found = attribute(paths)
    assert (found.starts, found.steps, found.repeated_steps, found.down_s) == (2, 10, 0, 95.0)


def test_more_ranks_than_a_process_may_have_files(tmp_path: Path) -> None:
    lines = [step(n, 1000.0 + n, compute=1.0) for n in range(3)]
    paths = job(tmp_path, *[lines] * 80)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Descriptors are given from below: fewer are left than there are files.
    with paths[0].open("rb") as lowest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno() + 40, before[1]))
        try:
            found = attribute(paths)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(found.ranks) == 80 and found.steps == 3


def test_a_long_job_is_told_in_few_stretches_and_its_worst_steps(tmp_path: Path) -> None:
    lines = [step(n, 1000.0 + n, compute=1.0, **({"fetch": float(n % 97)} if n % 97 > 90 else {})) for n in range(5000)]
    found = attribute(job(tmp_path, lines), worst=3)
    assert found.steps == 5000 and BINS / 2 <= len(found.series) <= BINS
    assert sum(count for _, count, _ in found.series) == 5000
    assert sum(count * spent["compute"] for _, count, spent in found.series) == pytest.approx(5000)
    assert [each.lost_s for each in found.worst] == [96, 96, 96]
    assert [each.step for each in found.worst] == [96, 193, 290]


def test_what_no_watch_has_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no rank has written here"):
        files_of([tmp_path])
    with pytest.raises(UsageError, match="no such file"):
        files_of([tmp_path / "x"])
    for lines, match in (
        ([], "no step was recorded"),
        ([header(0, 1)], "no step was recorded"),
        ([step(0, compute=1)], "not a file of a watch"),
        ([{**header(0, 1), "headrace_watch": 2}], "another version"),
        ([{**header(0, 1), "rank": "x"}], "not a line of a watch"),
        ([header(0, 1), {"step": "x"}, step(1)], "not a line of a watch at .*rank-00000.jsonl, byte"),
        ([header(0, 1), {**step(0), "wall_s": -1}, step(1)], "not a line"),
        ([header(0, 1), step(1), step(1), step(2)], "steps are not in order"),
        ([{**header(0, 1), "node": ["a"]}, step(1)], "not a line"),
        ([{**header(0, 1), "started_s": float("nan")}, step(1)], "not a line"),
        ([header(0, 1), {"rank": 0, **header(0, 1)}], "no step was recorded"),
        ([header(0, 1), {**step(0), "bytes": float("inf")}, step(1)], "not a line"),
        ([header(0, 1), {**step(0), "wall_s": float("inf")}, step(1)], "not a line"),
        ([header(0, 1), {**step(0), "wall_s": 10**400}, step(1)], "not a line"),
        ([header(0, 1), step(0, window={"sm_activity": 1}), step(1)], "not a line"),
        ([header(0, 1), step(0, window={"throttled_s": "x"}), step(1)], "not a line"),
        ([header(0, 1), step(0, window={"paths": 5}), step(1)], "not a line"),
        ([header(0, 1), step(0, window={"paths": [{**PATH, "p99_s": "x"}]}), step(1)], "not a line"),
    ):
        path = write(tmp_path / "rank-00000.jsonl", lines)
        with pytest.raises(UsageError, match=match):
            attribute([path])


def test_the_last_steps_of_every_rank_are_followed(tmp_path: Path) -> None:
    lines = [step(n, 1000.0 + n, compute=1.0, fetch=1.0 if n >= 4000 else 0.0) for n in range(5000)]
    paths = job(tmp_path, lines, lines[:-10])
    with paths[1].open("a") as file:
        file.write('{"step": 4990')
    found = recent(paths)
    assert 100 < found.steps < 5000 and found.share("fetch") > 0.2
    assert max(each.step for each in found.worst) <= 4989
    # One that is about to write its first line.
    (tmp_path / "rank-00009.jsonl").write_text("")
    assert recent(files_of([tmp_path])).steps == found.steps
    # One that a larger job had.
    lost = write(tmp_path / "rank-00002.jsonl", [header(2, 3, 900.0), step(7, compute=1.0)])
    assert recent(files_of([tmp_path])).steps == found.steps
    # One that is gone, and one that has done nothing yet.
    write(lost, [header(2, 3, 1001.0), step(7, compute=1.0)])
    found = recent(files_of([tmp_path]))
    assert found.steps == 0 and found.why_none == "rank 2 has written none beyond 7, others up to 4999"
    write(lost, [header(2, 3, 1001.0)])
    assert recent(files_of([tmp_path])).why_none == "rank 2 has written none, others up to 4999"


def test_what_the_command_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    window = {"window_s": 2.0, "cpu_user_s": 3.0, "cpu_system_s": 1.0, "run_queue_s": 0.5, "major_faults": 4}
    paths = job(
        tmp_path / "job",
        [
            step(n, 1000.0 + n, {**window, "paths": [PATH]}, fetch=1.0 if n == 7 else 0.1, compute=1.0)
            for n in range(9)
        ],
        [step(n, 1000.0 + n, window, compute=1.1) for n in range(9)],
    )  # fmt: skip
    assert main(["watch", "show", str(tmp_path / "job"), "--gpu-hour-price", "3600"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith(
        "Storage is your problem: waiting for reads cost 16.7 % of accelerator time (3.6 GPU-seconds, $3.60)"
    )
    assert lines[0].endswith(
        ". Slowest: path 10.0.0.1:4420 to nqn.a?nsid=1, p99 250.0 ms, slower than the others, on rank 0."
    )
    assert "not measured (there is no GPU)" in text and "2.0 cores" in text
    worst = next(line for line in lines if line.split()[:1] == ["7"])
    assert "fetch 1.0 s" in worst and "p99 250.0 ms, slower than the others" in worst
    assert main(["watch", "show", *map(str, paths), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lost_to"]["fetch"]["gpu_s"] == pytest.approx(3.6) and "money" not in found["lost_to"]["fetch"]
    assert found["worst_steps"][0]["step"] == 7 and found["by_rank"][1]["slowest_steps"] == 0
    assert found["by_rank"][0]["counters"]["cpu_user_s"] == 27.0

    html = tmp_path / "page.html"
    assert main(["watch", "show", str(tmp_path / "job"), "--html", str(html), "--gpu-hour-price", "2"]) == 0
    checked = check_page(html.read_text())
    assert "svg" in checked.tags and "p99 250.0\N{NO-BREAK SPACE}ms" in html.read_text()
    capsys.readouterr()
    assert main(["watch", "show", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("headrace: error: there is no such file")
    assert main(["watch", "show", str(tmp_path / "job"), "--gpu-hour-price", "-1"]) == 2
    assert main(["watch", "show", str(tmp_path / "job"), "--follow", "--json"]) == 2


def test_the_page_of_nasty_names_is_whole() -> None:
    nasty = '<script>alert("&")</script>'
    found = Attribution()
    lines = [
        header(0, 1),
        step(0, compute=1.0, fetch=1.0, window={"window_s": 1.0, "paths": [{**PATH, "device": nasty}]}),
    ]
    head, row = (parse_line(json.dumps(line), "here") for line in lines)
    assert isinstance(head, WatchHeader) and isinstance(row, WatchStep)
    found.begin([head], [])
    found.add({0: row})
    check_page(page(found, title=nasty))
    assert re.search("&lt;script&gt;", page(found, title=nasty))
