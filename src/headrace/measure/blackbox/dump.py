"""The file of a rank's black box.

`rank-00003.blackbox` is an npz (a zip of arrays) without anything pickled:

    header.npy   u1   JSON: who, why, clocks, devices with their paths
    events.npy   EVENT with `device` before it, u2: index into the header's devices; by device, the oldest first
    steps.npy    u1   JSON, a line a step: the last ones of the watch, and the one that was under way

It is written under another name and renamed, so whoever finds one has a whole one. Nothing is flushed to the medium:
when storage hangs is when dumps are written.
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
import tokenize
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from headrace.device.events import EVENT, Events
from headrace.errors import HeadraceError, UsageError
from headrace.measure.watch.record import printable

FORMAT, VERSION = "headrace-blackbox", 1
#: `EVENT`, and whose it is.
DUMPED = np.dtype([("device", "<u2"), *[(name, EVENT[name].str) for name in EVENT.names or ()]])

#: No dump is longer, and none is read that is.
MOST_BYTES = 256 << 20
_MOST_TEXT_BYTES = 16 << 20
#: Of JSON: 16 MiB of empty lists would be half a gigabyte of them.
_MOST_VALUES = 1 << 20
MOST_STEPS, MOST_DEVICES, MOST_PATHS = 4096, 4096, 64
_MEMBERS = ("header", "events", "steps")
#: The end of a zip's directory: signature, disks, entries (twice), length and place of the directory, length of a
#: comment; before it the locator of a zip64 one.
_END, _LOCATOR_BYTES = struct.Struct("<4sHHHHIIH"), 20
_MOST_DIRECTORY_BYTES = 4096


class DumpUnreadable(HeadraceError):
    """A file that is no dump of a black box, or not all of one."""

    fault = "caller"


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """Both clocks at one moment, nanoseconds: CLOCK_MONOTONIC, in which all times of a dump are, and CLOCK_REALTIME."""

    monotonic_ns: int
    realtime_ns: int


@dataclass(frozen=True, kw_only=True)
class DumpedPath:
    """`EventPath`, and how it was when the dump was made."""

    name: str
    address: str
    target: str
    #: As in `PathInfo`; empty where the device has no paths to tell of.
    state: str = ""
    usable: bool = True
    why: str = ""
    slow: bool = False


@dataclass(frozen=True, kw_only=True)
class DumpedDevice:
    uri: str
    paths: tuple[DumpedPath, ...] = ()
    #: Events recorded since the device was opened, and of them those that are not here: older than the ring is long, or
    #: than what a dump may hold.
    recorded: int = 0
    lost: int = 0
    #: Why there are no events of it; empty where there are.
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class DumpedStep:
    """A step of the watch, by CLOCK_MONOTONIC."""

    step: int
    started_ns: int
    #: None: it was under way.
    ended_ns: int | None
    #: Seconds by cause (`watch.causes`); of the one under way, so far.
    spent: Mapping[str, float]
    #: Of the one under way: what it was at, and since when. None: in no part.
    cause: str | None = None
    cause_since_ns: int | None = None


@dataclass(frozen=True, kw_only=True)
class Dump:
    rank: int
    world: int
    host: str
    pid: int
    #: "sigterm", "watchdog", "collective", "exception", "request"; and in words what it saw.
    why: str
    detail: str
    #: When the box was made, and when this dump was. Alignment by the second; the first tells how far apart they went.
    started: Clocks
    dumped: Clocks
    devices: tuple[DumpedDevice, ...]
    #: `DUMPED`.
    events: Events
    #: The last finished steps, the oldest first.
    steps: tuple[DumpedStep, ...] = ()
    under_way: DumpedStep | None = None
    #: Python frames of each thread, `name (identifier)` -> `file:line function`, the innermost last.
    threads: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def events_of(self, device: int) -> Events:
        return cast(Events, self.events[self.events["device"] == device])

    def realtime_ns(self, monotonic_ns: int) -> int:
        """By the node's clock as it was set when the dump was made."""
        return monotonic_ns + self.dumped.realtime_ns - self.dumped.monotonic_ns


def dump_name(rank: int) -> str:
    return f"rank-{rank:05d}.blackbox"


# ---- writing -------------------------------------------------------------------------------------------------------


