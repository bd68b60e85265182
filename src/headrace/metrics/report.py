"""What one rank says, and what the ranks of a node say together."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from headrace.device import BlockDevice, paths_of
from headrace.errors import HeadraceError

#: Of latencies.
QUANTILES = {"p50_s": 0.5, "p99_s": 0.99, "max_s": 1.0}


class Source(Protocol):
    """A loader; or a `Staging`, which has `section`: "stagings", or a `headrace.measure.Watch`: "watches"."""

    @property
    def name(self) -> str:
        """Of what it reads."""

    @property
    def devices(self) -> Sequence[BlockDevice]: ...

    def metrics(self) -> Any:
        """A dataclass of numbers. Called by other threads, too."""


class Devices:
    """Those that sources read from, and what their paths said last: what was read through one that was closed still
    counts, where another one is open by the same path."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By id, which is that of no other one as long as the device is here.
        self._last: dict[int, tuple[BlockDevice, list[dict[str, Any]]]] = {}

    def report(self, devices: Iterable[BlockDevice]) -> list[dict[str, Any]]:
        """What is open twice, over connections of its own each time, is one device to whoever looks."""
        found: dict[str, dict[str, list[dict[str, Any]]]] = {}
        closed: list[tuple[BlockDevice, list[dict[str, Any]]]] = []
        with self._lock:
            last, self._last = self._last, {}
            for device in devices:
                paths: list[dict[str, Any]] = []
                with contextlib.suppress(HeadraceError):
                    paths = [asdict(path) for path in paths_of(device)]
                for path in paths:
                    found.setdefault(device.uri, {}).setdefault(path["portal"], []).append(path)
                known = (device, paths) if paths else last.get(id(device), (device, []))
                if known[1]:
                    self._last[id(device)] = known
                if not paths:
                    closed.append(known)
        without = []
        for device, paths in closed:
            portals = found.get(device.uri, {})
            if not portals:
                without.append({"device": device.uri, "paths": []})
            for path in paths:
                if path["portal"] in portals:
                    # Before those that are there, so that the state is one of theirs.
                    counts = {**path, "usable": True, "slow": False, "under_way": 0}
                    portals[path["portal"]].insert(0, counts)
        return [
            *({"device": uri, "paths": list(map(_as_one, portals.values()))} for uri, portals in found.items()),
            *without,
        ]


def rank_report(sources: Mapping[str, Source], rank: int, local_rank: int, pid: int, known: Devices) -> dict[str, Any]:
    """`feeds`: of each loader; `stagings`: of what stages; `watches`: of training loops; `devices`: of all,
    each once, with its paths."""
    devices = {id(device): device for source in sources.values() for device in source.devices}
    said: dict[str, list[dict[str, Any]]] = {"feeds": [], "stagings": [], "watches": []}
    for name, source in sources.items():
        said[getattr(source, "section", "feeds")].append({"name": name, **asdict(source.metrics())})
    return {
        "rank": rank,
        "local_rank": local_rank,
        "pid": pid,
        "up": True,
        "time_s": time.time(),
        **said,
        "devices": known.report(devices.values()),
    }


def _as_one(paths: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several associations of one process by one path: the sums, and the state of the last one."""
    first, *others = reversed(paths)
    if not others:
        return dict(first)
    counted = (*_COUNTED, "attempts", "reconnects", "slow_times")
    latencies = [path["latency"] for path in paths]
    buckets = sorted(_counts(latencies).items())
    return {
        **first,
        **{name: sum(path[name] for path in paths) for name in counted},
        "usable": all(path["usable"] for path in paths),
        "slow": any(path["slow"] for path in paths),
        "latency": {**merged_latency(latencies), "buckets": buckets},
    }


def node_report(ranks: Iterable[Mapping[str, Any]], node: str) -> dict[str, Any]:
    """`ranks`: what each said. `paths`: of each device and path what all of them say together. `feeds`: the sums."""
    ranks = sorted(ranks, key=lambda each: (each["rank"], each["pid"]))
    merged: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for rank in ranks:
        for device in rank["devices"]:
            for path in device["paths"]:
                merged.setdefault((device["device"], path["portal"]), []).append(path)
    feeds = [feed for rank in ranks for feed in rank["feeds"]]
    stagings = [staging for rank in ranks for staging in rank.get("stagings", ())]
    return {
        "node": node,
        "time_s": time.time(),
        "ranks": ranks,
        "feeds": {
            **{name: sum(feed.get(name, 0) for feed in feeds) for name in _SUMMED},
            "longest_wait_s": max((feed.get("longest_wait_s", 0.0) for feed in feeds), default=0.0),
        },
        # Alone: what is there is of one stage, where several processes wait for it.
        "stagings": {"copied_bytes": sum(staging["copied_bytes"] for staging in stagings)},
        "paths": [
            {"device": device, "path": path, **_together(of_ranks)} for (device, path), of_ranks in merged.items()
        ],
    }


_SUMMED = (
    "batches",
    "samples",
    "token_bytes",
    "wait_s",
    "fetch_wait_s",
    "ready",
    "in_flight",
    "ring_bytes",
    "stage_bytes",
)
#: Of paths.
_COUNTED = ("reads", "read_bytes", "writes", "written_bytes", "errors", "losses", "under_way")


def _together(paths: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        **{name: sum(path[name] for path in paths) for name in _COUNTED},
        "ranks": len(paths),
        "usable_ranks": sum(path["usable"] for path in paths),
        "slow_ranks": sum(path["slow"] for path in paths),
        "latency": merged_latency([path["latency"] for path in paths]),
    }


def merged_latency(latencies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Percentiles of all that was counted, to 6 % as those of each; seconds."""
    counts = _counts(latencies)
    total = sum(counts.values())
    longest = max((latency["max_s"] for latency in latencies), default=0.0)
    result: dict[str, Any] = {"count": total}
    for name, quantile in QUANTILES.items():
        wanted, seen, value = max(1, math.ceil(total * quantile)), 0, 0.0
        for top in sorted(counts):
            seen += counts[top]
            value = top / 1e9
            if seen >= wanted:
                break
        result[name] = min(value, longest)
    return result


def _counts(latencies: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for latency in latencies:
        for top, count in latency["buckets"]:
            counts[top] = counts.get(top, 0) + count
    return counts
