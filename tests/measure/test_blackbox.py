"""The black box of a rank: what makes it dump, what is in a dump, and what it leaves alone."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from headrace.accidents.processes import Child, Processes
from headrace.accidents.relay import Relay
from headrace.device import EventKind, open_device
from headrace.errors import UsageError
from headrace.fabric import MemoryMedia, NamespaceOptions, SubsystemOptions, Target, TargetOptions
from headrace.measure.blackbox import BlackBox, Dump, dump_name, pauses, read_dump
from headrace.measure.blackbox import box as module
from headrace.measure.blackbox import take as taking
from headrace.measure.blackbox.box import DUMP_NOW, DumpFailed
from headrace.measure.watch.watch import Watch
from headrace.testing.devices import MemoryDevice
from tests.measure.watches import Hands
from tests.waiting import until

BLOCK = 4096


@pytest.fixture
def watch() -> Iterator[Watch]:
    with Watch(device=None, rank=3, world=4) as watch:
        yield watch


def dumps(folder: Path) -> list[Dump]:
    """The last one first."""
    found = [folder / dump_name(3), *sorted(folder.glob("rank-00003.before-*.blackbox"))]
    return [read_dump(path) for path in found if path.exists()]


def wait_for(folder: Path, why: str) -> Dump:
    until(lambda: (folder / dump_name(3)).exists() and dumps(folder)[0].why == why, why)
    return dumps(folder)[0]


def test_a_dump_has_the_last_steps_and_events_of_all_devices(watch: Watch, tmp_path: Path) -> None:
    with open_device("mem:1MiB") as device, BlackBox(tmp_path, watch=watch) as box:
        for step in range(3):
            watch.begin_step(step)
            with watch.fetch():
                device.read_into(step * BLOCK, bytearray(BLOCK))
        with watch.compute():
            assert box.dump("why not") == tmp_path / "rank-00003.blackbox" == box.path
        dump = read_dump(box.path)
        assert (dump.rank, dump.world, dump.pid, dump.why, dump.detail) == (3, 4, os.getpid(), "request", "why not")
        assert [step.step for step in dump.steps] == [0, 1] and dump.under_way is not None
        assert (dump.under_way.step, dump.under_way.cause) == (2, "compute") and dump.under_way.spent["fetch"] > 0
        (index,) = (index for index, each in enumerate(dump.devices) if each.uri == device.uri)
        reads = dump.events_of(index)
        assert list(reads["offset"]) == [0, BLOCK, 2 * BLOCK] and (reads["kind"] == EventKind.READ).all()
        # Reads lie in the steps in which they were, and those before the moment at which the dump was made.
        for step, read in zip([*dump.steps, dump.under_way], reads, strict=True):
            assert step.started_ns <= read["started_ns"] and read["ended_ns"] <= (step.ended_ns or time.monotonic_ns())
        assert dump.started.monotonic_ns < reads[0]["started_ns"] < dump.dumped.monotonic_ns
        assert abs(dump.realtime_ns(dump.dumped.monotonic_ns) - time.time_ns()) < 60e9
        mine = next(frames for name, frames in dump.threads.items() if name.startswith("MainThread"))
        assert any(__file__ in frame for frame in mine)


def test_devices_that_cannot_tell_say_why_and_what_is_too_much_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking, "MOST_EVENT_BYTES", 36 * 2 * 2)
    with open_device("mem:1MiB") as device, BlackBox(tmp_path, devices=[device, MemoryDevice(BLOCK)], rank=3) as box:
        for row in range(5):
            device.read_into(row * BLOCK, bytearray(BLOCK))
        dump = read_dump(box.dump())
    assert list(dump.events["offset"]) == [3 * BLOCK, 4 * BLOCK]
    told, silent = dump.devices
    assert (told.recorded, told.lost) == (5, 3) and "records no events" in silent.why_not
    assert dump.under_way is None and dump.steps == () and dump.world == 1


def test_a_watch_that_fails_costs_its_steps_and_no_more(tmp_path: Path) -> None:
    class Broken:
        rank, world = 3, 1

        def under_way(self) -> None:
            raise RuntimeError("changed while it was looked at")

        def tell_failures(self, listener: object) -> None: ...

    with open_device("mem:1MiB") as device, BlackBox(tmp_path, watch=cast(Any, Broken()), devices=[device]) as box:
        device.read_into(0, bytearray(BLOCK))
        until(lambda: box._core.looks > 1)
        os.kill(os.getpid(), signal.SIGUSR2)
        dump = wait_for(tmp_path, "request")
    assert dump.detail.startswith("SIGUSR2 (without steps: RuntimeError(") and len(dump.events) == 1


def test_earlier_dumps_stay_and_are_bounded_in_number(tmp_path: Path) -> None:
    with BlackBox(tmp_path, rank=3, kept=3) as box:
        for number in range(5):
            box.dump(str(number))
    assert [dump.detail for dump in dumps(tmp_path)] == ["4", "3", "2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank-00003.before-1.blackbox", "rank-00003.before-2.blackbox", "rank-00003.blackbox"
    ]  # fmt: skip


def test_the_watchdog_dumps_once_for_a_step_and_knows_what_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_QUIET_S", 0.0)
    hands = Hands()
    with Watch(**hands.options, rank=3) as watch, BlackBox(tmp_path, watch=watch, watchdog_s=60.0) as box:

        def looked() -> None:
            # One may have been under way.
            before = box._core.looks
            until(lambda: box._core.looks >= before + 2)

        for _ in range(10):
            watch.begin_step()
            hands.pass_s(0.1)
        watch.begin_step()
        with watch.checkpoint():
            hands.pass_s(30.0)
            looked()
            assert dumps(tmp_path) == []
            hands.pass_s(31.0)
            first = wait_for(tmp_path, "watchdog")
            assert "step 10" in first.detail and "61.0 s" in first.detail and "in checkpoint" in first.detail
            hands.pass_s(100.0)
            looked()
        assert len(dumps(tmp_path)) == 1
        watch.begin_step()
        with watch.fetch():
            hands.pass_s(1.9)
            looked()
            assert len(dumps(tmp_path)) == 1
            hands.pass_s(0.5)
            # The one before is kept first, under a second name, then the new one takes its place.
            until(lambda: "2.4 s, where the last ones took 0.1 s by median" in dumps(tmp_path)[0].detail)
            assert len(dumps(tmp_path)) == 2


def test_a_file_asks_all_ranks_and_ranks_do_not_ask_each_other_in_circles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.05)
    request = tmp_path / DUMP_NOW

    def ask(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(request)

    ask("of a run before")
    with BlackBox(tmp_path, rank=3, world=2) as box, BlackBox(tmp_path, rank=1, world=2) as other:
        ask("the storage team wants to know")
        assert "storage team" in wait_for(tmp_path, "request").detail
        until(lambda: other.path.exists())
        first = read_dump(other.path).dumped
        # A dump by an exception calls the others, who have just made one, and nobody calls back.
        box._core.failed("", ValueError("broken"))
        assert wait_for(tmp_path, "exception").detail == "ValueError: broken"
        assert request.read_text() == "rank 3: exception: ValueError: broken"
        until(lambda: other._core._seen[request] == module._sign(request))
        # One after the other: had it been asked, that one would have come before this one.
        other.dump()
        assert len(list(tmp_path.glob("rank-00001.*blackbox"))) == 2
        first = read_dump(other.path).dumped
        monkeypatch.setattr(other._core, "_dumped_at", -1e9)
        ask("rank 3: exception: again")
        until(lambda: read_dump(other.path).dumped != first)
        assert read_dump(other.path).detail == "rank 3: exception: again"
        assert len(dumps(tmp_path)) == 2


def test_what_leaves_a_collective_is_dumped_once(watch: Watch, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="timed out"), BlackBox(tmp_path, watch=watch):
        watch.begin_step(7)
        with suppress(ConnectionError), watch.collective():
            raise ConnectionError("reset by peer")
        first = dumps(tmp_path)[0]
        assert (first.why, first.detail) == ("collective", "ConnectionError: reset by peer")
        assert first.under_way is not None and first.under_way.cause == "collective"
        with watch.collective():
            raise RuntimeError("timed out")
    assert [dump.why for dump in dumps(tmp_path)] == ["collective", "collective"]


def test_what_leaves_a_collective_again_and_again_is_dumped_now_and_then(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        with suppress(ConnectionError), watch.collective():
            raise ConnectionError("reset by peer")

    watch.begin_step(7)
    with BlackBox(tmp_path, watch=watch, kept=10) as box:
        for _ in range(5):
            fails()
        assert len(dumps(tmp_path)) == 1
        assert (
            caplog.text.count("another ConnectionError in collective (ConnectionError: reset by peer), not dumped") == 1
        )
        # Another kind is.
        with suppress(ValueError), watch.collective():
            raise ValueError("shapes differ")
        assert len(dumps(tmp_path)) == 2
        passed = time.monotonic() + module._QUIET_S
        monkeypatch.setattr(pauses, "time", SimpleNamespace(monotonic=lambda: passed))
        fails()
        assert dumps(tmp_path)[0].detail == (
            "ConnectionError: reset by peer (4 more of its kind since the last dump of one were not dumped)"
        )
        # The pause is twice as long now.
        passed += module._QUIET_S
        fails()
        assert len(dumps(tmp_path)) == 3
    # What ends training is dumped, whatever was before it.
    with pytest.raises(ConnectionError), BlackBox(tmp_path, watch=watch, kept=10), watch.collective():
        raise ConnectionError("the end")
    with pytest.raises(ConnectionError), BlackBox(tmp_path, watch=watch, kept=10) as box:
        box._core._pauses.begin("ConnectionError in collective")
        with watch.collective():
            raise ConnectionError("the end")
    assert [dump.why for dump in dumps(tmp_path)][:2] == ["exception", "collective"]


def test_what_leaves_the_box_is_dumped_once(watch: Watch, tmp_path: Path) -> None:
    with pytest.raises(OSError), BlackBox(tmp_path, watch=watch), watch.compute():
        raise OSError("no")
    assert dumps(tmp_path)[0].why == "exception"
    with pytest.raises(SystemExit), BlackBox(tmp_path, watch=watch):
        raise SystemExit(0)
    assert len(dumps(tmp_path)) == 1


def test_what_pytorch_wrote_on_a_timeout_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = ModuleType("headrace.torch.flight_recorder")
    recorder.flight_recorder_trace = lambda: b"of now"  # type: ignore[attr-defined]
    for name in ("headrace.torch.flight_recorder", "torch.distributed"):
        monkeypatch.setitem(sys.modules, name, recorder)
    monkeypatch.setattr(module, "_LOOK_S", 0.05)
    with monkeypatch.context() as broken:
        broken.setitem(sys.modules, "headrace.torch.flight_recorder", None)
        # It is imported when the box is made, and costs the file of the recorder where it cannot be.
        with BlackBox(tmp_path, rank=3) as box:
            assert "no Flight Recorder beside dumps" in caplog.text
            box.dump()
    trace = tmp_path / "flight-recorder-3"
    assert not trace.exists()
    with BlackBox(tmp_path, rank=3) as box:
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "flight-recorder-")
        box.dump()
        assert trace.read_bytes() == b"of now"
        trace.write_bytes(b"of the timeout")
        wait_for(tmp_path, "collective")
        box.dump()
    assert trace.read_bytes() == b"of the timeout"
    # The next box has its own folder.
    assert "TORCH_FR_DUMP_TEMP_FILE" not in os.environ


def test_what_a_box_in_a_relative_folder_writes_of_the_recorder_is_not_taken_for_pytorchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = ModuleType("headrace.torch.flight_recorder")
    recorder.flight_recorder_trace = lambda: b"of now"  # type: ignore[attr-defined]
    for name in ("headrace.torch.flight_recorder", "torch.distributed"):
        monkeypatch.setitem(sys.modules, name, recorder)
    monkeypatch.setattr(module, "_LOOK_S", 0.05)
    monkeypatch.chdir(tmp_path)
    with BlackBox("runs", rank=3) as box:
        box.dump()
        # Both are looked at together.
        (tmp_path / "runs" / DUMP_NOW).touch()
        until(lambda: any(DUMP_NOW in dump.detail for dump in dumps(tmp_path / "runs")), "what the file asks for")
        box.dump("last")
    assert "collective" not in [dump.why for dump in dumps(tmp_path / "runs")]
    assert (tmp_path / "runs" / "flight-recorder-3").read_bytes() == b"of now"


def test_signals_are_heard_and_passed_on_and_given_back(tmp_path: Path) -> None:
    heard: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        heard.append(len(dumps(tmp_path)))

    before = signal.signal(signal.SIGTERM, mine)
    woken = signal.set_wakeup_fd(-1)
    try:
        with BlackBox(tmp_path, rank=3) as box:
            assert box.signals == ""
            os.kill(os.getpid(), signal.SIGUSR2)
            wait_for(tmp_path, "request")
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: heard)
            # The dump was there when the handler of before ran.
            assert heard == [2] and dumps(tmp_path)[0].why == "sigterm"
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: len(heard) == 2)
        assert signal.getsignal(signal.SIGTERM) is mine and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        assert signal.set_wakeup_fd(woken) == -1
        first, second = BlackBox(tmp_path / "a", rank=3), BlackBox(tmp_path / "b", rank=3)
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_for(tmp_path / "a", "request")
        wait_for(tmp_path / "b", "request")
        first.close()
        second.close()
        assert signal.set_wakeup_fd(woken) == -1
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with BlackBox(tmp_path / "c", rank=3):
            # Somebody who comes later has the last word: the process goes on.
            later: list[int] = []
            signal.signal(signal.SIGTERM, lambda number, frame: later.append(number))
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(tmp_path / "c", "sigterm")
            until(lambda: later)
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, mine)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with BlackBox(tmp_path, rank=3) as box:
            assert box.signals == "SIGTERM was ignored when the box was made"
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.set_wakeup_fd(woken)


def test_signals_are_heard_where_many_files_are_open(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2048:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    first = os.open(os.devnull, os.O_RDONLY)
    others = [os.dup(first)]
    try:
        while others[-1] < 1024:
            others.append(os.dup(first))
        with BlackBox(tmp_path, rank=3):
            os.kill(os.getpid(), signal.SIGUSR2)
            wait_for(tmp_path, "request")
    finally:
        for each in (first, *others):
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_another_thread_has_a_box_without_signals(tmp_path: Path) -> None:
    found: list[str] = []

    def work() -> None:
        with BlackBox(tmp_path, rank=3) as box:
            found.append(box.signals)
            box.dump()

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in found[0] and len(dumps(tmp_path)) == 1 and signal.getsignal(signal.SIGTERM) is before


def test_a_child_of_a_fork_ends_by_a_signal_and_its_parent_hears_nothing(tmp_path: Path) -> None:
    with BlackBox(tmp_path, rank=3) as box:
        near, far = os.pipe()
        child = os.fork()
        if not child:
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                # It would not end by it while it is in C code.
                os._exit(1)
            try:
                box.dump()
            except UsageError as error:
                os.write(far, str(error).encode())
            time.sleep(600)
            os._exit(0)
        assert b"belongs to the process" in os.read(near, 1000)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        os.close(near)
        os.close(far)
        box.dump("the parent's")
    assert [dump.detail for dump in dumps(tmp_path)] == ["the parent's"]


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_box_that_cannot_write_says_so_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with BlackBox(tmp_path / "a", rank=3) as box:
        box.path.parent.rmdir()
        with pytest.raises(DumpFailed, match="not written"):
            box.dump()
        box.path.parent.mkdir()
        box.dump("first")
        box.dump("second")
        with monkeypatch.context() as full:
            full.setattr(Path, "write_bytes", no_room)
            for _ in range(4):
                with pytest.raises(DumpFailed, match="No space left"):
                    box.dump()
        # What was there before is there still.
        assert [dump.detail for dump in dumps(tmp_path / "a")] == ["second", "first"]
    with pytest.raises(UsageError, match="no dump is made any more"):
        box.dump()
    (tmp_path / "file").touch()
    for wrong in ({"folder": tmp_path / "file"}, {"kept": 0}, {"watchdog_s": 0}, {"watchdog_times": 1}):
        with pytest.raises(UsageError):
            BlackBox(**{"folder": tmp_path, **wrong})  # type: ignore[arg-type]
    assert threading.active_count() < 50


PROGRAM = """
import ctypes, sys, threading, time
from headrace.device import open_device
from headrace.measure.blackbox import BlackBox, box as module
from headrace.measure.watch.watch import Watch

