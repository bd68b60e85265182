"""The paths of a device, and what losing one leaves open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

#: What a command is for: each class has I/O queues of its own, so that none waits behind another's commands.
TrafficClass = Literal["feed", "checkpoint", "metadata"]


@dataclass(frozen=True, kw_only=True)
class PathLatency:
    """How long commands took on a path since the device was opened, from sending to the answer."""

    #: Commands that were answered.
    count: int
    #: Seconds, to 6 %; 0 where none was answered.
    p50_s: float
    p99_s: float
    max_s: float
    #: Of all: no more than so many nanoseconds, and how many of those took longer than the entry before.
    buckets: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class PathInfo:
    """One path of an `nvme+tcp:` device, as it was a moment ago."""

    #: `HOST:PORT`, as given.
    portal: str
    #: The address in use or tried last; empty before the first attempt.
    address: str
    #: "connecting", "ready", "waiting" (between two attempts), "held back" (it flaps), "refused" (not tried again until
    #: `reconnect`) or "closed".
    state: str
    #: Seconds since the state is this one.
    since_s: float
    #: Commands may go this way now.
    usable: bool
    #: Why not; empty where they may.
    why: str
    #: ANA state of the namespace on this controller; `None` where it reports none.
    ana: str | None
    #: Identifier of the controller.
    cntlid: int
    #: Associations lost, and those whose writes could not be flushed any more. The device's `loss_count` is the sum.
    losses: int
    #: Attempts to connect, and how many of them brought the path back.
    attempts: int
    reconnects: int
    reads: int
    read_bytes: int
    writes: int
    written_bytes: int
    #: Commands that failed here; most of them succeeded on another path, or later.
    errors: int
    #: Commands sent and not answered yet.
    under_way: int
    #: Its answers take much longer than those of another path, or one has been missing for long: commands go elsewhere
    #: while they can, and now and then one tries whether that is over. And how often that began.
    slow: bool
    slow_times: int
    latency: PathLatency

    @classmethod
    def from_native(cls, said: dict[str, Any]) -> PathInfo:
        latency = dict(said["latency"])
        latency["buckets"] = tuple((int(top), int(count)) for top, count in latency.get("buckets", ()))
        return cls(**{**said, "latency": PathLatency(**latency)})


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """A command that was sent and not answered yet, or that waits to be sent."""

    #: `HOST:PORT` that it was sent by; empty: it waits for a path, or its turn.
    path: str
    reads: bool
    #: Bytes of the namespace.
    offset: int
    length: int
    #: Seconds since it was sent; 0 where it waits.
    age_s: float
    #: How often it was sent.
    sent: int


@dataclass(frozen=True, kw_only=True)
class UnsettledRange:
    """Bytes that a write which was given up may still reach.

    Its association was lost while it was under way. It was sent again with the same bytes, and that succeeded or was
    reported; but the first copy may be anywhere, and land later. *Other* bytes that are written here before it is known
    to be gone may be overwritten by it.
    """

    offset: int
    length: int
    #: `HOST:PORT` of the lost association; "several" where ranges were merged.
    path: str
    #: Number of the loss; what was lost before has smaller ones.
    generation: int
    #: Seconds since the association was given up.
    age_s: float
