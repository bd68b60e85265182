"""The lines of a rank's file: a header each time the rank starts, and one line a step.

    {"headrace_watch": 1, "rank": 0, "world": 2, "node": "a", "pid": 1, "started_s": 1735689600.0, "clock": "host", ...}
    {"step": 7, "started_s": 1735689603.1, "wall_s": 0.41, "compute_s": 0.36, "fetch_s": 0.05}

Times in seconds; what is zero is left out. The causes of a step add up to its `wall_s`.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.measure.watch.causes import CAUSES

VERSION = 1
#: Longest line that is taken.
LINE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class WatchHeader:
    """Who writes the steps that follow."""

    rank: int
    world: int
    node: str
    pid: int
    #: By the system's clock.
    started_s: float
    #: "host": compute and copies are timed where they are asked for; "cuda": where they are carried out.
    clock: str
    #: Why the activity of the multiprocessors is not measured; empty where it is.
    sm_activity: str = ""

    def to_line(self) -> str:
        return json.dumps({"headrace_watch": VERSION, **asdict(self)}, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """The step in which a rank is. Moments by the watch's clock (`time.monotonic`), seconds."""

    step: int
    begun: float
    #: Where it is now: one of `CAUSES`; "wait" while it waits for a batch, which is taken apart when it is there.
    cause: str
    #: Since when it is there.
    since: float
    #: When it was asked.
    now: float
    #: Seconds by cause so far, the one it is in included; they add up to `now - begun` and what came before the step.
    spent: dict[str, float]


@dataclass(kw_only=True, slots=True)
class WatchStep:
    """One step of one rank. Nobody changes it: it is not frozen because making one that is takes five times as long."""

    step: int
    #: By the system's clock.
    started_s: float
    wall_s: float
    #: By cause (`CAUSES`); what is missing is 0. They add up to `wall_s`.
    spent: dict[str, float]
    #: Bytes of the batches of this step, where the loader says.
    bytes: int = 0
    #: Counters since the step at which they were taken before (`headrace.measure.watch.host`), where they were taken.
    window: dict[str, Any] | None = None
    #: Of the first step of a start: nobody said which one of the job it is, it was counted from 0.
    counted: bool = False
    #: By the watch's clock, seconds (`time.monotonic`), of the host; they do not go into files.
    begun: float = 0.0
    ended: float = 0.0

    def __getitem__(self, cause: str) -> float:
        return self.spent.get(cause, 0.0)

    @property
    def data_wait_s(self) -> float:
        """All that the step waited for its batches, but for a CPU."""
        return self["fetch"] + self["blocked"] + self["preparation"]

    def to_line(self) -> str:
        # Once a step: by hand, for a general encoder takes five times as long.
        spent = ""
        for cause, seconds in self.spent.items():
            if seconds > 5e-8:
                spent += f',"{cause}_s":{seconds:.7f}'
        line = f'{{"step":{self.step},"started_s":{self.started_s:.6f},"wall_s":{self.wall_s:.7f}{spent}'
        if self.bytes:
            line += f',"bytes":{self.bytes}'
        if self.counted:
            line += ',"counted":true'
        if self.window is not None:
            line += f',"window":{json.dumps(self.window, separators=(",", ":"))}'
        return line + "}"


def printable(text: str) -> str:
    """What a file says goes to terminals and pages: nothing in it steers them."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else " " if one.isspace() else "\ufffd" for one in text)


def parse_line(line: str, where: str) -> WatchHeader | WatchStep:
    """`UsageError` for anything that is neither."""
    try:
        found, end = _DECODE(line)
        _check(not line[end:].strip())
        if "headrace_watch" in found:
            if found.pop("headrace_watch") != VERSION:
                raise UsageError("another version of these lines", where=where, expected=f"version {VERSION}")
            header = WatchHeader(**found)
            _check(all(type(number) is int and number >= 0 for number in (header.rank, header.world)))
            _check(all(isinstance(text, str) for text in (header.node, header.clock, header.sm_activity)))
            _check(_is_number(header.started_s))
            return replace(
                header, node=printable(header.node), clock=printable(header.clock),
                sm_activity=printable(header.sm_activity),
            )  # fmt: skip
        spent = {_CAUSE_OF[key]: seconds for key, seconds in found.items() if key in _CAUSE_OF}
        step = WatchStep(
            step=found["step"], started_s=found["started_s"], wall_s=found["wall_s"], spent=spent,
            bytes=found.get("bytes", 0), window=found.get("window"), counted=found.get("counted") is True,
        )  # fmt: skip
        _check(type(step.step) is int and _is_number(step.started_s))
        # No number fails all comparisons. Most of the time of reading a long job is this.
        for amount in (step.wall_s, step.bytes, *spent.values()):
            if not 0 <= amount <= _MOST or type(amount) is bool:
                raise ValueError
        _check(step.window is None or _is_window(step.window))
        for path in step.window.get("paths", ()) if step.window else ():
            path |= {key: printable(value) for key, value in path.items() if isinstance(value, str)}
    except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(
            "not a line of a watch", where=where, expected="what headrace.measure.Watch writes", found=line[:80]
        ) from error
    return step


_DECODE = json.JSONDecoder().raw_decode
_CAUSE_OF = {f"{cause}_s": cause for cause in CAUSES}
#: Nothing that is measured is more, in seconds or bytes; sums stay finite.
_MOST = 1e18


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and abs(value) <= _MOST


def _is_window(window: Any) -> bool:
    return (
        isinstance(window, dict)
        and all(key == "paths" or _is_number(value) for key, value in window.items())
        and ("sm_activity" not in window or "window_s" in window)
        and all(
            all(isinstance(path[key], str) for key in ("device", "path"))
            and all(_is_number(path[key]) for key in ("p99_s", "commands", "read_bytes"))
            for path in window.get("paths", [])
        )
    )


def _check(sound: bool) -> None:
    if not sound:
        raise ValueError


def files_of(paths: list[Path]) -> list[Path]:
    """Files as they are, of folders those that a `Watch` writes there. `UsageError` where there is none."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob("rank-*.jsonl"))
            if not inside:
                raise UsageError("no rank has written here", where=str(path), expected="files rank-*.jsonl of a Watch")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise UsageError("there is no such file", where=str(path))
    return list(dict.fromkeys(found))
