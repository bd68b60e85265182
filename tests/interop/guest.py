"""A script of cases in a guest, which may ask for things outside while it runs.

The script prints `OUTSIDE name` and waits for the file `/share/name.done`; here the function of that name is called,
and the file is made. So a test can kill a target, cut a path or change a namespace at a moment that the guest chose.

Starting a guest costs more than most scripts: modules with a `part` share one (`guest_outputs` in `conftest.py`).
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

#: In front of every script.
_PRELUDE = Path(__file__).with_name("guest.sh")
_PARTS = Path(__file__).with_name("parts.sh")


@dataclass(frozen=True)
class Part:
    """A script, what it finds in its environment, and what it may ask for."""

    script: Path
    env: Mapping[str, object]
    outside: Mapping[str, Callable[[], None]] = field(default_factory=dict)


def run_parts(lab: Path, parts: Mapping[str, Part], share: Path, timeout_s: float) -> dict[str, str]:
    """What each of them printed, by name: they run in one guest, one after another, each as if it were alone."""
    outside: dict[str, Callable[[], None]] = {}
    for name, part in parts.items():
        (share / name).mkdir()
        (share / name / "env").write_text("".join(f"{key}={shlex.quote(str(v))}\n" for key, v in part.env.items()))
        (share / name / "script").write_text(_PRELUDE.read_text() + part.script.read_text())
        outside |= {f"{name}/{what}": done for what, done in part.outside.items()}
    output = _run(lab, _PARTS, share, env={"PARTS": " ".join(parts)}, outside=outside, timeout_s=timeout_s)
    # What comes after the last of them says how the guest ended.
    found = re.split(r"^==== (.*)\n", output, flags=re.M)
    printed = dict(zip(found[1::2], found[2::2], strict=True))
    return {name: printed.get(name, f"it did not begin\n{output}") for name in parts}


def run_in_guest(
    lab: Path, part: Part, share: Path, *, timeout_s: float, machine: bool = False, options: Sequence[str] = ()
) -> str:
    """All that the script printed.

    `options`: more words for `linux-lab run`. `machine`: the guest sees all of this machine's files, to read, and its
    `machine_python` is this very Python."""
    env = dict(part.env)
    if machine:
        env |= {"MACHINE_PYTHON": sys.executable, "MACHINE_PATH": ":".join(filter(None, sys.path))}
    options = [*options, *(["--share", "/:ro"] if machine else [])]
    return _run(lab, part.script, share, env=env, outside=part.outside, timeout_s=timeout_s, options=options)


def _run(
    lab: Path,
    script: Path,
    share: Path,
    *,
    env: Mapping[str, object],
    outside: Mapping[str, Callable[[], None]],
    timeout_s: float,
    options: Sequence[str] = (),
) -> str:
    words = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    whole = share.with_name(f"{share.name}-script")
    whole.write_text(_PRELUDE.read_text() + script.read_text())
    process = subprocess.Popen(
        [lab, "run", "--script", whole, "--share", share, "--timeout", str(int(timeout_s)), *words, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # The lab has a deadline of its own; this one is for a lab that hangs.
    watchdog = threading.Timer(timeout_s + 90, process.kill)
    watchdog.start()
    seen: list[str] = []
    part = ""
    try:
        assert process.stdout is not None
        for line in process.stdout:
            seen.append(line)
            word, _, name = line.strip().partition(" ")
            if word == "====":
                part = f"{name}/"
            elif word == "OUTSIDE":
                try:
                    outside[part + name]()
                    (share / f"{part}{name}.done").touch()
                except (Exception, pytest.fail.Exception):
                    # The case that asked fails with it, and says so; the others go on.
                    seen.append(traceback.format_exc())
                    (share / f"{part}{name}.failed").touch()
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
