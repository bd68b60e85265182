"""One launch of the trainer with torchrun, and how it is watched."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from headrace.demo.events import Event, EventFollower
from headrace.demo.processes import Child, Processes
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

    @property
    def events(self) -> list[Event]:
        """All that was told so far."""
        return self._follower.events

    def poll(self) -> None:
        """Take in what was written, and show it."""
        self._follower.poll()
        self._watch()

    def seen(self, event: str, step: int, before: float) -> bool:
        """Whether rank 0 told this event of this step before that time."""
        return any(e.event == event and e.step == step and e.rank == 0 and e.t < before for e in self._follower.events)

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
            record = list(read_records(self._first_records))[-1]
            loss = record.notes.get("loss", float("nan"))
            self._live(f"step {record.step + 1} of {self.config.steps}, loss {loss:.3f}, {record.total_s:.2f} s a step")
        else:
            self._live("starting processes")
