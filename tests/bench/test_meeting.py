"""Ranks that measure together: all begin at one moment, results come together, and no rank is waited for for ever."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.meeting import Meeting, beats, meet, seat_of
from headrace.bench.meeting.folder import FolderMeeting
from headrace.bench.meeting.messages import HELLO_BYTES, MAGIC, Garbage, Inbox, encode
from headrace.bench.meeting.seat import first_node
from headrace.bench.meeting.tcp import TcpMeeting, _listen
from headrace.errors import MeetingFailed, UsageError
from headrace.testing.serve import free_port
from tests.bench.crew import Crew, seat
from tests.waiting import PATIENCE_S, until


@pytest.fixture(params=["port", "folder"])
def how(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return {"port": free_port()} if request.param == "port" else {"folder": tmp_path}


def test_ranks_begin_together_and_rank_0_merges(how: dict[str, Any], tmp_path: Path) -> None:
    def work(meeting: Meeting) -> Any:
        begin_s = meeting.start({"pattern": "read"}, within_s=PATIENCE_S)
        merged = meeting.gather({"rank": meeting.seat.rank, "pad": "x" * 300_000}, merge, within_s=PATIENCE_S)
        return begin_s, merged, meeting.hosts

    def merge(values: list[Any]) -> Any:
        return [value["rank"] for value in values]

    found = Crew(work, [2, 1, 0], 3, join_s=PATIENCE_S, **how).join()
    begins = [found[rank][0] for rank in range(3)]
    # One machine has one monotonic clock: what was agreed on is the same moment, as far as clocks could be compared.
    assert max(begins) - min(begins) < 0.5
    assert all(found[rank][1:] == ([0, 1, 2], ["node0", "node1", "node2"]) for rank in range(3)), found
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_never_comes_is_named_on_every_rank(how: dict[str, Any]) -> None:
    found = Crew(lambda meeting: None, [0, 2], 4, join_s=2.0, **how).join()
    for rank in (0, 2):
        assert isinstance(found[rank], MeetingFailed)
        assert "ranks 1 and 3 of 4 did not come within 2 s" in str(found[rank])


def test_rank_0_that_never_comes_is_named(how: dict[str, Any]) -> None:
    found = Crew(lambda meeting: None, [1], 2, join_s=0.5, **how).join()
    assert "rank 0 was not there within 0.5 s" in str(found[1])


def test_a_rank_that_fails_is_named_on_every_rank_with_its_reason(how: dict[str, Any]) -> None:
    def work(meeting: Meeting) -> Any:
        meeting.start("all the same", within_s=PATIENCE_S)
        if meeting.seat.rank == 1:
            raise UsageError("no room", where="/data")
        return meeting.gather(1, len, within_s=PATIENCE_S)

    found = Crew(work, [0, 1, 2], 3, join_s=PATIENCE_S, **how).join()
    assert isinstance(found[1], UsageError)
    for rank in (0, 2):
        assert isinstance(found[rank], MeetingFailed)
        assert str(found[rank]) == "rank 1 (node1) failed: no room at /data"


def test_rank_0_that_fails_is_named_on_every_rank(how: dict[str, Any]) -> None:
    def work(meeting: Meeting) -> Any:
        if meeting.seat.rank == 0:
            raise UsageError("nothing to read")
        return meeting.gather(1, len, within_s=PATIENCE_S)

    found = Crew(work, [0, 1], 2, join_s=PATIENCE_S, **how).join()
    assert isinstance(found[1], MeetingFailed) and str(found[1]) == "rank 0 failed: nothing to read"


def test_a_rank_that_brings_nothing_is_named(how: dict[str, Any]) -> None:
    over = threading.Event()

    def work(meeting: Meeting) -> Any:
        if meeting.seat.rank == 1:
            over.wait(PATIENCE_S)
            return None
        try:
            return meeting.gather(1, len, within_s=2.0)
        finally:
            over.set()

    found = Crew(work, [0, 1, 2], 3, join_s=PATIENCE_S, **how).join()
    for rank in (0, 2):
        assert "rank 1 (node1)" in str(found[rank]) and "within 2 s" in str(found[rank])


@pytest.mark.parametrize(("what", "hung"), [("held", 1), ("silent", 0)])
def test_a_rank_that_hangs_is_named_soon_and_since_when(
    how: dict[str, Any], what: str, hung: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its main thread sits in one call, as on a mount that hangs; or nothing comes of it, as of a stopped process."""
    monkeypatch.setattr(beats, "BEAT_S", 0.05)
    monkeypatch.setattr(beats, "HANGS_S", 1.5 if what == "held" else 60.0)
    for kind in (Meeting, FolderMeeting):
        monkeypatch.setattr(kind, "silent_s", 60.0 if what == "held" else 3.0)
    over = threading.Event()
    count = [0]

    def work(meeting: Any) -> Any:
        meeting.gather(1, len, within_s=PATIENCE_S)
        if meeting.seat.rank == hung:
            if what == "silent":
                meeting._beats.stop()
            over.wait(PATIENCE_S)
            return None
        try:
            # Longer than a hang is looked for: who is heard of is waited for.
            return meeting.gather(1, len, within_s=2 * PATIENCE_S)
        finally:
            count[0] += 1
            if count[0] == 2:
                over.set()

    begun_s = time.time()
    found = Crew(work, [0, 1, 2], 3, join_s=PATIENCE_S, **how).join()
    word = "hangs" if what == "held" else "has not been heard of"
    for rank in {0, 1, 2} - {hung}:
        told = re.match(rf"rank {hung} \(node{hung}\) {word} since (\d\d:\d\d:\d\d): found", str(found[rank]))
        assert isinstance(found[rank], MeetingFailed) and told, found
        # To the second, of this day or of the one that ends now.
        moments = {time.strftime("%H:%M:%S", time.localtime(begun_s + after)) for after in range(-1, 60)}
        assert told[1] in moments


