"""What is done to the job, round after round, and what must hold whatever it was.

Ranks say which save they begin, and which one they were told is committed. What the next job restores is the last of
those, or one that was begun behind it; of each tensor every element, on every rank. Every other step that is kept is
whole, too.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint import list_checkpoints
from headrace.torch import VolumeReader
from headrace.volume import Volume
from headrace.volume.repair.scrub import scrub
from tests.stopping import stop
from tests.torch.crew import Crew, preload
from tests.torch.kills import job as role
from tests.torch.kills.job import BEAT_S, MISSED, MODES, REPLICATED, SHARDED, STALL_S, content
from tests.torch.target import Target
from tests.waiting import PATIENCE_S, until

preload("headrace.torch.job.checkpointer", "tests.torch.kills.job")

#: A step, and the number of the job that saved it.
Saved = tuple[int, int]
NOTHING: Saved = (0, 0)


@dataclass
class History:
    """Of one run, over all its jobs."""

    acknowledged: Saved = NOTHING
    #: Begun behind that: neither acknowledged nor ruled out.
    in_flight: list[Saved] = field(default_factory=list)

    def restored(self, found: Saved) -> None:
        assert found in (self.acknowledged, *self.in_flight), (
            f"step {found[0]} of job {found[1]} was restored, the last that was acknowledged is {self.acknowledged}, "
            f"in flight were {self.in_flight}"
        )
        # What was in flight besides may yet become visible, when the next session looks what became of it.
        self.acknowledged = found

    def begun(self, save: Saved) -> None:
        self.in_flight.append(save)

    def was_acknowledged(self, save: Saved) -> None:
        self.acknowledged = save
        self.in_flight = [each for each in self.in_flight if each[1] == save[1] and each[0] > save[0]]


class Job:
    """Ranks, and what they said so far."""

    def __init__(self, number: int, mode: str, world: int, uris: list[str], history: History) -> None:
        self.number, self.world = number, world
        self.failures: list[dict[str, Any]] = []
        self.restored: dict[int, Saved] = {}
        self.begun = 0
        self.acknowledged = 0
        self._history = history
        self._heard = [0] * world
        self.crew = Crew(world, role.job, {"uris": uris, "number": number, "mode": mode})
        self.stopped: set[int] = set()
        self.killed: set[int] = set()

    def hear(self, seconds: float = 0.1) -> None:
        self.crew.listen(seconds)
        said = [
            (rank, json.loads(word))
            for rank, words in enumerate(self.crew.words)
            for word in words[self._heard[rank] :]
        ]
        self._heard = [len(words) for words in self.crew.words]
        for rank, one in said:
            self._take(rank, one)

    def _take(self, rank: int, one: dict[str, Any]) -> None:
        assert "violation" not in one, one["violation"]
        if "restored" in one:
            found = self.restored[rank] = (one["restored"][0], one["restored"][1])
            if len(self.restored) == 1:
                self._history.restored(found)
            assert len(set(self.restored.values())) == 1, f"ranks restored {self.restored}"
        elif "failed" in one:
            self.failures.append(one)
        elif "begun" in one and one["begun"][0] > self.begun:
            self.begun = one["begun"][0]
            self._history.begun((self.begun, self.number))
        elif "acknowledged" in one and one["acknowledged"][0] > self.acknowledged:
            self.acknowledged = one["acknowledged"][0]
            self._history.was_acknowledged((self.acknowledged, self.number))

    @property
    def over(self) -> bool:
        """Every rank has ended, or has given up."""
        return all(self.crew.ended(rank) is not None for rank in range(self.world))

    def wait_for(self, what: str, condition: Callable[[], object]) -> bool:
        """False where all ranks ended before."""

        def there() -> bool:
            self.hear()
            return bool(condition()) or self.over

        until(there, f"{what}, of job {self.number}: {self.crew.words}", 3 * PATIENCE_S)
        return bool(condition())

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.crew.pids[rank], signal.SIGKILL)
            self.killed.add(rank)

    def stop(self, *ranks: int) -> None:
        for rank in ranks:
            stop(self.crew.pids[rank])
            self.stopped.add(rank)

    def wake(self) -> None:
        for rank in self.stopped:
            os.kill(self.crew.pids[rank], signal.SIGCONT)
        self.stopped.clear()

    def end(self) -> None:
        self.hear(0)
        self._refuse_other_ends()
        self.killed |= set(range(self.world))
        self.crew.end()
        self.hear(0)
        self._refuse_other_ends()

    def _refuse_other_ends(self) -> None:
        """A rank that ends of anything but SIGKILL has given up, and says why."""
        for rank in range(self.world):
            kind, text = self.crew.ended(rank) or ("", "")
            assert kind in ("", "returned") or (kind == "died" and rank in self.killed), (
                f"rank {rank} of job {self.number} {kind}: {text}"
            )


class Rounds:
    """`run` raises AssertionError where a promise was broken."""

    def __init__(self, folder: Path, seed: int, worlds: Sequence[int] = (2, 2, 3, 4)) -> None:
        self.counts: Counter[str] = Counter()
        #: What was done, for who looks into a failure.
        self.log: list[str] = []
        self._chance = random.Random(seed)
        self._worlds = worlds
        self._histories = {mode: History() for mode in MODES}
        self._numbers = 0
        self._began = time.monotonic()
        self._jobs: list[Job] = []
        #: Seconds of the last save that nothing happened to: so long is what a moment is chosen from.
        self._save_s = 0.2
        role.beat_fast()
        self.target = Target(folder, size="128MiB")
        Volume.create(self.target.uris()).close()

    def close(self) -> None:
        for job in self._jobs:
            job.crew.end()
        self.target.close()

    def run(self, accident: str | None = None, *, mode: str | None = None) -> None:
        """One round: a job, an accident, and what is left."""
        self.counts["rounds"] += 1
        mode = mode or self._chance.choice(MODES)
        accident = accident or self._chance.choice([name for name, weight in ACCIDENTS.items() for _ in range(weight)])
        job = self._begin(mode)
        saved = job.wait_for("a save", lambda: job.acknowledged)
        if saved:
            self._moment(job)
            self._say(f"{accident} at step {job.begun} of job {job.number}")
            self.counts[accident] += 1
            getattr(self, f"_{accident.replace(' ', '_')}")(job, mode)
        else:
            self.counts["gave up before its first save"] += 1
            self._say(f"job {job.number} gave up: {job.failures[:1]}")
        for each in self._jobs:
            each.end()
            self.counts["failed saves, as a rank saw them"] += len(each.failures)
            self.counts["jobs"] += 1
            self.counts["commits acknowledged"] += max(
                0, each.acknowledged - next(iter(each.restored.values()), NOTHING)[0]
            )
        self._jobs = []
        self._say("over")
        self._verify(mode)

    def _begin(self, mode: str) -> Job:
        self._numbers += 1
        # Who is stopped loses its associations, or wakes up with commands that it can send at once.
        uris = self.target.uris(loss_timeout=60, keepalive=self._chance.choice((1, 120)))
        job = Job(self._numbers, mode, self._chance.choice(self._worlds), uris, self._histories[mode])
        self._say(f"job {job.number} of {job.world} ranks, {mode}")
        self._jobs.append(job)
        return job

    def _moment(self, job: Job) -> None:
        """Somewhere in a save, mostly."""
        step = job.begun
        began = time.monotonic()
        if job.wait_for("another save", lambda: job.acknowledged >= step):
            self._save_s = min(2.0, max(0.02, time.monotonic() - began))
            job.wait_for("the next save", lambda: job.begun > step)
        time.sleep(self._chance.random() * 1.2 * self._save_s)

    def _say(self, what: str) -> None:
        self.log.append(f"{time.monotonic() - self._began:.2f} s, round {self.counts['rounds']}: {what}")

    # ---- accidents -------------------------------------------------------------------------------------------------

    def _a_rank_is_killed(self, job: Job, mode: str) -> None:
        self._kill_one(job, self._chance.randrange(1, job.world))

    def _the_coordinator_is_killed(self, job: Job, mode: str) -> None:
        self._kill_one(job, 0)

    def _kill_one(self, job: Job, victim: int) -> None:
        job.kill(victim)
        if self._chance.random() < 0.5:
            return
        # Every survivor has an error, and ends by itself.
        job.wait_for("the end of the survivors", lambda: job.over)
        survivors = [rank for rank in range(job.world) if rank != victim]
        self.counts["survivors that had an error in time"] += len(survivors)
        assert len(job.failures) >= len(survivors), job.crew.words
        if any(f"rank {victim}" in failure["failed"] for failure in job.failures):
            self.counts["an error that names who was killed"] += 1

    def _the_job_is_killed(self, job: Job, mode: str) -> None:
        job.kill(*range(job.world))

    def _the_target_is_killed(self, job: Job, mode: str) -> None:
        self._restart()
        step = job.begun
        if job.wait_for("a save behind the restart", lambda: job.acknowledged > step):
            self.counts["went on behind a restart of the target"] += 1

    def _target_and_job_are_killed(self, job: Job, mode: str) -> None:
        self.target.server.process.kill()
        job.kill(*range(job.world))
        self._restart()

    def _the_target_is_killed_while_a_job_begins(self, job: Job, mode: str) -> None:
        job.kill(*range(job.world))
        after = self._begin(mode)
        time.sleep(self._chance.random() * 4 * MISSED * BEAT_S)
        self._restart()
        if self._chance.random() < 0.5:
            after.wait_for("a save", lambda: after.acknowledged)

    def _a_rank_is_stopped_for_a_moment(self, job: Job, mode: str) -> None:
        job.stop(self._chance.randrange(job.world))
        time.sleep(self._chance.random() * STALL_S / 2)
        job.wake()
        step = job.begun
        if job.wait_for("a save behind it", lambda: job.acknowledged > step):
            self.counts["went on behind a moment's stop"] += 1

    def _a_rank_is_stopped_for_long(self, job: Job, mode: str) -> None:
        job.stop(self._chance.randrange(job.world))
        time.sleep(STALL_S * (1 + self._chance.random()))
        job.wake()
        step = job.begun
        if job.wait_for("a save behind it", lambda: job.acknowledged > step):
            self.counts["went on behind a long stop"] += 1

    def _another_job_takes_over(self, job: Job, mode: str) -> None:
        """Of one that is stopped, and wakes up behind the other's first commit."""
        job.stop(*(range(job.world) if self._chance.random() < 0.7 else [0]))
        job.hear(0)
        history = self._histories[mode]
        after = self._begin(mode)
        if not after.wait_for("a save", lambda: after.acknowledged):
            return
        self.counts["taken over"] += 1
        # Of whichever rank was heard first: that rank 0 has restored may still be in its pipe.
        before, successors = job.acknowledged, next(iter(after.restored.values()))
        job._history = History()
        job.wake()
        # It has not heard yet that what it was writing is committed: its successor found that, or it must not hear it.
        job.wait_for("the end of who was stopped", lambda: job.over)
        assert job.acknowledged == before or (job.acknowledged, job.number) == successors, (
            f"job {job.number} was told behind a takeover that step {job.acknowledged} is committed; "
            f"its successor found {successors}"
        )
        assert history.acknowledged[1] == after.number

    def _restart(self) -> None:
        self.target.kill()
        self.counts["target killed"] += 1
        if self._chance.random() < 0.3:
            time.sleep(self._chance.random())
        self.target.start()

    # ---- what must hold --------------------------------------------------------------------------------------------

    def _verify(self, mode: str) -> None:
        with Volume.open(self.target.uris(), write=True) as volume:
            if self._chance.random() < 0.2:
                # What was in doubt is decided, and everything is looked at.
                with volume.session("verify", takeover="if-dead", heartbeat_s=BEAT_S, missed_beats=MISSED):
                    pass
                report = scrub(volume.devices)
                assert report.clean, f"scrub: {'; '.join(map(str, report.findings[:3]))}"
                self.counts["scrubbed"] += 1
            kept = [each.step for each in list_checkpoints(volume, mode)]
            for step in kept:
                self._compare(volume, mode, step)
                self.counts["checkpoints compared"] += 1

    def _compare(self, volume: Volume, mode: str, step: int) -> None:
        names = {f"{name}{of}": length for name, length in (("w", SHARDED), ("r", REPLICATED)) for of in MOMENTS}
        flat = {name: torch.zeros(length) for name, length in names.items()}
        into = flat if mode == "writer" else _as_of_a_checkpointer(flat)
        with VolumeReader(volume, f"{mode}/step-{step}") as reader:
            reader.load(into)
        found = tuple(int(number) for number in flat["r"][:2])
        assert found[0] == step, f"{mode}/step-{step} holds step {found[0]}"
        for name, tensor in flat.items():
            assert torch.equal(tensor, content(name, *found, 0, len(tensor))), f"{name} of {mode}/step-{step}"


MOMENTS = ("", ".exp_avg", ".exp_avg_sq")

#: And how often, among all.
ACCIDENTS = {
    "a rank is killed": 4,
    "the coordinator is killed": 4,
    "the job is killed": 3,
    "the target is killed": 5,
    "target and job are killed": 3,
    "the target is killed while a job begins": 2,
    "a rank is stopped for a moment": 2,
    "a rank is stopped for long": 1,
    "another job takes over": 3,
}


def _as_of_a_checkpointer(flat: dict[str, torch.Tensor]) -> dict[str, Any]:
    moments: dict[str, Any] = {}
    for name, tensor in flat.items():
        if "." in name:
            parameter, _, moment = name.partition(".")
            moments.setdefault(parameter, {})[moment] = tensor
    return {"model": {"w": flat["w"], "r": flat["r"]}, "optimizer": {"state": moments}}


__all__ = ["ACCIDENTS", "History", "Rounds"]
