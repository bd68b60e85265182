"""What explains a slow step, on dumps made by hand: the right rank, cause, path and target; and never storage where it
was not."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.device.events import NO_PATH, EventKind
from headrace.errors import UsageError
from headrace.measure.blackbox import DumpedDevice, dump_name, write_dump
from headrace.measure.blackbox.dump import DumpUnreadable
from headrace.measure.blackbox.evidence import Evidence, clocks, gather
from headrace.measure.blackbox.explain import explain
from headrace.measure.blackbox.page import page
from headrace.measure.blackbox.tell import facts, path_text, sentence
from tests.measure.dumps import IN_A_WAIT, Rank, evidence
from tests.measure.watches import header, step, write


def test_a_slow_path_is_told_with_its_target_beside_the_quick_one() -> None:
    slow = Rank(1, 2).usual().step(slow={(0, 1): 0.4}, fetch=0.5, compute=0.02, collective=0.005).usual(2)
    quick = Rank(0, 2).usual().step(fetch=0.002, compute=0.02, collective=0.503).usual(2)
    found = explain(evidence(quick, slow))
    assert (found.step, found.rank, found.host, found.storage) == (8, 1, "node1", "yes")
    main = found.main
    assert main is not None and main.cause == "fetch" and main.path is not None
    assert (main.path.path, main.path.target, main.scope, main.confidence) == ("10.0.1.1:4420", "nqn.a", "path", "sure")
    assert main.path.p99_s == pytest.approx(0.4) and main.path.before_p99_s == pytest.approx(0.001)
    assert found.gpu_s == pytest.approx(2 * (0.525 - 0.027))
    assert found.storage_gpu_s == pytest.approx(2 * 0.498)
    assert sentence(found, 3600.0) == (
        "Step 8 took 525.0 ms instead of 27.0 ms, and it was storage: rank 1 on node1 waited 498.0 ms for reads by path"
        " 10.0.1.1:4420 to nqn.a, p99 400.0 ms (before 1.0 ms; 1.0 ms by 10.0.0.1:4420); the other rank waited for it. "
        "It cost 0.996 GPU-seconds, $1.00."
    )


@pytest.mark.parametrize(
    ("slow", "elsewhere", "scope"),
    [
        # Both paths of one target, the other target is quick.
        ({(0, 0): 0.4, (0, 1): 0.4}, None, "target"),
        # One of them less so, and by far slower than it is.
        ({(0, 0): 0.4, (0, 1): 0.08}, None, "target"),
        # All of this rank, and the other rank has no trouble with the same targets.
        ({(0, 0): 0.4, (0, 1): 0.4, (1, 0): 0.4}, {}, "node"),
        # All of this rank, and the other one as well.
        ({(0, 0): 0.4, (0, 1): 0.4, (1, 0): 0.4}, {(0, 0): 0.4, (0, 1): 0.4, (1, 0): 0.4}, "target"),
        # The only path of its target.
        ({(1, 0): 0.4}, None, "path or target"),
    ],
)
def test_how_far_slowness_goes(slow: Any, elsewhere: Any, scope: str) -> None:
    world = 1 if elsewhere is None else 2
    ranks = [Rank(0, world).usual().step(slow=slow, fetch=0.5, compute=0.02, collective=0.005)]
    if elsewhere is not None:
        ranks.append(Rank(1, 2).usual().step(slow=elsewhere, fetch=0.002, compute=0.02, collective=0.503))
    found = explain(evidence(*ranks))
    assert found.main is not None and (found.storage, found.main.scope) == ("yes", scope)
    if scope == "path or target":
        assert "cannot be told apart" in facts(found)["against it"]


@pytest.mark.parametrize("cause", ["preparation", "starved", "copy", "compute"])
def test_what_is_not_storage_is_not_called_so(cause: str) -> None:
    spent = {"fetch": 0.002, "compute": 0.02, "collective": 0.005}
    found = explain(evidence(Rank().usual().step(**{**spent, cause: 0.5})))
    assert found.main is not None and (found.storage, found.main.cause) == ("no", cause)
    assert "and it was not storage: rank 0 on node0" in sentence(found)


def test_of_time_that_nobody_marked_it_is_not_known(tmp_path: Path) -> None:
    spent = {"fetch": 0.002, "compute": 0.02, "collective": 0.005}
    found = explain(evidence(Rank().usual().step(**spent, other=0.5)))
    assert found.main is not None and (found.storage, found.main.cause) == ("unknown", "other")
    assert "a save, or reads, that nobody marked would be in it" in facts(found)["against it"]


def test_a_job_that_never_says_what_computes_is_explained_by_the_rule_of_show(tmp_path: Path) -> None:
    def job(folder: Path, *steps: dict[str, Any]) -> Evidence:
        write(folder / "rank-00000.jsonl", [header(0, 1), *steps])
        return gather([folder])

    usual = [step(n, 1000.0 + n, fetch=0.1, other=0.9) for n in range(8)]
    told = job(tmp_path / "a", *usual, step(8, 1008.0, fetch=0.1, other=4.9))
    found = explain(told)
    assert found.main is not None and (found.main.cause, found.storage) == ("compute", "unknown")
    assert found.rows[0].spent == {"fetch": 0.1, "compute": 4.9} and not found.compute_marked
    assert "spent 4.0 s more than usual in what nobody marked" in sentence(found)
    assert "nothing is marked by watch.compute()" in facts(found)["compute"]
    # It is no loss: a step like the others lost its wait.
    like = explain(told, 3)
    assert [each.cause for each in like.findings] == ["fetch"] and like.lost_s == pytest.approx(0.1)
    # One that says so anywhere means that the rest is lost.
    found = explain(job(tmp_path / "b", *usual, step(8, 1008.0, compute=0.1, other=4.9)))
    assert found.main is not None and found.main.cause == "other" and found.compute_marked
    # What a dump was written in the middle of goes by it, too.
    found = explain(evidence(Rank().usual(8, fetch=0.1, other=0.9).step(cause="other", fetch=0.1, other=30.0)))
    assert (found.rows[0].cause, found.rows[0].spent) == ("other", {"fetch": 0.1, "compute": 30.0})


def test_what_had_not_been_taken_apart_yet_is_said() -> None:
    rank = Rank().usual().step(fetch=0.002, compute=0.6, collective=0.005)
    assert "lacked a CPU in this step" in facts(explain(evidence(rank)))["against it"]
    rank.usual(60)
    found = explain(evidence(rank))
    assert found.step == 8 and found.open_questions == ()


def test_reads_that_nobody_waited_for_are_no_cause() -> None:
    spent = {"fetch": 0.002, "compute": 0.02, "collective": 0.005}
    found = explain(evidence(Rank().usual().step(slow={(0, 1): 0.4}, **{**spent, "preparation": 0.5})))
    assert found.storage == "no" and found.storage_gpu_s == 0
    assert found.unwaited is not None and found.unwaited.path == "10.0.1.1:4420"
    assert "was slow (p99 400.0 ms, before 1.0 ms), but the step did not wait for it" in facts(found)["nobody waited"]


@pytest.mark.parametrize(("fetch", "starved"), [(0.6, 0.3), (0.3, 0.6)])
def test_two_causes_are_told_in_order_of_cost(fetch: float, starved: float) -> None:
    found = explain(
        evidence(Rank().usual().step(slow={(0, 1): 0.5}, fetch=fetch, starved=starved, compute=0.02, collective=0.005))
    )
    assert [each.cause for each in found.findings] == sorted(["fetch", "starved"], reverse=fetch < starved)
    assert found.storage == ("yes" if fetch > starved else "no")
    assert ("it was storage:" if fetch > starved else "it was storage only in part:") in sentence(found)


def test_a_blocked_loader_is_not_told_that_commands_were_quick_where_they_were_not() -> None:
    slow = facts(explain(evidence(Rank().usual().step(slow={(0, 1): 0.2}, blocked=0.5, compute=0.02))))
    assert slow["because"] == (
        "commands of headrace's devices were slow meanwhile (path 10.0.1.1:4420, p99 200.0 ms, for 209.0 ms of it)"
    )
    told = facts(explain(evidence(Rank().step(cause=IN_A_WAIT, hangs=(0, 0), wait=100.0))))
    assert "because" not in told and told["against it"].endswith("no commands were recorded before it to compare with")


def test_a_rank_that_is_gone_is_none_of_all_ranks() -> None:
    gone, *others = (Rank(rank, 3).usual(6 if rank == 0 else 8) for rank in range(3))
    waits = [rank.step(fetch=0.002, compute=0.02, collective=5.0) for rank in others]
    assert "2 of 3 ranks were in collectives for 5.0 s" in sentence(explain(evidence(gone, *waits)))
    others[0].step(blocked=9.0, compute=0.02, collective=0.005)
    others[1].step(blocked=0.0, compute=0.02, collective=9.005)
    assert "waited for it" not in sentence(explain(evidence(gone, *others)))


def test_a_straggler_and_a_slow_collective_are_told_apart() -> None:
    usual = {"fetch": 0.002, "compute": 0.02, "collective": 0.005}
    late = Rank(0, 3).usual().step(fetch=0.002, compute=0.52, collective=0.005)
    rest = [Rank(rank, 3).usual().step(fetch=0.002, compute=0.02, collective=0.505) for rank in (1, 2)]
    found = explain(evidence(late, *rest))
    assert found.main is not None and (found.main.cause, found.rank, found.storage) == ("straggler", 0, "no")
    assert "rank 0 on node0 computed 500.0 ms longer than the others" in sentence(found)
    slow = [Rank(rank, 3).usual().step(**{**usual, "collective": 0.5}) for rank in range(3)]
    found = explain(evidence(*slow))
    assert found.main is not None and (found.main.cause, found.storage) == ("collective", "no")
    assert "all ranks were in collectives" in sentence(found)
    # It came to it late, from what the step does not show.
    gone = Rank(2, 3).usual().step(fetch=0.002, compute=0.02, collective=0.005)
    found = explain(evidence(*slow[:2], gone))
    assert found.storage == "unknown" and "rank 2 was in it for 5.0 ms only: it came late" in facts(found)["against it"]
    # What the third one did nobody knows: it may have waited for storage.
    found = explain(evidence(*slow[:2]))
    assert found.storage == "unknown" and found.missing == (2,)
    assert "rank 2 may be what was waited for" in facts(found)["against it"]


def test_who_waits_for_a_save_of_another_rank_was_not_in_a_slow_collective(tmp_path: Path) -> None:
    """It is in its next step already, and that is as long."""
    usual, ranks = {"compute": 0.02, "collective": 0.005}, []
    for rank in range(2):
        lines = [step(n, 1000.0 + n * 0.025, **usual) for n in range(8)]
        save = 3.0 if rank else 0.0
        lines.append(step(8, 1000.2, **usual, **({"checkpoint": save} if save else {})))
        lines.append(step(9, 1000.225 + save, compute=0.02, collective=0.005 if rank else 3.005))
        lines += [step(n, 1003.0 + n * 0.025, **usual) for n in range(10, 14)]
        ranks.append(write(tmp_path / f"rank-{rank:05d}.jsonl", [header(rank, 2, node="a"), *lines]))
    told = gather([tmp_path])
    found = explain(told)
    assert found.main is not None and (found.step, found.rank, found.main.cause) == (8, 1, "checkpoint")
    like = explain(told, 9)
    assert like.took_s == pytest.approx(0.025) and not like.stands_out
    # A host that is half a step ahead of its device waits for nobody, and what it has asked for takes as long.
    for clock, took in (("host", 0.0125), ("cuda", 0.025)):
        for rank in range(2):
            lines = [step(n, 1000.0 + n * 0.025 - 0.0125 * (n == 5 and not rank), **usual) for n in range(8)]
            write(tmp_path / clock / f"rank-{rank:05d}.jsonl", [header(rank, 2, node="a", clock=clock), *lines])
        assert gather([tmp_path / clock]).at(5)[0].wall_s == pytest.approx(took)
    # Of two nodes that time no collective the begins of steps tell how far clocks are apart.
    for path in ranks:
        path.write_text(path.read_text().replace('"node": "a"', f'"node": "{path.name}"').replace("collective", "copy"))
    told = gather([tmp_path])
    assert (explain(told).step, clocks(told.ranks)[1].by) == (8, "begins of steps")
    assert explain(told, 9).took_s == pytest.approx(0.025)


def test_frames_of_the_box_are_none_of_the_job(tmp_path: Path) -> None:
    rank = Rank().usual().step(cause="collective", collective=30.0)
    frames = ["/a/run.py:1 <module>", "/x/site-packages/torch/reduce.py:5 reduce",
              "/x/headrace/measure/watch/failures.py:2 __exit__",
              "/x/headrace/measure/blackbox/box.py:3 failed", "/x/threading.py:1 wait"]  # fmt: skip
    dump = replace(rank.dump("collective"), detail="RuntimeError: gone", threads={"MainThread (1)": frames})
    write_dump(tmp_path / dump_name(0), dump)
    told = facts(explain(gather([tmp_path])))
    assert told["at the dump"].endswith("Python was at reduce.py:5 reduce < run.py:1 <module>")
    assert told["dumped by"] == "collective: RuntimeError: gone" and "clocks" not in told


def test_a_step_that_is_in_a_file_twice_is_read_once(tmp_path: Path) -> None:
    lines = [step(n, 1000.0 + n, compute=1.0) for n in range(9)]
    write(tmp_path / "rank-00000.jsonl", [header(0, 1), step(0, 999.0, compute=1.0), *lines])
    assert sorted(gather([tmp_path]).ranks[0].steps) == list(range(9))


def test_a_blocked_loader_is_storage_only_where_commands_say_so() -> None:
    found = explain(evidence(Rank().usual().step(blocked=0.5, compute=0.02, collective=0.005)))
    assert found.storage == "unknown" and "answered as they usually do" in facts(found)["because"]
    slow = Rank().usual().step(slow={(0, 1): 0.45}, blocked=0.5, compute=0.02, collective=0.005)
    found = explain(evidence(slow))
    assert found.main is not None and (found.storage, found.main.confidence) == ("yes", "likely")


def test_commands_of_more_bytes_than_any_before_may_take_longer() -> None:
    spent = {"blocked": 0.002, "compute": 0.02, "collective": 0.005}
    all_paths = {(0, 0): 0.3, (0, 1): 0.3, (1, 0): 0.3}
    large = Rank().usual(8, **spent).step(slow=all_paths, size=4 << 20, **{**spent, "blocked": 0.5})
    assert explain(evidence(large)).storage == "unknown"
    small = Rank().usual(8, **spent).step(slow=all_paths, **{**spent, "blocked": 0.5})
    assert explain(evidence(small)).storage == "yes"


def test_without_all_ranks_nobody_is_said_to_have_waited() -> None:
    found = explain(evidence(Rank(1, 4).usual().step(slow={(0, 1): 0.4}, fetch=0.5, compute=0.02, collective=0.005)))
    assert found.storage == "yes" and "waited for it" not in sentence(found)
    assert facts(found)["missing"] == "nothing is known of ranks 0, 2 and 3 of 4: one of them may have been slower"


def test_what_an_earlier_start_has_left_is_not_mixed_with_the_last_one(tmp_path: Path) -> None:
    """Steps are put together by number, and numbers begin again."""
    now = Rank(0, 2).usual().dump()
    day = 86_400 * 10**9
    before = replace(now, rank=1, dumped=replace(now.dumped, realtime_ns=now.dumped.realtime_ns - day))
    write_dump(tmp_path / dump_name(0), now)
    write_dump(tmp_path / dump_name(1), before)
    lines = [step(n, 1000.0 + n, compute=9.0) for n in range(8)]
    write(tmp_path / "rank-00000.jsonl", [header(0, 2, pid=now.pid + 1), *lines])
    found = gather([tmp_path])
    assert found.missing == [1] and "rank 1: it is of an earlier start" in found.unread[0]
    # What a node has left that went down.
    (tmp_path / dump_name(1)).write_bytes(bytes(100))
    found = gather([tmp_path])
    assert found.missing == [1] and "no dump that can be read" in found.unread[0]
    with pytest.raises(DumpUnreadable):
        gather([tmp_path, tmp_path / dump_name(1)])
    assert {row["compute"] for row in found.ranks[0].steps.values()} == {0.02}


def test_of_a_wait_for_reads_in_which_none_was_under_way_it_is_not_known() -> None:
    found = explain(evidence(Rank().usual().step(fetch=0.5, compute=0.02, collective=0.005)))
    assert found.storage == "unknown" and found.storage_gpu_s == 0 and "of it only" in facts(found)["because"]


def test_a_save_is_storage_where_it_was_written_and_not_where_it_was_packed() -> None:
    spent = {"fetch": 0.002, "compute": 0.02, "collective": 0.005, "checkpoint": 0.5}
    written = Rank().usual()
    written.step(slow={(1, 0): 0.52}, kind=EventKind.WRITE, **spent)
    found = explain(evidence(written))
    assert found.main is not None and found.main.path is not None
    assert (found.main.cause, found.storage, found.main.path.target) == ("checkpoint", "yes", "nqn.b")
    packed = Rank().usual()
    packed.step(kind=EventKind.WRITE, **spent)
    assert explain(evidence(packed)).storage == "no"
    # What waits to be sent is a write, or a read: of either kind it is no other one's path.
    for kind, storage in ((EventKind.WAITING_WRITE, "yes"), (EventKind.WAITING_READ, "unknown")):
        waiting = Rank().usual().step(hangs=(0, NO_PATH), kind=kind, cause="checkpoint", quiet=True, checkpoint=30.0)
        found = explain(evidence(waiting, why="watchdog"))
        text = "where a write of 4.0 KiB at byte 8192 waited for a path for 30.0 s"
        assert (found.storage, text in sentence(found)) == (storage, storage == "yes")
    elsewhere = explain(evidence(Rank().usual().step(**spent)))
    assert elsewhere.storage == "unknown" and "nothing was written by headrace" in facts(elsewhere)["because"]


def test_a_command_that_hangs_is_found_in_the_step_under_way() -> None:
    stuck = Rank(1, 2).usual().step(hangs=(0, 1), cause="wait", quiet=True, wait=30.0)
    other = Rank(0, 2).usual().step(cause="collective", fetch=0.002, compute=0.02, collective=29.978)
    found = explain(evidence(other, stuck, why="watchdog"))
    assert found.main is not None and found.main.path is not None and found.main.path.hung is not None
    assert (found.step, found.under_way, found.rank, found.storage) == (8, True, 1, "yes")
    assert found.main.path.hung.age_s == pytest.approx(29.999)
    text = sentence(found)
    assert text.startswith("Step 8 was under way for 30.0 s, where steps take 27.0 ms, and it was storage: rank 1")
    assert "where a read of 4.0 KiB at byte 8192 had no answer for 30.0 s" in text and "So far it costs 59.9" in text
    # The other rank reads by that path as it always does.
    assert found.main.scope == "path"
    # Nothing hangs: not known, which is not nothing.
    idle = Rank(1, 2).usual().step(cause="wait", quiet=True, wait=30.0)
    seen = evidence(other, idle)
    assert explain(seen).storage == "unknown" and ">unknown<" in page(explain(seen), seen)
    # No path could take it: none is the slowest.
    lost = explain(evidence(Rank().usual().step(hangs=(0, NO_PATH), cause="wait", quiet=True, wait=30.0)))
    assert lost.main is not None
    assert "by all its paths, where a read of 4.0 KiB" in path_text(replace(lost.main, scope="target"))


def test_who_is_furthest_behind_is_who_hangs() -> None:
    """Where no collective keeps ranks together."""
    stuck = Rank(1, 2).usual(8, fetch=0.01, compute=0.02).step(cause="wait", hangs=(0, 0), quiet=True, wait=30.0)
    ahead = Rank(0, 2).usual(40, fetch=0.01, compute=0.02).step(cause="compute", compute=0.01)
    found = explain(evidence(ahead, stuck))
    assert (found.step, found.rank, found.under_way) == (8, 1, True)


def test_devices_that_record_nothing_are_said_to() -> None:
    silent = (DumpedDevice(uri="nvme+tcp://10.0.0.1/nqn.a", why_not="this device records no events"),)
    found = explain(evidence(Rank(devices=silent).usual().step(fetch=0.5, compute=0.02)))
    assert found.main is not None and (found.storage, found.main.confidence) == ("yes", "likely")
    assert "its dump has none, no device of headrace was open that tells" in facts(found)["against it"]


def test_a_step_like_the_others_is_called_so() -> None:
    rank = Rank().usual(20, fetch=0.08, compute=0.02)
    rank.step(fetch=0.09, compute=0.02)
    found = explain(evidence(rank))
    assert not found.stands_out and found.main is not None and found.main.cause == "fetch"
    assert "about as long as the others (100.0 ms)" in sentence(found)


def test_clocks_that_are_apart_are_brought_together_by_ends_of_steps() -> None:
    first, ahead = Rank(0, 2, host="same name").usual(), Rank(1, 2, host="same name", ahead_ns=7_000_000_000).usual()
    # Two nodes whose clocks agree, and whose monotonic ones do not.
    found = clocks(evidence(first, ahead).ranks)
    assert found[1].shift_ns == -7_000_000_000 and found[1].by == "ends of steps" and found[1].error_s == 0
    alone = [Rank(0, 2).usual(fetch=0.1), Rank(1, 2, ahead_ns=7_000_000_000).usual(fetch=0.2)]
    found = clocks(evidence(*alone).ranks)
    assert found[1].error_s is None and found[1].by == "the nodes' clocks" and found[1].shift_ns == -7_000_000_000


def test_files_of_watches_do_where_there_is_no_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = {"device": "nvme+tcp://10.0.0.1/nqn.a", "path": "10.0.0.1:4420", "p99_s": 0.25, "commands": 9,
            "read_bytes": 1, "written_bytes": 0, "errors": 0, "losses": 0, "usable": True, "slow": True}  # fmt: skip
    for rank in range(2):
        lines = [step(n, 1000.0 + n, fetch=0.1, compute=1.0, collective=0.1) for n in range(9)]
        lines.append(
            step(9, 1010.0, {"window_s": 3.0, "paths": [path]} if rank else None, compute=1.0,
                 fetch=3.0 if rank else 0.1, collective=0.1 if rank else 3.0)
        )  # fmt: skip
        # It has started again, and done nothing yet.
        write(tmp_path / f"rank-{rank:05d}.jsonl", [header(rank, 2), *lines, header(rank, 2, 1020.0)])
    assert main(["watch", "explain", str(tmp_path), "--gpu-hour-price", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "Step 9 took 4.1 s instead of 1.2 s, and it was storage: rank 1 on node1 waited 2.9 s for reads"
    )
    assert "10.0.0.1:4420" in text and "there are no I/O events of this rank" in text
    assert main(["watch", "explain", str(tmp_path), "--json", "--step", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 3 and not found["stands_out"] and found["ranks_without_events"] == [0, 1]
    # A dump of one rank beside its file: events from there, counters from here.
    write_dump(tmp_path / dump_name(1), Rank(1, 2).usual().dump())
    # One that it made before, of a later moment by a clock that was set meanwhile.
    write_dump(tmp_path / "rank-00001.before-1.blackbox", Rank(1, 2).usual(30).dump())
    record = gather([tmp_path]).ranks[1]
    assert record.dump is not None and len(record.dump.steps) == 8 and record.steps[9].window is not None
    # Of the second before a dump the file knows better what was what.
    assert record.steps[7].spent == {"fetch": 0.1, "compute": 1.0, "collective": 0.1} and not record.steps[7].rough


def test_what_is_no_evidence_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="no rank has left anything"):
        gather([tmp_path])
    (tmp_path / "x").write_bytes(b"no dump")
    with pytest.raises(DumpUnreadable):
        gather([tmp_path / "x"])
    assert main(["watch", "explain", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("headrace: error: there is no such file")
    with pytest.raises(
        UsageError, match="no rank has recorded this step at step 99: expected one of 0 to 7, of the last start"
    ):
        explain(evidence(Rank().usual()), 99)
    with pytest.raises(UsageError, match="too many ranks"):
        evidence(Rank(0, 1 << 60).usual())
    with pytest.raises(UsageError, match=r"no step was recorded.*found dumps alone \(rank 0, request: \)"):
        explain(evidence(Rank()))


def stalled(folder: Path, *, after_s: float, **whole: float) -> None:
    """Dumped 5 s into step 8, which hangs in a read; its watch wrote on."""
    rank = Rank().usual().step(hangs=(0, 1), cause="wait", quiet=True, compute=0.02, wait=5.0)
    dump = replace(rank.dump("watchdog"), threads={"MainThread (1)": ["/a/run.py:1 <module>", "/a/train.py:9 batch"]})
    write_dump(folder / dump_name(0), dump)
    begun = 10**9 + dump.steps[-1].ended_ns * 1e-9 if dump.steps[-1].ended_ns else 0.0
    lines = [step(n, begun - 1 + n * 0.01, fetch=0.002, compute=0.02, collective=0.005) for n in range(8)]
    lines.append(step(8, begun, **whole))
    lines += [step(n, begun + after_s + n, fetch=0.002, compute=0.02, collective=0.005) for n in range(9, 20)]
    lines.append(step(20, begun + after_s + 20, fetch=3.0, compute=0.02, collective=0.005))
    write(folder / "rank-00000.jsonl", [header(0, 1, pid=1), *lines])


def test_a_step_that_ended_behind_its_dump_is_told_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stalled(tmp_path, after_s=9.0, fetch=7.98, compute=0.02)
    assert main(["watch", "explain", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Step 8 took 8.0 s instead of 27.0 ms, and it was storage: rank 0 on node0 waited 8.0 s for")
    assert "had no answer for 5.0 s when it was dumped" in text and "It cost" in text and "so far" not in text.lower()
    found = explain(gather([tmp_path]))
    assert not found.under_way and found.main is not None and found.main.confidence == "likely"
    assert "what came after the dump, 3.0 s of it, is not seen" in facts(found)["against it"]
    told = facts(found)["at the dump"]
    assert told.startswith("5.0 s into the step rank 0 was in the wait for a batch for 5.0 s; 1 command was without")
    assert "by path 10.0.1.1:4420, for 5.0 s; Python was at train.py:9 batch < run.py:1 <module>" in told
    assert page(found, gather([tmp_path]))


def test_commands_of_which_a_dump_saw_nothing_were_not_slow(tmp_path: Path) -> None:
    """It was computing when it was dumped; what nobody marked came then."""
    rank = Rank().usual().step(cause="compute", compute=1.0)
    write_dump(tmp_path / dump_name(0), rank.dump("watchdog"))
    lines = [step(n, 1000.0 + n * 0.027, fetch=0.002, compute=0.02, collective=0.005) for n in range(8)]
    lines.append(step(8, 1000.0 + 8 * 0.027, compute=1.0, other=60.0))
    write(tmp_path / "rank-00000.jsonl", [header(0, 1, pid=1), *lines])
    found = explain(gather([tmp_path]))
    assert found.main is not None and found.main.cause == "other"
    assert facts(found)["against it"] == "a save, or reads, that nobody marked would be in it"


def test_what_a_dump_saw_nothing_of_it_says_nothing_of(tmp_path: Path) -> None:
    """The step was in a wait when it was dumped; most of it was a save that came then."""
    stalled(tmp_path, after_s=99.0, fetch=5.0, checkpoint=60.0)
    found = explain(gather([tmp_path]))
    assert found.main is not None and (found.main.cause, found.main.storage) == ("checkpoint", "unknown")
    assert "there are no I/O events of it" in found.main.against[0]
    assert [(each.cause, each.storage) for each in found.findings] == [("checkpoint", "unknown")]


def test_steps_behind_the_dump_are_known_without_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stalled(tmp_path, after_s=9.0, fetch=7.98, compute=0.02)
    assert main(["watch", "explain", str(tmp_path), "--step", "20"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Step 20 took 3.0 s instead of 27.0 ms, and it was storage: rank 0 on node0 waited 3.0 s")
    assert "no I/O events  of rank 0: the dump is from before this step" in text and "dumped by" not in text
    assert "there are no I/O events of this step" in text and "had no answer" not in text
    assert main(["watch", "explain", str(tmp_path), "--step", "15", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ranks_dumped_before"] == [0] and told["took_s"] == pytest.approx(0.027) and told["at_dump"] == {}


def test_a_step_that_is_asked_for_is_found_however_long_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.measure.blackbox.evidence.KEPT_LAST", 4)
    monkeypatch.setattr("headrace.measure.blackbox.evidence.KEPT_LONGEST", 2)
    stalled(tmp_path, after_s=9.0, compute=0.02)
    # The one that was under way, short as it was in the end; and the one that was asked for.
    assert 3 in gather([tmp_path], step=3).ranks[0].steps
    assert gather([tmp_path]).ranks[0].under_way is None
    write(tmp_path / "b" / "rank-00000.jsonl", [header(0, 1), *(step(n, compute=1.0) for n in range(60))])
    assert explain(gather([tmp_path / "b"], step=30), 30).step == 30


def test_a_damaged_dump_does_not_keep_files_from_being_read(tmp_path: Path) -> None:
    damaged = tmp_path / dump_name(0)
    damaged.write_bytes(b"torn")
    write(tmp_path / "rank-00000.jsonl", [header(0, 1), *(step(n, 1000.0 + n, compute=1.0) for n in range(9))])
    assert str(damaged) in facts(explain(gather([tmp_path])))["not read"]
    write(tmp_path / "rank-00000.jsonl", [header(0, 1)])
    with pytest.raises(UsageError, match=r"nothing to explain.* found this is no dump that can be read"):
        gather([tmp_path])


def test_of_many_ranks_fewer_steps_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(4):
        write(tmp_path / f"rank-{rank:05d}.jsonl", [header(rank, 4), *(step(n, compute=1.0) for n in range(200))])
    assert {len(each.steps) for each in gather([tmp_path]).ranks.values()} == {200}
    monkeypatch.setattr("headrace.measure.blackbox.evidence.KEPT_OF_ALL", 400)
    assert {len(each.steps) for each in gather([tmp_path]).ranks.values()} == {100 + 64}


@pytest.mark.parametrize("lacked", [0.9, 0.01])
def test_reads_that_waited_for_a_cpu_to_take_their_answers_are_no_storage(tmp_path: Path, lacked: float) -> None:
    lines = [step(n, 1000.0 + n, fetch=0.1, compute=1.0) for n in range(9)]
    lines.append(step(9, 1010.0, {"window_s": 4.0, "io_run_queue_s": 4.0 * lacked}, fetch=3.0, compute=1.0))
    found = explain(gather([write(tmp_path / "rank-00000.jsonl", [header(0, 1), *lines])]))
    assert found.main is not None
    if lacked < 0.5:
        assert (found.main.cause, found.storage) == ("fetch", "yes") and len(found.findings) == 1
    else:
        assert (found.main.cause, found.storage) == ("starved", "no")
        assert "while the thread that takes their answers lacked a CPU" in facts(found)["because"]


def test_events_that_make_no_sense_are_no_traceback() -> None:
    """A dump is whole where it can be read; what is in it may be anything."""
    chance = random.Random(1)
    for _ in range(15):
        rank = Rank(0, 2).usual().step(hangs=(0, 1), cause="wait", wait=9.0)
        for _ in range(20):
            event = list(chance.choice(rank.events))
            event[chance.choice([1, 2, 5, 6, 7])] = chance.choice([0, 77, 255])
            rank.events.append(tuple(event))
        told = evidence(rank)
        found = explain(told)
        assert sentence(found) and facts(found) and page(found, told)
