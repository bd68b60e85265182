"""One launch of the trainer with torchrun, and how it is watched."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from headrace.accidents.processes import Child, Processes
from headrace.demo.events import Event, EventFollower
from headrace.demo.story import Phase
from headrace.demo.train_config import TrainConfig
from headrace.errors import HeadraceError
from headrace.measure import read_records

#: A step takes half a second; a job that ends nothing for so long hangs.
SILENCE_TIMEOUT_S = 180.0


class Job:
    def __init__(self, processes: Processes, config: TrainConfig, ranks: int, live: Callable[[str], None]) -> None:
        self.config = config
        self.phase = Phase(name=config.phase, ranks=ranks, began=time.time())
        self._live = live
        self._directory = Path(config.directory)
        self._directory.mkdir(exist_ok=True)
        path = self._directory / f"{config.phase}.json"
        config.write(path)
        self._follower = EventFollower(self._directory, f"{config.phase}-events-*.jsonl")
        self._first_records = self._directory / f"{config.phase}-steps-0.jsonl"
        self._heard = time.monotonic()
        self._last_size = -1
        cores = len(os.sched_getaffinity(0))
        self.child: Child = processes.start(
            f"training ({config.phase})",
            [
                *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0"),
                *("-m", "headrace.demo.train", str(path)),
            ],
            log=self._directory.parent / "logs" / f"train-{config.phase}.log",
            env={
                "OMP_NUM_THREADS": str(max(1, cores // ranks)),
                # Threads that wait by spinning ruin each other on cores that somebody else uses, too.
                "OMP_WAIT_POLICY": "passive",
                # Without it cuBLAS may choose another order of a sum in another run.
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
                # Where no address was asked for, gloo looks up the host's name, which not every container can.
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            },
        )

    def wait_for(self, wanted: Callable[[Event], bool]) -> Event:
        """The next event that is wanted. Raises when the job ends, or hangs, before it comes."""
        event = self._follower.wait_for(wanted, alive=lambda: self.child.poll() is None, idle=self._watch)
        if event is None:
            raise self.child.failure(f"{self.child.name} ended too early", self.child.poll())
        return event

    def poll(self) -> None:
        """Take in what was written, and show it."""
        self._follower.poll()
        self._watch()

    def find(self, names: Collection[str], step: int) -> Event | None:
        """What rank 0 told of this step already."""
        told = self._follower.events
        return next((e for e in told if e.event in names and e.step == step and e.rank == 0), None)

    def wait_all(self, name: str, step: int) -> None:
        """Wait until every rank has told this of this step."""
        while len(self._of(name, step)) < self.phase.ranks:
            self.wait_for(lambda event: event.event == name and event.step == step)

    def sum(self, name: str, step: int, detail: str) -> int:
        """A number of this event, over all ranks."""
        return sum(int(event.details[detail]) for event in self._of(name, step))

    def _of(self, name: str, step: int) -> list[Event]:
        return [event for event in self._follower.events if event.event == name and event.step == step]

    def finish(self) -> Phase:
        """Wait for a good end."""
        self._follower.wait_for(lambda _: False, alive=lambda: self.child.poll() is None, idle=self._watch)
        status = self.child.wait(5.0)
        self._collect()
        self.child.expect(status)
        return self.phase

    def wait_broken(self, timeout_s: float) -> Phase:
        """Wait for the end that follows a kill. Raises when the job says that all went well."""
        status = self.child.wait(timeout_s)
        self._collect()
        if status == 0:
            raise HeadraceError("torchrun did not notice that a rank was killed", expected="a failure", found="success")
        return self.phase

    def _collect(self) -> None:
        self._follower.poll()
        self.phase.ended = time.time()
        self.phase.events = list(self._follower.events)
        for path in sorted(self._directory.glob(f"{self.config.phase}-steps-*.jsonl")):
            self.phase.records += list(read_records(path))

    def _watch(self) -> None:
        size = self._first_records.stat().st_size if self._first_records.exists() else 0
        if size != self._last_size:
            self._last_size = size
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > SILENCE_TIMEOUT_S:
            raise self.child.failure(f"{self.child.name} did nothing for {SILENCE_TIMEOUT_S:.0f} s", self.child.poll())
        if size:
            record = [r for r in read_records(self._first_records) if "loss" in r.notes][-1]
            loss, step = record.notes["loss"], record.step + 1
            self._live(f"step {step} of {self.config.steps}, loss {loss:.3f}, {record.total_s:.2f} s a step")
        else:
            self._live("starting processes")