rank, folder, uri, how = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
device = open_device(uri)

def sits_in_c():
    lock = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(lock)
    # Locked by itself: no signal brings it back.
    libc.pthread_mutex_lock(lock)

def reads():
    device.read_into(8192, bytearray(4096))

def watch_main(name):
    main = threading.main_thread().ident
    while sys._current_frames()[main].f_code.co_name != name:
        time.sleep(0.01)
    while rank == 0 and device.events()["ended_ns"].all():
        time.sleep(0.01)
    time.sleep(0.1)
    print("hangs", flush=True)

with Watch(device=None, rank=rank, world=2) as watch, BlackBox(folder, watch=watch) as box:
    print("ready", flush=True)
    sys.stdin.readline()
    watch.begin_step(41)
    if how == "no room":
        module.write_dump = lambda *_, **__: threading.Event().wait()
        module.GRACE_S = 0.2
    threading.Thread(target=watch_main, args=("read_into" if rank == 0 else "sits_in_c",), daemon=True).start()
    with watch.fetch() if rank == 0 else watch.collective():
        reads() if rank == 0 else sits_in_c()
"""


def test_ranks_that_hang_dump_on_sigterm_and_end_by_it(tmp_path: Path) -> None:
    """Rank 0 in a read by a frozen path, rank 1 in C code that no signal brings back, one more whose dump hangs too."""
    namespaces = [NamespaceOptions(media=MemoryMedia(size_bytes=1 << 20))]
    nqn = "nqn.2026-01.io.example:box"
    with (
        Target(TargetOptions(subsystems=[SubsystemOptions(nqn=nqn, namespaces=namespaces)])) as target,
        Relay(target.addresses[0][1]) as relay,
        Processes() as processes,
    ):
        uri = target.uri().replace(f":{target.addresses[0][1]}/", f":{relay.port}/") + "&io_timeout=600&keepalive=3600"

        def start(rank: int, how: str, folder: Path) -> Child:
            arguments = ["-c", PROGRAM, str(rank), str(folder), uri, how]
            return processes.start(f"{how}-{rank}", arguments, log=tmp_path / f"{how}-{rank}.log", talk=True)

        ranks = [start(0, "rank", tmp_path / "box"), start(1, "rank", tmp_path / "box")]
        stuck = start(1, "no room", tmp_path / "stuck")
        for each in (*ranks, stuck):
            assert each.hear(60) == "ready"
        relay.hold_now()
        for each in (*ranks, stuck):
            each.tell("go on")
        for each in (*ranks, stuck):
            assert each.hear(60) == "hangs"
            os.kill(each.pid, signal.SIGTERM)
        for each in (*ranks, stuck):
            assert each.wait(60) == -signal.SIGTERM
        relay.release()
    first, second = (read_dump(tmp_path / "box" / dump_name(rank)) for rank in range(2))
    assert (first.why, second.why, first.world) == ("sigterm", "sigterm", 2)
    assert first.under_way is not None and (first.under_way.step, first.under_way.cause) == (41, "fetch")
    assert second.under_way is not None and second.under_way.cause == "collective"
    (hung,) = first.events[first.events["ended_ns"] == 0]
    assert (hung["kind"], hung["offset"], hung["bytes"]) == (EventKind.READ, 8192, BLOCK)
    (device,) = first.devices
    path = device.paths[hung["path"]]
    assert (path.name, path.target, path.usable) == (f"127.0.0.1:{relay.port}", nqn, True)
    assert first.dumped.monotonic_ns - hung["started_ns"] > 50_000_000
    assert any("sits_in_c" in frame for frames in second.threads.values() for frame in frames)
    assert not (tmp_path / "stuck" / dump_name(1)).exists()