def test_ranks_that_were_told_different_things_do_not_measure(how: dict[str, Any]) -> None:
    found = Crew(
        lambda meeting: meeting.start({"flows": meeting.seat.rank // 2}, within_s=PATIENCE_S), [0, 1, 2], 3,
        join_s=PATIENCE_S, **how,
    ).join()  # fmt: skip
    for rank in range(3):
        assert "rank 2 (node2) measures something else than rank 0 does" in str(found[rank])


def test_rounds_leave_no_files_behind(tmp_path: Path) -> None:
    seen: list[int] = []

    def work(meeting: Meeting) -> int:
        for _ in range(8):
            meeting.gather(1, sum, within_s=PATIENCE_S)
            seen.append(sum(1 for _ in tmp_path.iterdir()))
        return max(seen)

    found = Crew(work, [0, 1], 2, join_s=PATIENCE_S, folder=tmp_path).join()
    # The run's name; an answer, a value and what is being written of each rank; who it is, who has gone, and beats.
    assert max(found.values()) <= 9


@pytest.mark.parametrize("failed", [False, True])
def test_what_an_earlier_run_left_in_the_folder_misleads_nobody(tmp_path: Path, failed: bool) -> None:
    old = f"headrace-meet-{seat(0, 2).token}-"
    (tmp_path / f"{old}run.json").write_text(json.dumps({"run": "0123456789abcdef"}))
    answer = (
        {"failed": "rank 1 was missing", "words": ["1"]} if failed else {"answer": ["old"] * 2, "words": ["1", "2"]}
    )
    (tmp_path / f"{old}0123456789abcdef-0-all.json").write_text(
        json.dumps({**answer, "words": ["1", "2"], "clock": 0.0})
    )
    (tmp_path / f"{old}0123456789abcdef-1-all.json").write_text(json.dumps({"answer": "wrong"}))
    other = tmp_path / f"headrace-meet-{seat(0, 2, run='b').token}-run.json"
    other.write_text(json.dumps({"run": "of another job that goes on"}))
    mine = tmp_path / "not of the meeting"
    mine.write_text("stays")

    def work(meeting: Meeting) -> Any:
        return meeting.gather(meeting.seat.rank, sum, within_s=PATIENCE_S)

    others = Crew(work, [1], 2, join_s=PATIENCE_S, folder=tmp_path)
    until(lambda: any(tmp_path.glob(f"{old}0123456789abcdef-0-1.json")), "rank 1 believes the old run")
    found = {**Crew(work, [0], 2, join_s=PATIENCE_S, folder=tmp_path).join(), **others.join()}
    assert found == {0: 1, 1: 1}
    assert {*tmp_path.iterdir()} == {mine, other}


# ---- strangers ----

GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"",
    b"HR",
    MAGIC + b"\xff\xff\xff\xff" + b"x" * 100,
    MAGIC + (HELLO_BYTES + 1).to_bytes(4, "big"),
    encode({"hello": "wrong", "rank": 1, "world": 2}),
    encode({"hello": 7, "rank": True}),
    encode({"value": 1}),
    MAGIC + (4).to_bytes(4, "big") + b"[[[[",
    MAGIC + (3000).to_bytes(4, "big") + b"[" * 3000,
    MAGIC + (5).to_bytes(4, "big") + b'"abc"',
    os.urandom(5000),
]


def test_garbage_on_the_port_changes_nothing() -> None:
    port = free_port()
    crew = Crew(lambda m: (m.gather(1, sum, within_s=PATIENCE_S), m), [0], 2, join_s=PATIENCE_S, port=port)
    for junk in GARBAGE:
        with _connected(port) as stranger, suppress(ConnectionError):
            stranger.sendall(junk)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(PATIENCE_S)
            while stranger.recv(1000):
                pass  # Sent away, at most with a word on why.
    found = {**Crew(lambda m: m.gather(1, sum, within_s=PATIENCE_S), [1], 2, join_s=PATIENCE_S, port=port).join()}
    merged, meeting = crew.join()[0]
    assert (found[1], merged) == (2, 2)
    assert meeting.strangers == len(GARBAGE)


def test_a_rank_that_sends_garbage_later_ends_the_meeting_on_every_rank() -> None:
    def work(meeting: Meeting) -> Any:
        if meeting.seat.rank == 1:
            assert isinstance(meeting, TcpMeeting) and meeting._socket is not None
            meeting._socket.sendall(MAGIC + b"\xff\xff\xff\xff")
        return meeting.gather(1, sum, within_s=PATIENCE_S)

    found = Crew(work, [0, 1, 2], 3, join_s=PATIENCE_S, port=free_port()).join()
    for rank in range(3):
        assert "rank 1 (node1) sent what cannot be read" in str(found[rank])


def test_two_runs_on_one_port_do_not_mix() -> None:
    port = free_port()
    crew = Crew(lambda meeting: None, [0], 2, join_s=3.0, port=port)
    with _connected(port):
        pass
    with pytest.raises(MeetingFailed, match="belongs to another run"):
        meet(seat(1, 2, run="b"), port=port, join_s=3.0)
    assert "of another run came from 127.0.0.1" in str(crew.join()[0])


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="--meet-port"):
        meet(seat(0, 2), port=taken.getsockname()[1], join_s=1.0)


