"""Dumps of the Flight Recorder from anywhere: nothing in them is carried out, and ranks are put together."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.errors import UsageError
from headrace.measure.blackbox import dump_name, write_dump
from headrace.measure.blackbox import flight_recorder as module
from headrace.measure.blackbox.evidence import of_dump, together
from headrace.measure.blackbox.explain import explain
from headrace.measure.blackbox.flight_recorder import (
    MOST_BYTES,
    FlightRecord,
    lacking,
    mismatches,
    parse_flight_recorder,
    read_flight_recorder,
)
from headrace.measure.blackbox.plain import load_plain
from headrace.measure.blackbox.tell import facts
from tests.measure.dumps import Rank
from tests.measure.test_report import check_page


def entry(sequence: int, created_ns: int = 10**18, name: str = "all_reduce", **others: Any) -> dict[str, Any]:
    return {
        "process_group": ("0", "default_pg"), "collective_seq_id": sequence, "p2p_seq_id": 0, "is_p2p": False,
        "profiling_name": f"nccl:{name}", "time_created_ns": created_ns, "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None, "state": "completed", "retired": True,
        "frames": [{"name": "all_reduce", "filename": "/x/torch/distributed/c10d.py", "line": 9},
                   {"name": "train", "filename": "/home/a/train.py", "line": 41}],
        **others,
    }  # fmt: skip


def said(*entries: dict[str, Any], world: int = 3) -> dict[str, Any]:
    ranks = json.dumps(list(range(world)))
    return {
        "version": "2.10", "entries": list(entries),
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
    }  # fmt: skip


def record(rank: int, *entries: dict[str, Any], world: int = 3) -> FlightRecord:
    return parse_flight_recorder(pickle.dumps(said(*entries, world=world), 2), Path(f"/tmp/trace_{rank}"))


OPEN = {"state": "started", "retired": False}


def test_both_forms_and_every_protocol_say_the_same() -> None:
    dump = said(entry(1), entry(2, **OPEN))
    forms = [json.dumps(dump).encode(), *(pickle.dumps(dump, protocol) for protocol in (2, 3, 4, 5))]
    first, *others = [parse_flight_recorder(form, Path("nccl_trace_rank_7")) for form in forms]
    assert all(each == first for each in others)
    assert first.rank == 7 and first.members == {"0": (0, 1, 2)}
    assert first.collectives[1].under_way and not first.collectives[0].under_way
    assert (first.collectives[0].name, first.collectives[0].where) == ("all_reduce", "train.py:41")


def test_one_list_in_a_million_places_takes_no_time_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_MEMBERS", 10_000)
    group = {"name": "0", "desc": "", "ranks": list(range(1000))}
    data = pickle.dumps({"version": "2.1", "entries": [], "pg_config": {str(at): group for at in range(10)}})
    with pytest.raises(UsageError, match="members of groups"):
        parse_flight_recorder(data, Path("trace_0"))
    frames = [{"filename": "/torch/a.py", "line": 1}] * 1000 + [{"filename": "/b.py", "line": 1}]
    assert (
        parse_flight_recorder(pickle.dumps(said(entry(1, frames=frames))), Path("trace_0")).collectives[0].where == ""
    )
    with pytest.raises(ValueError, match="a key that is no text"):
        # Whose hashes are one.
        load_plain(pickle.dumps({at * ((1 << 61) - 1): None for at in range(1, 5)}, 2))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("/tmp").joinpath, ("x",))


def test_a_pickle_carries_nothing_out_and_takes_no_memory_by_its_word() -> None:
    laughs: Any = "x"
    for _ in range(60):
        laughs = [laughs, laughs]
    deep = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
    for data in (
        pickle.dumps(Evil()),
        pickle.dumps({**said(entry(1)), "more": Evil()}),
        b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fx.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7fx.",
        b"\x80\x02}r\xff\xff\xff\xff.",
        b"\x80\x02}K\x01h\x05s.",
        b"\x80\x02(.",
        b"\x80\x02.",
        b"\x80\x02}](a.",
        b"\x80\x02}]K\x01s.",
        deep,
        pickle.dumps({"version": "2.10", "entries": [{**entry(1), "profiling_name": laughs}]}),
        pickle.dumps({"version": "2.10", "entries": [{**entry(1), "time_created_ns": 2**70}]}),
        pickle.dumps({"version": "2.10", "entries": {}}),
        pickle.dumps({"version": "2.10", "pg_config": {"0": {"ranks": "[-1]"}}}),
        b"",
        b"{",
        b'{"version": "2.10", "entries": ' + b"[" * 100_000,
    ):
        with pytest.raises(UsageError, match="not a Flight Recorder dump"):
            parse_flight_recorder(data, Path("trace_0"))
    with pytest.raises(ValueError, match="operations"):
        load_plain(pickle.dumps(list(range(100))), most_operations=50)
    whole = pickle.dumps(said(entry(1)), 4)
    for length in range(len(whole)):
        with pytest.raises(UsageError):
            parse_flight_recorder(whole[:length], Path("trace_0"))


def test_what_is_no_dump_is_one_clear_line(tmp_path: Path) -> None:
    large = tmp_path / "trace_0"
    with large.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    for path, match in (
        (large, "too large"),
        (tmp_path / "trace_9", "cannot be read"),
    ):
        with pytest.raises(UsageError, match=match):
            read_flight_recorder(path)
    with pytest.raises(UsageError, match="another format"):
        parse_flight_recorder(pickle.dumps({**said(), "version": "3.0"}), Path("trace_0"))
    with pytest.raises(UsageError, match="whose"):
        parse_flight_recorder(pickle.dumps(said()), Path("trace"))


def test_who_had_not_come_to_a_collective() -> None:
    came = [record(rank, entry(1), entry(2, 10**18 + rank, **OPEN)) for rank in (0, 1)]
    (found,) = lacking([*came, record(2, entry(1))], 3)
    assert (found.sequence, found.joined, found.missing, found.unknown) == (2, (0, 1), (2,), ())
    assert found.since_ns == 10**18 and found.where == "train.py:41"
    # Its dump is missing.
    (found,) = lacking(came, 3)
    assert (found.missing, found.unknown) == ((), (2,))
    # All came: it is slow itself.
    assert lacking([*came, record(2, entry(1), entry(2, **OPEN))], 3) == []
    # It has asked for nothing yet.
    (found,) = lacking([*came, record(2)], 3)
    assert (found.sequence, found.missing) == (1, (2,))
    # Two groups, of which only one lacks somebody; one between two ranks says nothing.
    mine = {"process_group": ("1", "tensor")}
    both = [record(rank, entry(1), entry(4, **mine), *([entry(5, **OPEN, **mine)] if rank else []),
                   entry(9, is_p2p=True, p2p_seq_id=rank)) for rank in (0, 1)]  # fmt: skip
    (found,) = lacking(both, 2)
    assert (found.description, found.sequence, found.missing) == ("tensor", 5, (0,))


def test_ranks_that_ask_for_different_collectives_are_told() -> None:
    (found,) = mismatches(
        [record(0, entry(1), entry(2, **OPEN)), record(1, entry(1), entry(2, name="broadcast", **OPEN))]
    )
    assert (found.sequence, found.names) == (2, {"all_reduce": (0,), "broadcast": (1,)})


def test_collectives_stand_beside_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the clock of each node; the one of rank 1 is 7 s ahead, and its step began with a wait for reads."""
    late = (
        Rank(1, 2, ahead_ns=7_000_000_000).usual().step(slow={(0, 1): 0.45}, fetch=0.5, compute=0.02, collective=0.005)
    )
    other = Rank(0, 2).usual().step(fetch=0.002, compute=0.02, collective=0.503)
    ranks = [other, late]
    flights = []
    for rank in ranks:
        # Asked for when the collective begins; the node's clock is ahead as well.
        begun = rank.steps[-1].started_ns + round(1e9 * (rank.steps[-1].spent["fetch"] + 0.02))
        flights.append(record(rank.rank, entry(9, 10**18 + begun - rank.ahead_ns), world=2))
    found = explain(together([of_dump(rank.dump()) for rank in ranks], flights))
    assert found.late is not None and (found.late.rank, found.late.sequence) == (1, 9)
    assert found.late.seconds == pytest.approx(0.498)
    assert "rank 1 came to all_reduce number 9 of default_pg (train.py:41) 498.0 ms" in facts(found)["collective"]

    # A job that hangs; dumps of one that goes on are not all of one moment.
    hangs = [
        Rank(0, 2).usual().step(cause="collective", compute=0.02, collective=9.0),
        Rank(1, 2).usual().step(hangs=(0, 1), cause="wait", quiet=True, wait=9.02),
    ]
    for rank in hangs:
        write_dump(tmp_path / dump_name(rank.rank), rank.dump())
    folder = tmp_path / "flights"
    folder.mkdir()
    (folder / "nccl_trace_rank_0").write_bytes(pickle.dumps(said(entry(9, **OPEN), world=2)))
    (folder / "nccl_trace_rank_1").write_bytes(pickle.dumps(said(entry(8), world=2)))
    files = ["--flight-recorder", str(folder), "--html", str(tmp_path / "page.html")]
    assert main(["watch", "explain", str(tmp_path), *files]) == 0
    text = capsys.readouterr().out
    assert "rect" in check_page((tmp_path / "page.html").read_text()).tags
    told = "all_reduce number 9 of default_pg (train.py:41): rank 0 waited; rank 1 had not come to it"
    assert told in text
    # Where a box puts them, they are found; one that is damaged is no reason to say nothing.
    (folder / "nccl_trace_rank_0").rename(tmp_path / "flight-recorder-0")
    (folder / "nccl_trace_rank_1").rename(tmp_path / "flight-recorder-1")
    assert main(["watch", "explain", str(tmp_path)]) == 0
    assert told in capsys.readouterr().out
    (tmp_path / "flight-recorder-1").write_bytes(b"torn")
    assert main(["watch", "explain", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert told not in text and "not a Flight Recorder dump at" in text


def test_dumps_of_what_is_under_way_only_say_by_their_status_who_had_come() -> None:
    """`onlyActive`: who has nothing under way may have done all, or not have come."""
    dumps = [said(entry(5, **OPEN), world=3), said(world=3), said(world=3)]
    for dump, last in zip(dumps, (5, 5, 4), strict=True):
        dump["pg_status"] = {"0": {"last_enqueued_collective": last}}
    records = [
        parse_flight_recorder(json.dumps(dump).encode(), Path(f"trace_{rank}")) for rank, dump in enumerate(dumps)
    ]
    (found,) = lacking(records, 3)
    assert (found.sequence, found.joined, found.missing) == (5, (0,), (2,))
