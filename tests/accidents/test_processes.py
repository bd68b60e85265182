"""No process outlives its owner: not on a clean end, not on Ctrl-C, not when the owner is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.accidents import processes as module
from headrace.accidents.processes import ChildFailed, Processes, descendants
from tests.waiting import PATIENCE_S, until

#: A process that has a child in a session of its own, as torchrun's workers are, and says both pids.
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""

#: An owner of such a family; tells its pids and waits.
OWNER = """
import sys, time
from pathlib import Path
from headrace.accidents.processes import Processes
with Processes() as processes:
    processes.start("family", ["-c", sys.argv[1]], log=Path(sys.argv[2]))
    time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def pids_in(log: Path) -> list[int]:
    until(lambda: log.exists() and log.read_text().count(" ") == 1 and log.read_text().endswith("\n"))
    return [int(pid) for pid in log.read_text().split()]


def test_one_that_the_kernel_holds_keeps_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the others from being killed, nor who kills them from going on."""
    monkeypatch.setattr(module, "_END_S", 1.0)
    kill = os.kill
    processes = Processes()
    held, other = (
        processes.start(name, ["-c", "import time; time.sleep(60)"], log=tmp_path / name) for name in ("held", "other")
    )
    with monkeypatch.context() as kernel:
        kernel.setattr(os, "kill", lambda pid, number: None if pid == held.pid else kill(pid, number))
        processes.close()
    try:
        assert held.poll() is None
        until(lambda: other.poll() == -signal.SIGKILL)
    finally:
        held.kill()


def test_close_kills_children_and_grandchildren_in_other_sessions(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Processes() as processes:
        child = processes.start("family", ["-c", FAMILY], log=log)
        pids = pids_in(log)
        assert pids[0] == child.pid
        assert pids[1] in descendants([child.pid])
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_owner_that_ends_takes_its_children_along(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "log"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, FAMILY, str(log)], stderr=subprocess.DEVNULL)
    try:
        child, grandchild = pids_in(log)
        owner.send_signal(number)
        owner.wait(PATIENCE_S)
        until(lambda: not alive(child))
        if number == signal.SIGINT:
            assert not alive(grandchild)
        else:
            # SIGKILL leaves the owner no time; a worker that did not ask for it with `die_with_parent` lives on.
            os.kill(grandchild, signal.SIGKILL)
    finally:
        owner.kill()
        owner.wait()


def test_a_worker_dies_with_its_parent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    worker = "import time\nfrom headrace.accidents.processes import die_with_parent\n"
    worker += "die_with_parent()\nprint('ready', flush=True)\n"
    launcher = (
        "import subprocess, sys, time\n"
        f"worker = [sys.executable, '-c', {worker + 'time.sleep(600)'!r}]\n"
        "w = subprocess.Popen(worker, stdout=subprocess.PIPE, start_new_session=True)\n"
        "assert w.stdout.readline() == b'ready\\n'\n"
        "print(w.pid, flush=True)\ntime.sleep(600)\n"
    )
    with Processes() as processes:
        child = processes.start("launcher", ["-c", launcher], log=log)
        until(lambda: log.exists() and log.read_text().endswith("\n"), "the worker is ready")
        pid = int(log.read_text())
        assert alive(pid)
        os.kill(child.pid, signal.SIGKILL)
        until(lambda: not alive(pid))


def test_a_failure_says_which_process_and_shows_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Processes() as processes:
        child = processes.start("the worker", ["-c", "print('first'); raise SystemExit('disk on fire')"], log=log)
        with pytest.raises(ChildFailed, match=r"(?s)the worker failed: found exit status 1.*disk on fire"):
            child.check(PATIENCE_S)
        child = processes.start("the tool", ["-c", "raise SystemExit('headrace: error: no such thing')"], log=log)
        with pytest.raises(ChildFailed) as caught:
            child.check(PATIENCE_S)
        assert str(caught.value) == "the tool failed: no such thing"
        child = processes.start("the sleeper", ["-c", "import time; time.sleep(600)"], log=log)
        with pytest.raises(ChildFailed, match="did not end"):
            child.wait(0.1)
        assert child.stop() == -signal.SIGTERM


def test_stop_kills_what_does_not_listen(tmp_path: Path) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    log = tmp_path / "log"
    with Processes() as processes:
        child = processes.start("deaf", ["-c", deaf], log=log)
        until(lambda: log.exists() and "deaf" in log.read_text())
        assert child.stop(timeout_s=0.2) == -signal.SIGKILL


def test_what_failed_first_is_shown_before_a_launchers_closing_words(tmp_path: Path) -> None:
    program = "print('[rank0]: headrace.errors.CheckpointFailed: the save was given up'); print('x\\n' * 40); exit(1)"
    with Processes() as processes:
        child = processes.start("train", ["-c", program], log=tmp_path / "train.log")
        with pytest.raises(ChildFailed, match="the save was given up"):
            child.check(PATIENCE_S)
