"""The processes of a checkpoint: started, told to save or restore together, and gone at the end, whatever comes."""

from __future__ import annotations

import json
import select
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.accidents.processes import Child, Processes
from headrace.errors import DeviceError, DeviceTimeout

#: A rank that neither moves a byte nor answers for so long hangs.
SILENCE_S = 120.0
_START_S = 120.0


class RankFailed(DeviceError):
    """A rank said that the storage did not do what it was asked for."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """What all ranks together did: until the last one had ended, each one's own seconds, and its proofs."""

    seconds: float
    each_s: Sequence[float]
    proofs: Sequence[str]

    @property
    def slowest(self) -> int:
        return max(range(len(self.each_s)), key=lambda rank: self.each_s[rank])


class Ranks:
    """A context manager; `count` processes of this interpreter. An error of one ends all of them."""

    def __init__(self, count: int) -> None:
        self._processes = Processes()
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
        self._children: list[Child] = []
        #: By `time.monotonic`: a save or restore that is under way then is given up.
        self.deadline: float | None = None
        try:
            for rank in range(count):
                log = self._folder / f"rank-{rank}.log"
                child = self._processes.start(
                    f"rank {rank}", ["-m", "headrace.bench.rank"], log=log, talk=True, env={"OMP_NUM_THREADS": "1"}
                )
                self._children.append(child)
            self._answers(self._children, lambda moved: None, _START_S)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def open(self, spec: dict[str, Any]) -> None:
        """Each takes part in this room."""
        self._ask([{"do": "open", "spec": spec}] * len(self._children), lambda moved: None)

    def save(self, shards: Sequence[Sequence[int]], moved: Callable[[int], None]) -> Done:
        """Shards of each rank; `moved(bytes)` of all, now and then."""
        return self._work("save", shards, moved)

    def restore(self, shards: Sequence[Sequence[int]], moved: Callable[[int], None]) -> Done:
        return self._work("restore", shards, moved)

    def leave(self) -> None:
        """The room is over."""
        self._ask([{"do": "close"}] * len(self._children), lambda moved: None)

    def _work(self, verb: str, shards: Sequence[Sequence[int]], moved: Callable[[int], None]) -> Done:
        begun = time.perf_counter()
        said = self._ask([{"do": verb, "shards": [*mine]} for mine in shards], moved, self.deadline)
        return Done(
            seconds=time.perf_counter() - begun,
            each_s=[float(one["seconds"]) for one in said],
            proofs=[str(proof) for one in said for proof in one.get("proofs", ())],
        )

    def _ask(
        self, requests: Sequence[dict[str, Any]], moved: Callable[[int], None], deadline: float | None = None
    ) -> list[dict[str, Any]]:
        try:
            for child, request in zip(self._children, requests, strict=True):
                child.tell(json.dumps(request))
            return self._answers(self._children, moved, SILENCE_S, deadline)
        except BaseException:
            # The others may be in the middle of it: their answers would be taken for those to the next question.
            self.close()
            raise

    def _answers(
        self, children: Sequence[Child], moved: Callable[[int], None], silence_s: float, deadline: float | None = None
    ) -> list[dict[str, Any]]:
        """One of each, as they come. The first error ends it for all; what says nothing for too long does, too."""
        waiting = dict(enumerate(children))
        found: dict[int, dict[str, Any]] = {}
        so_far = [0] * len(children)
        heard_s = time.monotonic()
        while waiting:
            now = time.monotonic()
            if deadline is not None and now > deadline:
                raise DeviceTimeout(
                    "the time of the run is up in the middle of a save or restore",
                    found=f"{sum(so_far)} bytes moved",
                    next_step="give less to save (--save), or more time (--limit)",
                )  # fmt: skip
            talking = [rank for rank, child in waiting.items() if child.talks()]
            if not talking:
                left = heard_s + silence_s - now
                if left <= 0:
                    name = ", ".join(child.name for child in waiting.values())
                    raise DeviceTimeout(
                        f"{name}: nothing moves", found=f"{silence_s:.0f} s of silence",
                        next_step="see what it waits for: `headrace doctor` looks at the path",
                    )  # fmt: skip
                select.select([*waiting.values()], [], [], min(left, 0.5))
                continue
            for rank in talking:
                said = json.loads(waiting[rank].hear(silence_s))
                if "error" in said:
                    raise RankFailed(f"{children[rank].name}: {said['error']}")
                if "moved" in said:
                    if said["moved"] > so_far[rank]:
                        heard_s = time.monotonic()
                        so_far[rank] = said["moved"]
                        moved(sum(so_far))
                    continue
                heard_s = time.monotonic()
                found[rank] = said["ok"]
                del waiting[rank]
        return [found[rank] for rank in range(len(children))]

    def close(self) -> None:
        self._processes.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
