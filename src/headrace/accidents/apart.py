"""Questions that the kernel may never answer, and commands that may never end, in processes of their own: who asked
goes on when its time is up.

A disk that is dead, or a mount whose server is away, keeps whoever touches it, and not even SIGKILL ends that process
everywhere. So it is one that nobody needs.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

#: Of what is said in all: more than any answer has.
_MOST_BYTES = 64 << 20
_END_S = 10.0


def ask_apart(module: str, kind: str, path: str, *, timeout_s: float) -> tuple[str, dict[str, Any] | None, str | None]:
    """What a module of ours says of a path, in a process of its own: ("answered", an object of JSON, None), or
    ("silent" or "not asked", None, why).

    The answer is the last line of what it prints; each line before that, an object with "at", says that it lives and
    what it is at. "silent": no line came for `timeout_s`; why: what it was at, if that was said.
    """
    # Modules of the folder in which somebody stands are none of ours (from Python 3.11 on).
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    words = [sys.executable, "-m", module, kind, path]
    try:
        status, said = _printed(words, environment, timeout_s=timeout_s, most_bytes=_MOST_BYTES, renewed=True)
    except OSError as error:
        # No more processes for this user or cgroup, a Python that this user may not run.
        return "not asked", None, f"no process for it: {error.strerror}"
    if status is None and len(said) > _MOST_BYTES:
        return "not asked", None, f"it said more than {_MOST_BYTES} bytes"
    if status is None:
        last = _object(said.rpartition(b"\n")[0].rpartition(b"\n")[2]) or {}
        return "silent", None, str(last["at"]) if "at" in last else None
    answer = _object(said.rstrip(b"\n").rpartition(b"\n")[2])
    if answer is None:
        return "not asked", None, f"exit status {status}"
    return "answered", answer, None


def printed_by(
    words: Sequence[str], environment: Mapping[str, str], *, timeout_s: float, most_bytes: int
) -> bytes | None:
    """What a command prints; None: it is not there, or failed. `TimeoutError`: it did not end in time, or would print
    more."""
    try:
        status, said = _printed(words, environment, timeout_s=timeout_s, most_bytes=most_bytes, renewed=False)
    except OSError:
        return None
    if status is None:
        raise TimeoutError
    return said if status == 0 else None


def _printed(
    words: Sequence[str], environment: Mapping[str, str], *, timeout_s: float, most_bytes: int, renewed: bool
) -> tuple[int | None, bytes]:
    """Exit status and output. None: it did not end in `timeout_s` (`renewed`: from the last that it printed on), or
    printed more than `most_bytes`; it is killed, and not waited for: one that the kernel holds in a call ends never.
    OSError where there is no such process."""
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    assert process.stdout is not None
    said = bytearray()
    deadline = time.monotonic() + timeout_s
    try:
        while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                return process.wait(_END_S), bytes(said)
            said += piece
            if len(said) > most_bytes:
                break
            if renewed:
                deadline = time.monotonic() + timeout_s
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.stdout.close()
        if process.returncode is None:
            process.kill()
    return None, bytes(said)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
