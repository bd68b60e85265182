"""Questions that the kernel may never answer, asked in a process of their own: who asked goes on when its time is up.

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
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, kind, path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
    except OSError as error:
        # No more processes for this user or cgroup, a Python that this user may not run.
        return "not asked", None, f"no process for it: {error.strerror}"
    assert process.stdout is not None
    said = bytearray()
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                # One that the kernel holds in a call cannot be waited for.
                process.kill()
                last = _object(bytes(said).rpartition(b"\n")[0].rpartition(b"\n")[2]) or {}
                return "silent", None, str(last["at"]) if "at" in last else None
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                break
            said += piece
            if len(said) > _MOST_BYTES:
                process.kill()
                return "not asked", None, f"it said more than {_MOST_BYTES} bytes"
            deadline = time.monotonic() + timeout_s
        status = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return "silent", None, None
    except BaseException:
        process.kill()
        raise
    finally:
        process.stdout.close()
    answer = _object(bytes(said).rstrip(b"\n").rpartition(b"\n")[2])
    if answer is None:
        return "not asked", None, f"exit status {status}"
    return "answered", answer, None


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
