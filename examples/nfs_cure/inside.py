"""In the guest, as the client: each path is measured as fast as it gives data, and then trained over and watched.

Prints `MEASURED {json}` for each.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.nfs_cure import loaders
from examples.nfs_cure.world import MEASURED, World
from headrace.measure import Watch
from headrace.volume import Volume

#: Of the guest, whose programs and mounts are not in the root of this Python (`machine_python`).
GUEST = Path("/proc/1/root")
FOLDERS = {"nfs": GUEST / "nfs", "local": GUEST / "srv/data"}
#: Where the emulated CPU is lacking for so much of the time it is what is measured: once more, so often in all.
STARVED, TRIES = 0.1, 2
#: Where they outlive the guest.
SHARE = Path("/mnt")


def main() -> None:
    world = World(**json.loads(os.environ["WORLD"]))
    at("begins")
    watched = Path("/run/watch")
    with Volume.open(f"nvme+tcp://192.0.2.1:4420/{os.environ['CURE_NQN']}?nsid=1") as volume:
        at("the volume is open")
        shape(world)
        for job, path in MEASURED:
            tries: list[dict[str, Any]] = []
            while len(tries) < TRIES and (not tries or tries[-1]["starved"] > STARVED):
                tries.append(one(world, job, path, volume, watched / f"{job}-{path}.{len(tries)}"))
            best = min(range(len(tries)), key=lambda number: float(tries[number]["starved"]))
            (watched / f"{job}-{path}.{best}").rename(watched / f"{job}-{path}")
            print(f"MEASURED {json.dumps(tries[best] | {'tries': len(tries)})}", flush=True)
    shutil.copytree(watched, SHARE / "watch")


def shape(world: World) -> None:
    """From here on the link is as long and as narrow as it should be: what came before is no part of it."""
    words = ["root", "netem", "rate", f"{world.link_here * 8}bit", "delay", f"{world.one_way_here_ms}ms"]
    for end in (["tc", "qdisc", "add", "dev", "c0"], ["tc", "-n", "server", "qdisc", "add", "dev", "s0"]):
        subprocess.run(["chroot", GUEST, *end, *words, "limit", "20000"], check=True)


def at(what: str) -> None:
    """How far it is, by the guest's clock."""
    print(f"at {Path('/proc/uptime').read_text().split()[0]} s: {what}", flush=True)


def one(world: World, job: str, path: str, volume: Volume, watched: Path) -> dict[str, Any]:
    """Measured, trained over and measured again, with one loader and from cold caches: no sample is read twice, and a
    machine that becomes busier meanwhile is busier for both."""
    loader: Any
    if path == "nvme":
        loader = (loaders.image_records if job == "images" else loaders.text_records)(volume, world, world.batches)
    else:
        loader = (loaders.image_files if job == "images" else loaders.text_files)(FOLDERS[path], world, world.batches)
    begun = time.monotonic()
    with cold(path) as counted:
        coming = iter(loader)
        for _ in range(world.warm_batches):
            next(coming)
        first = bench(world, coming, loader)
        starved = train(world, job, coming, loader, watched)
        # What lies ready since training, which was slower.
        for _ in range(world.ready_batches):
            started = time.perf_counter()
            next(coming)
            if time.perf_counter() - started > 0.1:
                break
        second = bench(world, coming, loader)
        close(coming, loader)
    count, seconds = (sum(pair) for pair in zip(first, second, strict=True))
    return {
        "job": job, "path": path, "bytes_per_s": count / seconds, "both": [first[0] / first[1], second[0] / second[1]],
        "seconds": time.monotonic() - begun, "bytes": loader.waited[2], "starved": starved,
        **counted,
    }  # fmt: skip


def bench(world: World, coming: Iterator[Any], loader: Any) -> tuple[int, float]:
    """Bytes and seconds, of a loader that nobody holds up."""
    before, started = loader.waited[2], time.perf_counter()
    for _ in range(world.bench_batches):
        next(coming)
    return loader.waited[2] - before, time.perf_counter() - started


def train(world: World, job: str, coming: Iterator[Any], loader: Any, folder: Path) -> float:
    """A step computes by sleeping, as MLPerf Storage's does. The share of the time in which a CPU was lacking."""
    compute_s = world.compute_s if job == "images" else world.text_compute_s
    # What was read before the first step is no part of what storage gives meanwhile.
    for _ in range(world.first_steps):
        next(coming)
        time.sleep(compute_s)
    with Watch(folder, device=None, rank=0, world=1) as watch:
        for _ in watch.loader(Rest(itertools.islice(coming, world.steps), loader)):
            with watch.compute():
                time.sleep(compute_s)
    return sum(step["starved"] for step in watch.steps) / sum(step.wall_s for step in watch.steps)


class Rest:
    """What is left of a loader."""

    def __init__(self, coming: Iterator[Any], loader: Any) -> None:
        self._coming = coming
        #: `Watch` asks it what it waited for.
        self.loader = loader
        self.devices = getattr(loader, "devices", [])

    def __iter__(self) -> Iterator[Any]:
        return self._coming


def close(coming: Any, loader: Any) -> None:
    coming.close()
    if hasattr(loader, "close"):
        loader.close()


@contextmanager
def cold(path: str) -> Iterator[dict[str, Any]]:
    """The caches of client and server are dropped; what the medium, the mount and the CPU did meanwhile is counted."""
    Path("/proc/sys/vm/drop_caches").write_text("3")
    counted: dict[str, Any] = {}
    calls, medium, cpu = nfs_calls(), medium_bytes(path), cpu_s()
    yield counted
    idle, whole = (now - then for now, then in zip(cpu_s(), cpu, strict=True))
    counted["cpu_busy"] = round(1 - idle / whole, 3)
    counted["medium_bytes"] = medium_bytes(path) - medium
    counted["nfs"] = {
        name: count - calls.get(name, 0) for name, count in nfs_calls().items() if count > calls.get(name, 0)
    }


def medium_bytes(path: str) -> int:
    disk = os.environ["VOLUME" if path == "nvme" else "FILES"].rpartition("/")[2]
    return int(Path(f"/sys/block/{disk}/stat").read_text().split()[2]) * 512


def cpu_s() -> tuple[float, float]:
    """Of all CPUs, in ticks: idle, and in all."""
    ticks = [float(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return ticks[3] + ticks[4], sum(ticks[:8])


def nfs_calls() -> dict[str, int]:
    """Remote calls that the mount has made, by name."""
    text = Path("/proc/1/mountstats").read_text().partition("fstype nfs4")[2]
    return {name: int(count) for name, count in re.findall(r"^\s+([A-Z_]+): (\d+) ", text, re.M) if int(count)}


if __name__ == "__main__":
    main()
