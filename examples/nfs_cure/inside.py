"""In the guest, as the client: each path is measured by `headrace bench`, and then trained over and watched.

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
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from examples.nfs_cure import loaders
from examples.nfs_cure.bench import Bench, au, waits_for_storage
from examples.nfs_cure.world import MEASURED, World
from headrace.measure import Watch
from headrace.volume import Volume

#: Of the guest, whose programs and mounts are not in the root of this Python (`machine_python`).
GUEST = Path("/proc/1/root")
#: Where this Python has them, for a path through /proc/1/root is one in this root to whoever resolves it.
FOLDERS = {"nfs": Path("/run/nfs"), "local": Path("/run/local")}
#: Where the emulated CPU is lacking for so much of the time it is what is measured; where bench and training differ by
#: so much of AU, one of the few steps of either may have met a stall of the emulated machine, which is none of the
#: path's. Both are done again then, so often in all: what they differ by each time is the path's.
STARVED, APART, TRIES = 0.1, 0.04, 3
#: Where they outlive the guest.
SHARE = Path("/mnt")


def main() -> None:
    world = World(**json.loads(os.environ["WORLD"]))
    at("begins")
    watched = Path("/run/watch")
    uri = f"nvme+tcp://192.0.2.1:4420/{os.environ['CURE_NQN']}?nsid=1"
    mount()
    with Volume.open(uri) as volume, closing(Bench(world, FOLDERS, uri)) as bench:
        at("the volume is open")
        shape(world)
        for job, path in MEASURED:
            tries: list[dict[str, Any]] = []
            while len(tries) < TRIES and (not tries or is_doubtful(tries[-1])):
                tries.append(one(world, job, path, volume, bench, watched / f"{job}-{path}.{len(tries)}"))
            # The last one, but for a lack of CPUs.
            best = min(range(len(tries)), key=lambda at: (max(STARVED, float(tries[at]["starved"])), -at))
            (watched / f"{job}-{path}.{best}").rename(watched / f"{job}-{path}")
            print(f"MEASURED {json.dumps(tries[best] | {'tries': len(tries)})}", flush=True)
    shutil.copytree(watched, SHARE / "watch")


def is_doubtful(said: dict[str, Any]) -> bool:
    return bool(said["starved"] > STARVED or abs(said["bench_au"] - said["trained_au"]) > APART)


def mount() -> None:
    for inside, outside in zip(FOLDERS.values(), ("/nfs", "/srv/data"), strict=True):
        inside.mkdir()
        subprocess.run(["chroot", GUEST, "mount", "--bind", outside, f"/share2{inside}"], check=True)


def shape(world: World) -> None:
    """From here on the link is as long and as narrow as it should be: what came before is no part of it."""
    words = ["root", "netem", "rate", f"{world.link_here * 8}bit", "delay", f"{world.one_way_here_ms}ms"]
    for end in (["tc", "qdisc", "add", "dev", "c0"], ["tc", "-n", "server", "qdisc", "add", "dev", "s0"]):
        subprocess.run(["chroot", GUEST, *end, *words, "limit", "20000"], check=True)


def at(what: str) -> None:
    """How far it is, by the guest's clock."""
    print(f"at {Path('/proc/uptime').read_text().split()[0]} s: {what}", flush=True)


def one(world: World, job: str, path: str, volume: Volume, bench: Bench, watched: Path) -> dict[str, Any]:
    """Measured, and then trained over: each from cold caches, and with a loader of its own."""
    begun = time.monotonic()
    with cold(path) as bench_medium:
        trial = fast = bench.trial(job, path)
    if not waits_for_storage(trial):
        # It moved what was asked for; what storage could give is another trial.
        with cold(path):
            fast = bench.trial(job, path, hardly_computing=True)
    at(f"{job} over {path}: benched")
    loader: Any
    if path == "nvme":
        loader = (loaders.image_records if job == "images" else loaders.text_records)(volume, world, world.batches)
    else:
        loader = (loaders.image_files if job == "images" else loaders.text_files)(FOLDERS[path], world, world.batches)
    with cold(path) as counted:
        coming = iter(loader)
        for _ in range(world.warm_batches):
            next(coming)
        starved, trained_au = train(world, job, coming, loader, watched)
        close(coming, loader)
    return {
        "job": job, "path": path, "bytes_per_s": fast.rate, "bench_au": au(trial),
        "bench_trial": [trial.au, trial.each[0], trial.rate],
        "bench_bytes": trial.bytes, "bench_medium_bytes": bench_medium["medium_bytes"], "bench_steps": trial.steps,
        "seconds": time.monotonic() - begun, "bytes": loader.waited[2], "starved": starved, "trained_au": trained_au,
        **counted,
    }  # fmt: skip


def train(world: World, job: str, coming: Iterator[Any], loader: Any, folder: Path) -> tuple[float, float]:
    """A step computes by sleeping, as MLPerf Storage's does. The share of the time in which a CPU was lacking, and that
    in which storage was not waited for."""
    accelerator = Accelerator(world.compute_s if job == "images" else world.text_compute_s, loader)
    # What was read before the first step is no part of what storage gives meanwhile.
    for _ in range(world.first_steps):
        next(coming)
        accelerator.compute()
    with Watch(folder, device=None, rank=0, world=1) as watch:
        for _ in watch.loader(Rest(itertools.islice(coming, world.steps), loader)):
            with watch.compute():
                accelerator.compute()
    wall_s = sum(step.wall_s for step in watch.steps)
    waited_s = sum(step["fetch"] + step["blocked"] for step in watch.steps)
    return sum(step["starved"] for step in watch.steps) / wall_s, 1 - waited_s / wall_s


class Accelerator:
    """It has its next step queued while the loop does its own work, as a real one does: only batches hold it up. What
    this loop takes of an emulated CPU, and how late it wakes, is no part of a step."""

    def __init__(self, compute_s: float, loader: Any) -> None:
        self._compute_s, self._loader = compute_s, loader
        self._waited_s = loader.waited[0]
        self._free_s = time.perf_counter()

    def compute(self) -> None:
        """The next step, until it is done."""
        waited_s = self._loader.waited[0]
        self._free_s += waited_s - self._waited_s + self._compute_s
        self._waited_s = waited_s
        time.sleep(max(0.0, self._free_s - time.perf_counter()))


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
