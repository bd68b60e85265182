"""Functions that decode in processes, which import this file and little else."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np


def plain(record: dict[str, memoryview]) -> tuple[int, bytes]:
    return int(bytes(record["n"])), bytes(record["bin"])


def mixed(record: dict[str, memoryview]) -> dict[str, Any]:
    """Arrays that are views of the record, arrays that are not, and what is none."""
    data = np.frombuffer(record["bin"], np.uint8)
    return {
        "view": data,
        "sorted": np.asfortranarray(np.sort(data)[: len(data) // 2 * 2].reshape(-1, 2)),
        "n": int(bytes(record["n"])),
        "empty": np.zeros((0, 3)),
        "pid": os.getpid(),
    }


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("no picture", lambda: None)


class Wants(Exception):
    """Cannot be made again of its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def bad(number: int, file: Path, record: dict[str, memoryview]) -> tuple[int, bytes]:
    """Does what is told in a file, while it is there, at this record."""
    found = plain(record)
    if found[0] == number and file.exists():
        what = file.read_text()
        if what == "value":
            raise ValueError("no picture")
        if what == "unpicklable":
            raise Unpicklable
        if what == "wants":
            raise Wants(1, 2)
        if what == "exit":
            raise SystemExit(3)
        if what == "stop":
            raise StopIteration
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exited":
            os._exit(7)
        if what == "hangs":
            time.sleep(3600)
        if what == "memoryview":
            return record["bin"]  # type: ignore[return-value]
    return found