def test_rank_0_is_reached_where_its_name_is_its_loopback_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts has 127.0.1.1 for a node's own name; the others have its address from DNS."""

    def resolved(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]

    monkeypatch.setattr("headrace.bench.meeting.tcp.socket.getaddrinfo", resolved)
    for address, where in (("gpu001", "0.0.0.0"), ("127.0.1.1", "127.0.1.1")):
        (listener,) = _listen(address, free_port())
        with listener:
            assert listener.getsockname()[0] == where


def _connected(port: int) -> socket.socket:
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        except OSError:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


@settings(max_examples=50)
@given(st.binary(max_size=200), st.lists(st.integers(1, 60), max_size=6))
def test_no_bytes_take_more_memory_than_they_have(data: bytes, cuts: list[int]) -> None:
    inbox = Inbox(100)
    with suppress(Garbage):
        for piece in _pieces(MAGIC + data, cuts):
            inbox.feed(piece)
            while inbox.next() is not None:
                pass
    assert len(inbox._bytes) <= len(MAGIC + data)


@settings(max_examples=30)
@given(
    st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text()), max_size=5), st.lists(st.integers(1, 9))
)
def test_messages_come_out_as_they_went_in(messages: list[dict[str, Any]], cuts: list[int]) -> None:
    inbox, found = Inbox(10_000), []
    for piece in _pieces(b"".join(encode(message) for message in messages), cuts):
        inbox.feed(piece)
        while (message := inbox.next()) is not None:
            found.append(message)
    assert found == messages