def write_dump(
    path: str | os.PathLike[str], dump: Dump, *, when_written: Callable[[], None] = lambda: None
) -> int:  # fmt: skip
    """Its bytes. `OSError` as the file system gives it; then what was there before is there still.
    `when_written`: called before the whole file takes its place."""
    header = {
        "format": FORMAT, "version": VERSION, "rank": dump.rank, "world": dump.world, "host": dump.host,
        "pid": dump.pid, "why": dump.why, "detail": dump.detail,
        "started": asdict(dump.started), "dumped": asdict(dump.dumped),
        "devices": [asdict(device) for device in dump.devices],
        "threads": {name: list(frames) for name, frames in dump.threads.items()},
    }  # fmt: skip
    steps = [*dump.steps, *([dump.under_way] if dump.under_way is not None else [])]
    lines = "".join(f"{json.dumps(asdict(step))}\n" for step in steps)
    file = io.BytesIO()
    np.savez(
        file,
        header=np.frombuffer(json.dumps(header).encode(), np.uint8),
        events=np.ascontiguousarray(dump.events, DUMPED),
        steps=np.frombuffer(lines.encode(), np.uint8),
    )
    path = Path(path)
    # Of a process that was killed in the middle of it, the next one takes it away.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(file.getbuffer())
        when_written()
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    return file.getbuffer().nbytes


# ---- reading -------------------------------------------------------------------------------------------------------


