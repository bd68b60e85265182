"""A loader in a process of its own: what those of tokens (`feed_loaders`) and of records (`feed_record_loaders`) share.

Its first line is `{"ready": NAME, "version": "PACKAGE 1.2"}`; jobs as `benchmarks.programs` says:

    {"first": 3}       construct a loader and take its first batch, so often -> seconds each
    {"resume": 3}      from a state at half of an epoch, in a new loader, to the next batch, so often -> seconds each,
                       and whether it was the batch that the first loader had next; null where there are no states
    {"seconds": 2.0}   take batches for so long, one at least -> samples, bytes, seconds, CPU seconds of the process and
                       its workers, and its most resident memory
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch


@dataclass
class Loader:
    """Batches without end, and where it is, in what its package takes back; None: it offers no such thing."""

    batches: Iterator[Any]
    state: Callable[[], Any] | None = None


#: A new loader: at its beginning, or where the state says.
Make = Callable[[Any], Loader]


def loader_of(dataset: Any, workers: int, **more: Any) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(dataset, num_workers=workers, persistent_workers=workers > 0, **more)


def forever(make: Callable[[int], Iterable[Any]]) -> Iterator[Any]:
    """Epoch after epoch."""
    for epoch in itertools.count():
        gave = False
        for batch in make(epoch):
            gave = True
            yield batch
        if not gave:
            raise RuntimeError(f"epoch {epoch} has no batch")


def _cpu_s() -> float:
    """Of this process and of those it started: workers that live are in neither sum of the kernel's, and those that
    have ended, as some do with each epoch, in the second one only."""
    import psutil

    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))
    return time.process_time() + ended.ru_utime + ended.ru_stime + living


@dataclass
class Work:
    """What is measured of one loader. `weigh`: of a batch, its samples and bytes, each of whose pages it has looked at;
    `same`: two batches are one. `half`: batches of half an epoch."""

    make: Make
    weigh: Callable[[Any], tuple[int, int]]
    same: Callable[[Any, Any], bool]
    half: int

    def first(self, times: int) -> dict[str, Any]:
        took = []
        for _ in range(times):
            began = time.perf_counter()
            next(self.make(None).batches)
            took.append(time.perf_counter() - began)
        return {"first_s": took}

    def resume(self, times: int) -> dict[str, Any]:
        loader = self.make(None)
        if loader.state is None:
            return {"resume_s": None}
        for _ in range(self.half):
            next(loader.batches)
        state = loader.state()
        wanted = next(loader.batches)
        took, same = [], True
        for _ in range(times):
            began = time.perf_counter()
            found = next(self.make(state).batches)
            took.append(time.perf_counter() - began)
            same = same and self.same(found, wanted)
        return {"resume_s": took, "same": same}

    def turn(self, loader: Loader, seconds: float) -> dict[str, Any]:
        samples = size = 0
        cpu, began = _cpu_s(), time.perf_counter()
        took = 0.0
        while not samples or took < seconds:
            more, longer = self.weigh(next(loader.batches))
            samples, size = samples + more, size + longer
            took = time.perf_counter() - began
        answer = {"samples": samples, "bytes": size, "seconds": took, "cpu_s": _cpu_s() - cpu}
        answer["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return answer


def serve(name: str, package: str, work: Work) -> None:
    """Answer jobs until standard input ends."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # What libraries print goes elsewhere: standard output carries the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    loader = work.make(None)
    work.weigh(next(loader.batches))
    print(json.dumps({"ready": name, "version": f"{package} {metadata.version(package)}"}), file=answers)
    for line in sys.stdin:
        job = json.loads(line)
        if "first" in job:
            answer = work.first(job["first"])
        elif "resume" in job:
            answer = work.resume(job["resume"])
        else:
            answer = work.turn(loader, job["seconds"])
        print(json.dumps(answer), file=answers)