def _pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    for cut in cuts:
        yield data[:cut]
        data = data[cut:]
    yield data


# ---- the environment ----


def test_seats_of_torchrun_and_slurm() -> None:
    torchrun = {
        "RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu001", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x",
    }  # fmt: skip
    found = seat_of(torchrun)
    assert found is not None and (found.rank, found.world, found.address) == (3, 8, "gpu001")
    slurm = {
        "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "gpu[003-007,9],login1",
    }  # fmt: skip
    found = seat_of(slurm)
    assert found is not None and (found.rank, found.world, found.address) == (1, 4, "gpu003")
    other = seat_of({**slurm, "SLURM_STEP_ID": "1"})
    assert other is not None and other.token != found.token
    assert seat_of({}) is None
    assert seat_of({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None, "a shell inside an allocation"
    assert seat_of({**torchrun, "RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize("name, text", [("RANK", "8"), ("RANK", "-1"), ("RANK", "x"), ("WORLD_SIZE", "9" * 9)])
def test_an_environment_that_cannot_be_meant(name: str, text: str) -> None:
    with pytest.raises(UsageError):
        seat_of({"RANK": "1", "WORLD_SIZE": "8", name: text})


@pytest.mark.parametrize(
    "nodes, first",
    [("n1", "n1"), ("n[1-3]", "n1"), ("rack[1-2]-n[03-4]", "rack1-n03"), ("a,b", "a"), ("", ""), ("n[7,9],x", "n7")],
)
def test_first_nodes(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


# ---- processes ----

RANK = """
    import os, sys
    from headrace.bench.meeting import Meeting, beats, meet, seat_of
    from headrace.errors import MeetingFailed

    beats.BEAT_S, Meeting.silent_s = 0.2, 3.0

    try:
        with meet(seat_of(os.environ), port=int(sys.argv[1]), join_s=60) as meeting:
            meeting.start("read", within_s=60)
            print("together", flush=True)
            sys.stdin.readline()
            print(meeting.gather(meeting.seat.rank, sum, within_s=60), flush=True)
    except MeetingFailed as error:
        print(error, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_processes_as_torchrun_starts_them_and_one_is_killed_or_stopped(number: signal.Signals) -> None:
    port = free_port()
    settings_of = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RANK), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANK": str(rank), **settings_of},
        )
        for rank in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "together\n"
        processes[1].send_signal(number)
        for process in (processes[0], processes[2]):
            said, _ = process.communicate("\n", timeout=PATIENCE_S)
            name = f"rank 1 ({socket.gethostname()})"
            if number == signal.SIGKILL:
                assert said.strip() in (f"{name} died or was stopped before it was done", f"{name} was lost")
            else:
                assert said.startswith(f"{name} has not been heard of since "), said
    finally:
        for process in processes:
            process.kill()
            process.communicate()