def read_dump(path: str | os.PathLike[str]) -> Dump:
    """`DumpUnreadable`: it is none, is not all of one, or is of a later version. `UsageError`: it cannot be opened."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_BYTES:
                raise _unreadable(path, f"at most {MOST_BYTES} bytes", f"{size}")
            _check_directory(path, file, size)
            return _read(path, file)
    except OSError as error:
        raise UsageError("cannot read a dump", where=str(path), found=error.strerror or str(error)) from None


def _check_directory(path: Path, file: BinaryIO, size: int) -> None:
    """`zipfile` takes all of a directory into memory, however long. That of a dump has three entries, and ends, without
    a comment, where the file does (APPNOTE.TXT 4.3.16)."""
    file.seek(max(0, size - _END.size - _LOCATOR_BYTES))
    tail = file.read(_END.size + _LOCATOR_BYTES)
    if len(tail) < _END.size:
        raise _unreadable(path, "a whole file of a black box", f"{size} bytes")
    signature, *_, entries, length, offset, comment = _END.unpack(tail[-_END.size :])
    if signature != b"PK\5\6" or comment:
        raise _unreadable(path, "a whole file of a black box", "no end of a zip directory")
    # A second end, of zip64, would count instead.
    small = entries == len(_MEMBERS) and length <= _MOST_DIRECTORY_BYTES and not tail.startswith(b"PK\6\7")
    if not small or offset + length + _END.size != size:
        raise _unreadable(path, "header, events and steps", f"a directory of {entries} entries in {length} bytes")


def _read(path: Path, file: BinaryIO) -> Dump:
    try:
        with zipfile.ZipFile(file) as archive:
            names = sorted(entry.filename for entry in archive.infolist())
            if names != sorted(f"{name}.npy" for name in _MEMBERS):
                raise _unreadable(path, "header, events and steps", ", ".join(names[:8]) or "nothing")
            header, events, steps = (_array(path, archive, name) for name in _MEMBERS)
        return _dump(path, header.tobytes(), events, steps.tobytes())
    except DumpUnreadable:
        raise
    except (zipfile.BadZipFile, NotImplementedError, EOFError, tokenize.TokenError) as error:
        raise _unreadable(path, "a whole file of a black box", str(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, RuntimeError) as error:
        raise _unreadable(path, "a dump of a black box", f"{type(error).__name__}: {error}") from None


def _array(path: Path, archive: zipfile.ZipFile, name: str) -> Events:
    entry = archive.getinfo(f"{name}.npy")
    most, dtype = (MOST_BYTES, DUMPED) if name == "events" else (_MOST_TEXT_BYTES, np.dtype(np.uint8))
    if entry.file_size > most or entry.compress_type != zipfile.ZIP_STORED:
        raise _unreadable(path, f"{name} of at most {most} bytes, not compressed", f"{entry.file_size} bytes")
    data = archive.read(entry)
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise _unreadable(path, f"{name} as an array of version 1.0", "another")
    shape, _, found = np.lib.format.read_array_header_1_0(file)
    rest = memoryview(data)[file.tell() :]
    if found != dtype or len(shape) != 1 or math.prod(shape) * dtype.itemsize != len(rest):
        raise _unreadable(path, f"{name} as one column of {dtype}", f"{found} of shape {shape} in {len(rest)} bytes")
    return np.frombuffer(rest, dtype)


def _dump(path: Path, header: bytes, events: Events, steps: bytes) -> Dump:
    for name, text in (("header", header), ("steps", steps)):
        if (values := sum(map(text.count, (b"[", b"{", b",", b"\n", b"\r")))) > _MOST_VALUES:
            raise _unreadable(path, f"{name} of at most {_MOST_VALUES} values", f"{values}")
    said = json.loads(header)
    if said["format"] != FORMAT:
        raise _unreadable(path, FORMAT, repr(said["format"])[:64])
    if said["version"] != VERSION:
        raise _unreadable(path, f"version {VERSION}", repr(said["version"])[:64])
    devices = tuple(_device(each) for each in _bounded(said["devices"], MOST_DEVICES))
    if len(events) and int(events["device"].max()) >= len(devices):
        raise _unreadable(path, f"events of {len(devices)} devices", f"device {int(events['device'].max())}")
    lines = [_step(json.loads(line)) for line in _bounded(steps.splitlines(), MOST_STEPS + 1)]
    open_ones = [step for step in lines if step.ended_ns is None]
    if len(open_ones) > 1:
        raise _unreadable(path, "one step under way", f"{len(open_ones)}")
    return Dump(
        rank=_whole(said["rank"]), world=_whole(said["world"]), host=_text(said["host"]), pid=_whole(said["pid"]),
        why=_text(said["why"]), detail=_text(said["detail"]), started=_clocks(said["started"]),
        dumped=_clocks(said["dumped"]), devices=devices, events=events,
        steps=tuple(step for step in lines if step.ended_ns is not None),
        under_way=open_ones[0] if open_ones else None,
        threads={_text(name): [_text(frame) for frame in frames] for name, frames in said["threads"].items()},
    )  # fmt: skip


def _device(said: Any) -> DumpedDevice:
    paths = tuple(
        DumpedPath(
            name=_text(each["name"]), address=_text(each["address"]), target=_text(each["target"]),
            state=_text(each["state"]), usable=bool(each["usable"]), why=_text(each["why"]), slow=bool(each["slow"]),
        )
        for each in _bounded(said["paths"], MOST_PATHS)
    )  # fmt: skip
    return DumpedDevice(
        uri=_text(said["uri"]), paths=paths, recorded=_whole(said["recorded"]), lost=_whole(said["lost"]),
        why_not=_text(said["why_not"]),
    )  # fmt: skip


def _step(said: Any) -> DumpedStep:
    spent = {_text(cause): float(seconds) for cause, seconds in said["spent"].items()}
    if not all(math.isfinite(seconds) for seconds in spent.values()):
        raise ValueError("seconds of a step are no number")
    return DumpedStep(
        step=_whole(said["step"]), started_ns=_whole(said["started_ns"]), ended_ns=_optional(said["ended_ns"], _whole),
        spent=spent, cause=_optional(said["cause"], _text), cause_since_ns=_optional(said["cause_since_ns"], _whole),
    )  # fmt: skip


def _clocks(said: Any) -> Clocks:
    return Clocks(monotonic_ns=_whole(said["monotonic_ns"]), realtime_ns=_whole(said["realtime_ns"]))


def _bounded(found: Any, most: int) -> Iterator[Any]:
    if not isinstance(found, list) or len(found) > most:
        raise ValueError(f"expected a list of at most {most}")
    return iter(found)


def _optional(found: Any, of: Any) -> Any:
    return None if found is None else of(found)


def _whole(found: Any) -> int:
    if type(found) is not int or not 0 <= found < 1 << 63:
        raise ValueError(f"expected a whole number from 0 on, found {found!r:.64}")
    return found


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise ValueError(f"expected text, found {found!r:.64}")
    return printable(found)


def _unreadable(path: Path, expected: str, found: str) -> DumpUnreadable:
    return DumpUnreadable("this is no dump that can be read", where=str(path), expected=expected, found=found)
