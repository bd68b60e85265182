"""`headrace bench accelerators`, from Python: each path read by emulated accelerators, with loaders of its own.

Samples that are files are read whole (`--whole-files`), text as windows of its one file, a volume through its reader.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from examples.nfs_cure.world import World
from headrace.bench.accelerators import Trial, Workload, emulate
from headrace.bench.accelerators.run import PlaceLoader, of_whole_files
from headrace.bench.accelerators.samples import Samples, WholeFiles
from headrace.bench.cache import DIRECT
from headrace.bench.places import Place, open_place
from headrace.bench.places.protocol import Pending, Ranges, Reader

#: Of AU: what is below it waits for storage, and so moves what storage gives.
_ENOUGH = 0.9
#: Computing of accelerators that only read: as little as can be asked for.
_HARDLY_S = 1e-4
#: Requests of a volume under way: as the default of four accelerators.
_VOLUME_DEPTH = 32
#: A trial ends by its steps.
_LONGEST_S = 120.0


class Bench:
    """Places to be read. All of them are looked at, and a volume's connections made, before the link is slow: none of
    that is measured."""

    def __init__(self, world: World, folders: dict[str, Path], uri: str) -> None:
        self._world = world
        self._opened = ExitStack()
        volume = self._place(f"headrace://{uri}")
        self._flow = self._opened.enter_context(closing(volume.reader(depth=_VOLUME_DEPTH)))
        self._places: dict[tuple[str, str], Place] = {("images", "nvme"): volume, ("text", "nvme"): volume}
        for path, folder in folders.items():
            self._places["images", path] = self._place(str(folder / "images"), existing=True, whole=True)
            self._places["text", path] = self._place(str(folder / "text.bin"))

    def _place(self, name: str, *, existing: bool = False, whole: bool = False) -> Place:
        place = self._opened.enter_context(open_place(name, existing=existing, whole=whole))
        place.prepare(1 << 40, tell=lambda fraction, text: None)
        return place

    def close(self) -> None:
        self._opened.close()

    def workload(self, job: str, path: str) -> Workload:
        world = self._world
        images = job == "images"
        asked = Workload(
            name=job, batch=world.batch if images else world.text_batch,
            sample_bytes=world.sample_bytes if images else world.window_bytes,
            compute_s=world.compute_s if images else world.text_compute_s,
        )  # fmt: skip
        return of_whole_files(asked, self._places[job, path]) if self._whole(job, path) else asked

    def trial(self, job: str, path: str, *, hardly_computing: bool = False) -> Trial:
        """All accelerators compute at once, so they are emulated as one that takes a step's batch, from one loader with
        all readers, as training has it. `hardly_computing`: they only read, and it is the rate that is looked at."""
        workload = self.workload(job, path)
        if hardly_computing:
            workload = replace(workload, compute_s=_HARDLY_S)
        take = partial(self._loader, job, path, workload)
        return emulate(workload, take, 1, seconds=_LONGEST_S, steps=self._world.bench_steps)

    def _loader(self, job: str, path: str, workload: Workload, _: int) -> PlaceLoader:
        place, depth = self._places[job, path], self._world.readers
        which: dict[str, Any] = {"batch": workload.batch, "accelerator": 0, "accelerators": 1, "seed": 2}
        if self._whole(job, path):
            samples: Samples | WholeFiles = WholeFiles(place.items, **which)
        else:
            lengths = [item.length_bytes for item in place.items]
            samples = Samples(lengths, sample_bytes=workload.sample_bytes, samples_per_file=1, **which)
        if path == "nvme":
            return PlaceLoader(_Kept(self._flow), samples, _VOLUME_DEPTH)
        return PlaceLoader(place.reader(depth=depth, cache=DIRECT), samples, depth)

    @staticmethod
    def _whole(job: str, path: str) -> bool:
        return job == "images" and path != "nvme"


class _Kept:
    """A flow that outlives a trial."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def start(self, ranges: Ranges) -> Pending:
        return self._reader.start(ranges)

    def read(self, item: int, offset: int, length: int) -> None:
        self._reader.read(item, offset, length)

    def close(self) -> None:
        """The one who made it does."""


def waits_for_storage(trial: Trial) -> bool:
    return trial.each[0] < _ENOUGH


def au(trial: Trial) -> float:
    """As far as storage goes. That an emulated CPU wakes late is a loss in `Trial.au`. Where storage is waited for, a
    step lasts as long as its reads, however late that is; where it is not, the loss is the CPU's and is left out."""
    return trial.au if waits_for_storage(trial) else trial.each[0]
