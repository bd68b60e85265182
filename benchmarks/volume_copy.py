"""`headrace volume cp` of a folder of mixed files, into a volume and out of it, beside `cp -r` on the same disk.

Both are programs, started anew each time: what Python costs to start is part of ours, with its modules compiled before,
as an installed package has them. Before each run the source is
dropped from the page cache, for both alike, so that both read from the disk.

Into a volume: a copy has been committed when the command ends, so the peer is `cp -r` and then `sync -f` of its folder;
what it is beside `cp -r` alone, whose files are in memory only when it ends, is a figure without a bound. Out of a
volume: neither side syncs; ours verifies every block on the way.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.pairs import Pairs, interleaved, quartile_spread

SUITE = "volume-copy"
FILES, QUICK_FILES = 10_000, 100
ROUNDS, QUICK_ROUNDS = 7, 3


def make_folder(folder: Path, files: int) -> int:
    """Mixed files as a training job has them: many small, some of 1 MiB, a few large. Their bytes."""
    chance = random.Random(1)
    noise = chance.randbytes(32 << 20)
    total = 0
    for number in range(files):
        kind = chance.random()
        if kind < 0.70:
            size = chance.randrange(0, 16 << 10)
        elif kind < 0.95:
            size = chance.randrange(16 << 10, 64 << 10)
        elif number % 1000:
            size = chance.randrange(64 << 10, 512 << 10)
        else:
            size = 24 << 20
        path = folder / f"{number % 37:02}" / f"part-{number:05}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        start = chance.randrange(0, len(noise) - size + 1)
        path.write_bytes(noise[start : start + size])
        total += size
    return total


def forget(*roots: Path) -> None:
    """Drop files from the page cache, so that they are read from the disk."""
    for path in _files(*roots):
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _files(*roots: Path) -> Iterator[Path]:
    for root in roots:
        if root.is_dir():
            yield from (path for path in root.rglob("*") if path.is_file())
        else:
            yield root


class _Place:
    """A folder on the disk, a volume on the same disk, and the programs that copy between them."""

    def __init__(self, root: Path, files: int) -> None:
        self.root = root
        self.folder = root / "folder"
        self.total = make_folder(self.folder, files)
        self.image = root / "volume.img"
        size = 4 * self.total + (256 << 20)
        self.image.touch()
        os.posix_fallocate(os.open(self.image, os.O_RDWR), 0, size)
        self.address = f"file:{self.image}"
        # Where the environment keeps Python from writing what it compiled, every start would compile all of it again.
        self.environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(root / "compiled")}
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.headrace("create", self.address)
        subprocess.run(["sync"], check=True)
        self.count = 0
        #: Of `cp -r` into a folder, bytes a second, run by run.
        self.unsynced: list[float] = []

    def headrace(self, *arguments: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "headrace", "volume", *arguments], check=True, capture_output=True, text=True,
            env=self.environment,
        )  # fmt: skip

    def timed(self, sources: list[Path], commands: Callable[[], None]) -> float:
        """Bytes a second."""
        forget(*sources)
        started = time.perf_counter()
        commands()
        return self.total / (time.perf_counter() - started)

    def away(self) -> Path:
        """The next new folder; the one before is gone."""
        shutil.rmtree(self.root / f"copy-{self.count}", ignore_errors=True)
        self.count += 1
        return self.root / f"copy-{self.count}"

    def ours_in(self) -> float:
        rate = self.timed([self.folder], lambda: self.headrace("cp", "-r", str(self.folder), ":in", "-V", self.address))
        self.headrace("rm", "--prefix", "in/", "--yes", "-V", self.address)
        return rate

    def peer_in(self) -> float:
        """Also notes the rate of `cp -r` alone, whose end is on the way."""
        target = self.away()

        def commands() -> None:
            began = time.perf_counter()
            _run("cp", "-r", str(self.folder), str(target))
            self.unsynced.append(self.total / (time.perf_counter() - began))
            _run("sync", "-f", str(target))

        return self.timed([self.folder], commands)

    def ours_out(self) -> float:
        target = self.away()
        rate = self.timed([self.image], lambda: self.headrace("cp", "-r", ":out", str(target), "-V", self.address))
        subprocess.run(["sync", "-f", str(self.root)], check=True)
        return rate

    def peer_out(self) -> float:
        target = self.away()
        rate = self.timed([self.folder], lambda: _run("cp", "-r", str(self.folder), str(target)))
        subprocess.run(["sync", "-f", str(self.root)], check=True)
        return rate


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _figure(name: str, pairs: Pairs, bound: float | None) -> Figure:
    return Figure(
        suite=SUITE,
        figure=name,
        value=pairs.median_ratio,
        unit="of cp -r",
        at_least=bound,
        samples=pairs.ratios,
        noise=pairs.noise,
        ours=statistics.median(pairs.ours) / 1e6,
        peer=statistics.median(pairs.peer) / 1e6,
        measured_in="MB/s",
    )


def _in(place: _Place, rounds: int) -> Iterator[Figure]:
    pairs = interleaved(place.ours_in, place.peer_in, rounds)
    yield _figure("folder_in", pairs, 0.8)
    # Two runs of the peer a round, behind the one that warmed it.
    runs = place.unsynced[1:]
    peer = [(one + other) / 2 for one, other in zip(runs[::2], runs[1::2], strict=True)]
    ratios = [ours / theirs for ours, theirs in zip(pairs.ours, peer, strict=True)]
    noise = quartile_spread([other / one for one, other in zip(runs[::2], runs[1::2], strict=True)])
    yield _figure("folder_in_unsynced", Pairs(ratios=ratios, ours=pairs.ours, peer=peer, noise=noise), None)


def _out(place: _Place, rounds: int) -> Iterator[Figure]:
    place.headrace("cp", "-r", str(place.folder), ":out", "-V", place.address)
    target = place.away()
    place.headrace("cp", "-r", ":out", str(target), "-V", place.address)
    # The right bytes, before a figure is taken.
    subprocess.run(["diff", "-r", str(place.folder), str(target)], check=True)
    yield _figure("folder_out", interleaved(place.ours_out, place.peer_out, rounds), 0.8)


FIGURES: dict[str, Callable[[_Place, int], Iterator[Figure]]] = {
    "folder_in": _in,
    "folder_in_unsynced": _in,
    "folder_out": _out,
}


def run(quick: bool, only: list[str] | None = None) -> Iterator[Figure]:
    where = os.environ.get("HEADRACE_BENCH_DIR") or tempfile.gettempdir()
    with tempfile.TemporaryDirectory(dir=where) as root:
        place = _Place(Path(root), QUICK_FILES if quick else FILES)
        wanted = only or list(FIGURES)
        for measure in dict.fromkeys(FIGURES[name] for name in wanted):
            for figure in measure(place, QUICK_ROUNDS if quick else ROUNDS):
                if figure.figure in wanted:
                    yield figure
