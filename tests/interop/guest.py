"""A script of cases in a guest, which may ask for things outside while it runs.

The script prints `OUTSIDE name` and waits for the file `/share/name.done`; here the function of that name is called,
and the file is made. So a test can kill a target, cut a path or change a namespace at a moment that the guest chose.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

#: In front of every script.
_PRELUDE = Path(__file__).with_name("guest.sh")
_NOTHING: Mapping[str, Callable[[], None]] = {}


def run_in_guest(
    lab: Path,
    script: Path,
    share: Path,
    *,
    env: Mapping[str, object],
    outside: Mapping[str, Callable[[], None]] = _NOTHING,
    timeout_s: float,
    machine: bool = False,
) -> str:
    """All that the script printed. AssertionError where it asks for what is not in `outside`, or that fails.

    `machine`: the guest sees all of this machine's files, to read, and its `machine_python` is this very Python."""
    if machine:
        env = {**env, "MACHINE_PYTHON": sys.executable, "MACHINE_PATH": ":".join(filter(None, sys.path))}
    words = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    words += ["--share", "/:ro"] if machine else []
    whole = share.with_name(f"{share.name}-script")
    whole.write_text(_PRELUDE.read_text() + script.read_text())
    process = subprocess.Popen(
        [lab, "run", "--script", whole, "--share", share, "--timeout", str(int(timeout_s)), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # The lab has a deadline of its own; this one is for a lab that hangs.
    watchdog = threading.Timer(timeout_s + 90, process.kill)
    watchdog.start()
    seen: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            seen.append(line)
            word, _, name = line.strip().partition(" ")
            if word == "OUTSIDE":
                assert name in outside, f"the guest asks for {name!r}\n{''.join(seen)}"
                outside[name]()
                (share / f"{name}.done").touch()
        process.wait()
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
    return "".join(seen)


def check_case(output: str, case: str) -> None:
    """Fail, with what the case printed, unless it was well."""
    if not re.search(rf"^CASE {case} ok\b", output, re.M):
        own = re.search(rf"^---- {case}$.*?(?=^---- |\Z)", output, re.M | re.S)
        pytest.fail(own[0] if own else output, pytrace=False)


def check_end(output: str) -> None:
    """The script ran to its end, and no input or output failed in the guest's kernel."""
    assert output.rstrip().endswith("FINISHED"), output
    messages = output.rpartition("---- kernel messages")[2]
    assert not re.search(r"I/O error|(EXT4-fs|XFS).*(error|corrupt)|digest error|Call Trace", messages, re.I), messages
