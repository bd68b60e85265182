"""Memory is at its limit: a thread that cannot be had, or dies before it lives, holds up no commit and no close."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.volume import Volume
from headrace.volume.repair.scrub import scrub
from headrace.volume.space import deallocate, worker
from headrace.volume.space.worker import Worker
from tests.volume.support import new_volume, state_of, writing

#: Replaces two objects many times, with so much address space above what it has by then; says what became of each.
JOB = """
import resource, sys
from headrace.errors import HeadraceError
from headrace.volume import Volume
from headrace.volume.space import worker
worker.BIRTH_S = 0.5
extra, uris = int(sys.argv[1]), sys.argv[2:]
volume = Volume.open(uris, write=True)
session = volume.session("run")
data = {"a": b"a" * 10, "b": b"b" * 300_000}
def put(name):
    with session.transaction() as tx:
        if name in volume:
            tx.delete(name)
        tx.put(name, data[name])
put("a"), put("b")
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + extra, resource.RLIM_INFINITY))
said = []
for step in range(30):
    try:
        put("ab"[step % 2])
    except (MemoryError, HeadraceError) as error:
        said.append(type(error).__name__)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(*said, flush=True)
session.close()
volume.close()
print("closed", flush=True)
"""


#: None; and about what the stack of one thread takes, but nothing for the thread itself.
@pytest.mark.parametrize("extra", [0, 8_400_000])
def test_a_job_goes_on_and_ends(tmp_path: Path, extra: int) -> None:
    uris = [f"file:{tmp_path / name}.img" for name in "ab"]
    Volume.create([f"{uri}?create=16MiB" for uri in uris]).close()
    job = subprocess.run(
        [sys.executable, "-c", JOB, str(extra), *uris], capture_output=True, text=True, timeout=240, check=False
    )
    said = job.stdout.splitlines()
    assert job.returncode == 0 and said[-1] == "closed", job.stderr
    assert set(said[0].split()) <= {"MemoryError"}, said
    with Volume.open(uris, write=True) as volume:
        assert state_of(volume) == {"a": b"a" * 10, "b": b"b" * 300_000}
        with volume.session("run") as session:
            assert session.quarantined_bytes == 0
        assert scrub(volume.devices).clean


@pytest.mark.usefixtures("nobody_else", "quick")
@pytest.mark.parametrize("refused", [True, False])
def test_a_deallocation_waits_for_a_thread_that_lives(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deallocate, "AFTER_S", 0.0)
    start = _thread.start_new_thread
    unborn: list[Callable[[], None]] = []

    def none(target: Callable[[], None], arguments: tuple[Any, ...]) -> int:
        if refused:
            raise RuntimeError("can't start new thread")
        unborn.append(target)
        return 0

    volume = new_volume()
    with writing(volume) as session:
        monkeypatch.setattr(worker, "BIRTH_S", 0.0)
        monkeypatch.setattr(_thread, "start_new_thread", none)
        for name in ("x", "y"):
            with session.transaction() as tx:
                tx.put(name, b"1" * 100_000)
            with session.transaction() as tx:
                tx.delete(name)
        assert session.deallocation.deallocated_bytes == 0 and session.deallocation.failed is None
        monkeypatch.setattr(_thread, "start_new_thread", start)
        with session.transaction() as tx:
            tx.put("z", b"1")
        with session.transaction() as tx:
            tx.delete("z")
        done = threading.Event()
        while session.deallocation.deallocated_bytes < 200_000:
            done.wait(0.01)
        # Those that come to life after all are not needed any more.
        for late in unborn:
            late()
        assert len(unborn) == (0 if refused else 2)
    assert state_of(volume) == {}


def test_nobody_waits_for_a_thread_that_was_never_born(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BIRTH_S", 0.05)
    ran: list[int] = []
    one = Worker(lambda: ran.append(threading.get_ident()), name="one")
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", lambda target, arguments: 0)
        one.start()
    one.join()
    one._run()
    assert one.stillborn() and not ran
    other = Worker(lambda: ran.append(threading.get_ident()), name="other")
    other.start()
    other.join()
    assert len(ran) == 1 and not other.stillborn() and not other.current
    with monkeypatch.context() as patch, pytest.raises(HeadraceError, match="no thread could be started") as failed:

        def refused(*_: object) -> int:
            raise RuntimeError("can't start new thread")

        patch.setattr(_thread, "start_new_thread", refused)
        Worker(ran.clear, name="third").start()
    assert failed.value.fault == "host"
