"""What goes into a dump, taken from devices, a watch and the interpreter, by any thread and without waiting for I/O."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace.device import BlockDevice, NativeDevice
from headrace.device.waiting import paths_of
from headrace.errors import HeadraceError
from headrace.measure.blackbox.dump import (
    DUMPED,
    MOST_DEVICES,
    MOST_STEPS,
    Clocks,
    Dump,
    DumpedDevice,
    DumpedPath,
    DumpedStep,
)

if TYPE_CHECKING:
    from headrace.device.events import Events
    from headrace.measure.watch.record import UnderWay, WatchStep

#: Of a dump, of all devices together.
MOST_EVENT_BYTES = 64 << 20
_MOST_THREADS, _MOST_FRAMES = 64, 40


class Watched(Protocol):
    """What a box asks of a `Watch`."""

    rank: int
    world: int

    def under_way(self) -> UnderWay | None: ...
    def recent(self, count: int) -> list[WatchStep]: ...


def clocks() -> Clocks:
    return Clocks(monotonic_ns=time.monotonic_ns(), realtime_ns=time.time_ns())


def take(
    *,
    rank: int,
    world: int,
    why: str,
    detail: str,
    started: Clocks,
    watch: Watched | None,
    devices: Iterable[BlockDevice],
) -> Dump:
    """Of this moment. Devices that cannot tell say why, in the dump."""
    open_step, steps = None, []
    try:
        # Where training is comes first: it may go on meanwhile.
        open_step = watch.under_way() if watch is not None else None
        steps = watch.recent(MOST_STEPS) if watch is not None else []
    except Exception as error:
        # Half a dump is better than none.
        detail += f" (without steps: {error!r})"
    now = clocks()
    told = [_device(device) for device in list(devices)[:MOST_DEVICES]]
    shown, events = _bounded(told)
    return Dump(
        rank=rank, world=world, host=socket.gethostname(), pid=os.getpid(), why=why, detail=detail, started=started,
        dumped=now, devices=tuple(shown), events=events, steps=tuple(_step(step) for step in steps),
        under_way=_under_way(open_step) if open_step is not None else None, threads=_threads(),
    )  # fmt: skip


def _device(device: BlockDevice) -> tuple[DumpedDevice, Events | None]:
    try:
        if not isinstance(device, NativeDevice):
            return DumpedDevice(uri=device.uri), device.events()
        record = device.event_record()
        states = {path.portal: path for path in paths_of(device)}
        paths = tuple(
            DumpedPath(name=path.name, address=path.address, target=path.target)
            if (state := states.get(path.name)) is None
            else DumpedPath(
                name=path.name, address=path.address, target=path.target, state=state.state, usable=state.usable,
                why=state.why, slow=state.slow,
            )
            for path in record.paths
        )  # fmt: skip
        told = DumpedDevice(
            uri=device.uri, paths=paths, recorded=record.recorded, lost=record.lost, why_not=record.trouble
        )
        return told, record.events
    except Exception as error:
        why_not = str(error) if isinstance(error, HeadraceError) else repr(error)
        return DumpedDevice(uri=device.uri, why_not=why_not), None


def _bounded(told: Sequence[tuple[DumpedDevice, Events | None]]) -> tuple[list[DumpedDevice], Events]:
    """Of each device the last ones, where all are too many."""
    most = MOST_EVENT_BYTES // DUMPED.itemsize // max(1, len(told))
    shown, parts = [], [np.zeros(0, DUMPED)]
    for index, (device, events) in enumerate(told):
        if events is None:
            shown.append(device)
            continue
        kept = events[max(0, len(events) - most) :]
        part = np.zeros(len(kept), DUMPED)
        for name in kept.dtype.names or ():
            part[name] = kept[name]
        part["device"] = index
        parts.append(part)
        gone = len(events) - len(kept)
        shown.append(
            DumpedDevice(
                uri=device.uri, paths=device.paths, recorded=device.recorded, lost=device.lost + gone,
                why_not=device.why_not,
            )
        )  # fmt: skip
    return shown, np.concatenate(parts)


def _step(step: WatchStep) -> DumpedStep:
    return DumpedStep(step=step.step, started_ns=_ns(step.begun), ended_ns=_ns(step.ended), spent=dict(step.spent))


def _under_way(step: UnderWay) -> DumpedStep:
    return DumpedStep(
        step=step.step, started_ns=_ns(step.begun), ended_ns=None, spent=dict(step.spent), cause=step.cause,
        cause_since_ns=_ns(step.since),
    )  # fmt: skip


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _threads() -> Mapping[str, Sequence[str]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: dict[str, list[str]] = {}
    for identifier, innermost in list(sys._current_frames().items())[:_MOST_THREADS]:
        frames: list[str] = []
        frame: FrameType | None = innermost
        while frame is not None and len(frames) < _MOST_FRAMES:
            frames.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        found[f"{names.get(identifier, '?')} ({identifier})"] = frames[::-1]
    return found
