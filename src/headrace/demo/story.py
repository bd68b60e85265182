"""Everything that happened in one run of the demo, as data: the summary, the page and the tests read from here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.accidents.target import Life
from headrace.demo.compare import Comparison
from headrace.demo.events import Event
from headrace.demo.options import DemoOptions
from headrace.measure import StepRecord, Summary, Verdict, summarise
from headrace.measure.summary import JobStep, join_ranks


def ranks(count: int) -> str:
    """ "1 rank", "2 ranks"."""
    return f"{count} rank" if count == 1 else f"{count} ranks"


@dataclass
class Phase:
    """One launch of the trainer."""

    name: str
    ranks: int
    began: float
    ended: float = 0.0
    records: list[StepRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def steps(self) -> list[JobStep]:
        return join_ranks(self.records)

    def find(self, event: str, step: int | None = None, rank: int | None = None) -> Event | None:
        """The first such event."""
        for candidate in self.events:
            if (
                candidate.event == event
                and (step is None or candidate.step == step)
                and (rank is None or candidate.rank == rank)
            ):
                return candidate
        return None


@dataclass(frozen=True, kw_only=True)
class Outage:
    """Fault 1: the target was killed while a checkpoint was being written."""

    #: Of the checkpoint that was under way.
    step: int
    killed: float
    #: When it accepted connections again.
    back: float
    #: When the checkpoint under way had its end: hosts have reconnected, and what was lost is written again.
    recovered: float
    #: The checkpoint became visible, whole; else it was given up, whole.
    committed: bool
    #: Bytes that ranks wrote a second time, because the first copy may have died unflushed.
    rewritten_bytes: int

    @property
    def seconds(self) -> float:
        return self.back - self.killed


@dataclass(frozen=True, kw_only=True)
class RankKill:
    """Fault 2: a rank was killed while a checkpoint was being written."""

    step: int
    rank: int
    killed: float
    #: The checkpoint had become visible already when the kill came.
    committed: bool
    #: Checkpoints that the volume held afterwards.
    checkpoints: list[int]
    #: Objects under the name of the checkpoint that was under way, which the volume showed afterwards.
    visible_objects: int

    @property
    def resume_step(self) -> int:
        return self.checkpoints[-1]


@dataclass
class Story:
    options: DemoOptions
    began: float
    environment: dict[str, str] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)
    volume: dict[str, Any] = field(default_factory=dict)
    corpus: str = ""
    ingest_s: float = 0.0
    token_count: int = 0
    token_bytes: int = 0
    vocabulary: int = 0
    parameters: int = 0
    device: str = "cpu"
    parallel: str = "fsdp2"
    first: Phase | None = None
    resumed: Phase | None = None
    reference: Phase | None = None
    outages: list[Outage] = field(default_factory=list)
    rank_kill: RankKill | None = None
    comparison: Comparison | None = None
    model: dict[str, Any] = field(default_factory=dict)
    ended: float = 0.0

    # ---- what it cost ----------------------------------------------------------------------------------------------

    def job_steps(self) -> list[JobStep]:
        """Both phases of the disturbed run, in time order."""
        return [step for phase in (self.first, self.resumed) if phase is not None for step in phase.steps()]

    def summary(self) -> Summary:
        return summarise(self.job_steps(), self.options.gpu_hour_price)

    def undisturbed(self) -> Summary:
        """Without the steps between the death of the target and the recovery: those are the demo's doing."""
        steps = self.job_steps()
        calm = [step for step in steps if not self._in_outage(step)]
        return summarise(calm or steps, self.options.gpu_hour_price)

    def _in_outage(self, step: JobStep) -> bool:
        return any(step.started_s <= o.recovered and step.started_s + step.total_s >= o.killed for o in self.outages)

    def verdict(self) -> Verdict:
        accelerator = "GPU" if self.device == "cuda" else "training"
        return self.undisturbed().verdict(token_bytes=self.token_bytes or None, accelerator=accelerator)

    def outage_stall_s(self) -> float:
        """How long training waited for storage from the death of the target to the recovery, seconds of wall time."""
        return sum(step.data_wait_s + step.checkpoint_s for step in self.job_steps() if self._in_outage(step))

    def recovery_s(self) -> float | None:
        """From the kill of a rank to the end of the first step after it: noticed, started, restored, one step."""
        if self.rank_kill is None or self.resumed is None or not self.resumed.records:
            return None
        first = min(self.resumed.records, key=lambda record: record.started_s)
        return first.started_s + first.total_s - first.restart_s - self.rank_kill.killed

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def saves(self) -> list[dict[str, Any]]:
        """One row for each checkpoint that was begun: what became of it, in seconds and bytes, over all ranks."""
        rows = []
        for phase in (self.first, self.resumed):
            if phase is None:
                continue
            for begun in (e for e in phase.events if e.event == "save-begun" and e.rank == 0):
                done = [e for e in phase.events if e.event == "save-committed" and e.step == begun.step]
                staged = [
                    e.details["seconds"] for e in phase.events if e.event == "save-staged" and e.step == begun.step
                ]
                coordinator = next((e for e in done if e.rank == 0), None)
                rows.append(
                    {
                        "phase": phase.name,
                        "step": begun.step,
                        "begun": begun.t,
                        "ended": coordinator.t if coordinator else None,
                        "committed": coordinator is not None,
                        "staged_s": max(staged, default=None),
                        "seconds": coordinator.details["seconds"] if coordinator else None,
                        "bytes": coordinator.details["total_bytes"] if coordinator else None,
                        "rewritten_bytes": sum(e.details["rewritten_bytes"] for e in done),
                    }
                )
        return rows

    def restore(self) -> dict[str, Any] | None:
        event = None if self.resumed is None else self.resumed.find("restored", rank=0)
        return None if event is None else {"step": event.step, "seconds": event.details["seconds"]}

    # ---- the proof -------------------------------------------------------------------------------------------------

    def outage_holds(self, outage: Outage) -> bool:
        """Training went on after it, and the volume shows the checkpoint exactly when training was told so."""
        if self.first is None or self.rank_kill is None:
            return False
        # Begun after the target was back: a later checkpoint, for which it takes the steps between.
        went_on = any(
            e.event == "write-begun" and e.step > outage.step and e.t > outage.back for e in self.first.events
        )
        return went_on and outage.committed == (outage.step in self.rank_kill.checkpoints)

    def rank_kill_holds(self) -> bool:
        """Nothing of an unfinished checkpoint is to be seen, and the job went on from the last committed one."""
        kill, restored = self.rank_kill, self.restore()
        if kill is None or restored is None:
            return False
        return kill.committed == (kill.visible_objects > 0) and restored["step"] == kill.resume_step

    def holds(self) -> bool:
        """Everything that the demo sets out to show was shown."""
        return (
            bool(self.outages)
            and all(self.outage_holds(outage) for outage in self.outages)
            and self.rank_kill_holds()
            and self.comparison is not None
            and self.comparison.holds
            and bool(self.model.get("headrace_bitwise"))
            and bool(self.model.get("safetensors_bitwise"))
        )

    def to_json(self) -> dict[str, Any]:
        comparison = self.comparison
        return {
            "holds": self.holds(),
            "seconds": self.ended - self.began,
            "verdict": self.verdict().to_json(),
            "summary": self.summary().to_json(),
            "undisturbed": self.undisturbed().to_json(),
            "environment": self.environment,
            "volume": self.volume,
            "dataset": {
                "corpus": self.corpus,
                "ingest_s": self.ingest_s,
                "token_count": self.token_count,
                "token_bytes": self.token_bytes,
                "vocabulary": self.vocabulary,
            },
            "training": {
                "parameters": self.parameters,
                "device": self.device,
                "parallel": self.parallel,
                "steps": self.options.step_count,
                "ranks": self.options.ranks,
                "resume_ranks": self.options.resume_ranks,
            },
            "outages": [asdict(outage) | {"seconds": outage.seconds} for outage in self.outages],
            "outage_stall_s": self.outage_stall_s(),
            "rank_kill": None
            if self.rank_kill is None
            else asdict(self.rank_kill) | {"resume_step": self.rank_kill.resume_step, "recovery_s": self.recovery_s()},
            "saves": self.saves(),
            "restore": self.restore(),
            "comparison": None
            if comparison is None
            else asdict(comparison)
            | {
                "samples_equal": comparison.samples_equal,
                "losses_bitwise": comparison.losses_bitwise,
                "losses_within_tolerance": comparison.losses_within_tolerance,
            },
            "model": self.model,
        }
