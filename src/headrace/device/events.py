"""What a device did lately: a ring of fixed size, always on, as it is read out.

Each sending of a command is an event, from the moment it was sent to that of its answer; so one that was sent three
times is three. Beside them stand moments of paths. What is still under way is read with them, without an end. Times are
nanoseconds of CLOCK_MONOTONIC, which is `time.monotonic_ns()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.errors import UsageError

#: One event. `ended_ns` 0: under way still when it was read. `bytes`: at most 2^32 - 1, also of what is longer.
#: `path`: index into `events_paths()`. `retries`: sendings of the same command before this one, at most 255.
EVENT = np.dtype(
    [
        ("started_ns", "<i8"),
        ("ended_ns", "<i8"),
        ("offset", "<u8"),
        ("bytes", "<u4"),
        ("path", "<u2"),
        ("status", "<u2"),
        ("kind", "u1"),
        ("retries", "u1"),
    ]
)
Events: TypeAlias = npt.NDArray[Any]

#: Of a command that waits to be sent: no path has it.
NO_PATH = 0xFFFF


class EventKind(IntEnum):
    """What it was. Up to `WAITING_WRITE` commands, the others moments of a path."""

    READ = 1
    WRITE = 2
    FLUSH = 3
    #: A deallocation, or zeros written.
    OTHER = 4
    #: A read that was taken back from a slow path, and sent by another; its answer, if it came, was for nobody.
    RECALLED = 5
    #: Under way only: a request that waits for a path, for its turn, or to be tried again. `started_ns`: handed over.
    WAITING_READ = 6
    #: The same of what is no read.
    WAITING_WRITE = 7
    #: The path was made ready; `started_ns`: when that attempt began.
    CONNECTED = 8
    #: An attempt to connect failed, or was refused.
    NOT_CONNECTED = 9
    #: The path was ready, and its association was lost.
    PATH_LOST = 10
    #: Answers of the path take much longer than those of others; and that this is over.
    PATH_SLOW = 11
    PATH_WELL = 12

    @property
    def command(self) -> bool:
        return self <= EventKind.WAITING_WRITE

    @property
    def waits(self) -> bool:
        return self in (EventKind.WAITING_READ, EventKind.WAITING_WRITE)


#: Of `status`: 0 success; to 0x7FF what the controller answered, status code type and code (SCT << 8 | SC); from here
#: on what this side made of it.
_OURS = {
    0x8001: "no answer: the association was lost",
    0x8002: "no answer in time",
    0x8003: "the data digest was wrong",
    0x8004: "the controller answered before all data had come",
    0x8005: "the kernel failed it",
    0x8006: "no answer: taken back from a slow path",
}


def status_text(status: int) -> str:
    """`success`, `status type 2, code 0x81`, or why there was no answer."""
    if status == 0:
        return "success"
    return _OURS.get(status, f"status type {status >> 8}, code 0x{status & 0xFF:02x}")


@dataclass(frozen=True, kw_only=True)
class EventPath:
    """A way to a device, as `path` of its events counts them."""

    #: `HOST:PORT` as given, or the path of a file or block device.
    name: str
    #: The address in use or tried last; empty before the first attempt.
    address: str
    #: NQN of the subsystem; empty where there is none.
    target: str


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """All that a device has to say."""

    #: `EVENT`: in the order in which they ended, then those under way, the oldest first.
    events: Events
    #: Since the device was opened, and how many of these are not here: older than the ring is long.
    recorded: int
    lost: int
    #: What `path` counts.
    paths: tuple[EventPath, ...]
    #: Why it is not known what is under way; empty where it is.
    trouble: str


def no_events(uri: str) -> UsageError:
    """A device that has no ring says so."""
    return UsageError(
        "this device records no events", where=uri,
        expected="a device of the native engine, with HEADRACE_EVENTS not 0",
    )  # fmt: skip
