"""What one rank says, and what the ranks of a node say together."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from headrace.device import BlockDevice, paths_of
from headrace.errors import HeadraceError

#: Of latencies.
QUANTILES = {"p50_s": 0.5, "p99_s": 0.99, "max_s": 1.0}


class Source(Protocol):
    """A loader."""

    @property
    def name(self) -> str:
        """Of what it reads."""

    @property
    def devices(self) -> Sequence[BlockDevice]: ...

    def metrics(self) -> Any:
        """A dataclass of numbers. Called by other threads, too."""


def rank_report(sources: Mapping[str, Source], rank: int, local_rank: int, pid: int) -> dict[str, Any]:
    """`feeds`: of each loader; `devices`: of all of them, each once, with its paths."""
    devices = {id(device): device for source in sources.values() for device in source.devices}
    return {
        "rank": rank,
        "local_rank": local_rank,
        "pid": pid,
        "up": True,
        "time_s": time.time(),
        "feeds": [{"name": name, **asdict(source.metrics())} for name, source in sources.items()],
        "devices": [_device(device) for device in devices.values()],
    }


def _device(device: BlockDevice) -> dict[str, Any]:
    paths: list[dict[str, Any]] = []
    with contextlib.suppress(HeadraceError):
        # One that was closed has none any more; what was read through it still counts.
        paths = [asdict(path) for path in paths_of(device)]
    return {"device": device.uri, "paths": paths}


def node_report(ranks: Iterable[Mapping[str, Any]], node: str) -> dict[str, Any]:
    """`ranks`: what each said. `paths`: of each device and path what all of them say together. `feeds`: the sums."""
    ranks = sorted(ranks, key=lambda each: (each["rank"], each["pid"]))
    merged: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for rank in ranks:
        for device in rank["devices"]:
            for path in device["paths"]:
                merged.setdefault((device["device"], path["portal"]), []).append(path)
    feeds = [feed for rank in ranks for feed in rank["feeds"]]
    return {
        "node": node,
        "time_s": time.time(),
        "ranks": ranks,
        "feeds": {
            **{name: sum(feed.get(name, 0) for feed in feeds) for name in _SUMMED},
            "longest_wait_s": max((feed.get("longest_wait_s", 0.0) for feed in feeds), default=0.0),
        },
        "paths": [
            {"device": device, "path": path, **_together(of_ranks)} for (device, path), of_ranks in merged.items()
        ],
    }


_SUMMED = ("batches", "samples", "token_bytes", "wait_s", "ready", "in_flight", "ring_bytes")


def _together(paths: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    summed = ("reads", "read_bytes", "writes", "written_bytes", "errors", "losses", "under_way")
    return {
        **{name: sum(path[name] for path in paths) for name in summed},
        "ranks": len(paths),
        "usable_ranks": sum(path["usable"] for path in paths),
        "slow_ranks": sum(path["slow"] for path in paths),
        "latency": merged_latency([path["latency"] for path in paths]),
    }


def merged_latency(latencies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Percentiles of all that was counted, to 6 % as those of each; seconds."""
    counts: dict[int, int] = {}
    for latency in latencies:
        for top, count in latency["buckets"]:
            counts[top] = counts.get(top, 0) + count
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
