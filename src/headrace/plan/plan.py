"""The whole plan: every question answered from one job, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import UsageError
from headrace.plan import goodput, money, network, units
from headrace.plan.catalogue import Offering
from headrace.plan.checkpoint import Checkpoints
from headrace.plan.cures import Cure, Goals, cures
from headrace.plan.feeding import Feeding
from headrace.plan.fields import FIELDS
from headrace.plan.job import Job, Value
from headrace.plan.model import Model
from headrace.plan.quantities import Answer, Question, Range
from headrace.plan.situation import Shares, Situation
from headrace.plan.situation import goodput as trains
from headrace.plan.storage import Storage
from headrace.plan.verdict import Verdict, judge

PARTS = {
    "data_wait": "waiting for data", "saves": "saves", "rework": "work done again after failures",
    "restarts": "restarts",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Plan:
    job: Job
    model: Model
    #: Full ones: of 9 GPUs, 8 to a node, 1.125.
    nodes: Range
    storage: Storage
    questions: tuple[Question, ...]
    #: By the names of `goodput.SYMBOLS`.
    ranges: dict[str, Range]
    goodput: Answer
    verdict: Verdict
    #: Every change that wins something, also those that are not worth the while.
    cures: tuple[Cure, ...]
    shares: Shares
    provider: str | None

    @property
    def assumed(self) -> list[tuple[str, Value, str]]:
        """Key, value and source of everything that was not said."""
        skip = {f"storage.{way}" for way in ("read", "write") if way not in self.storage.assumed}
        samples = self.job.has("feed.samples_per_s") and not self.job.has("feed.tokens_per_s")
        if samples or self.job.has("feed.tokens_per_s"):
            skip |= {"feed.achieved"}
        if samples:
            skip |= {"feed.sequence", "feed.token_bytes"}
        if self.job.has("failures.mtbf"):
            skip.add("failures.gpu_hours")
        return self.job.assumed(field.key for field in FIELDS if field.key not in skip)

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict.to_json(),
            "provider": self.provider,
            "goodput": self.goodput.value.to_json(),
            "questions": [question.to_json() for question in self.questions],
            "assumed": [
                {"key": key, "value": value.to_json() if isinstance(value, Range) else value, "source": source}
                for key, value, source in self.assumed
            ],
        }


def make_plan(job: Job, offering: Offering | None = None) -> Plan:
    """Raises `UsageError` where the job lacks something, or asks for what cannot be meant."""
    try:
        return _make_plan(job, offering)
    except (OverflowError, ZeroDivisionError):
        raise UsageError(
            "these figures do not go together", expected="a job whose sizes, rates and times are of this world"
        ) from None


def _make_plan(job: Job, offering: Offering | None) -> Plan:
    model = Model.of(job)
    per_node = job.whole("gpus_per_node")
    # A last node that is not full does less: as many full ones would carry it all as what each of the others carries.
    nodes = Range.point(model.gpus / min(model.gpus, per_node), units.NODES)
    gpus = Range.point(model.gpus, units.GPUS)
    storage = Storage.of(job, nodes, gpus, offering)
    feeding = Feeding(job, model, nodes)
    checkpoints = Checkpoints(job, model, nodes, read=storage.read, write=storage.write)
    kinds = {"synchronous": checkpoints.synchronous, "given_interval": checkpoints.interval is not None}
    ranges = {
        "needed": feeding.in_all, "read rate": storage.read, "write rate": storage.write, "size": checkpoints.size,
        "share of a rank": checkpoints.share, "copy rate": checkpoints.copy, "mtbf": checkpoints.mtbf,
        "restart bytes": checkpoints.restart_bytes, "other": checkpoints.other,
    }  # fmt: skip
    if checkpoints.interval is not None:
        ranges["interval"] = checkpoints.interval
    put = goodput.put(ranges, **kinds)
    formulas = goodput.formulas(**kinds)
    answers = {name: formula.put(put) for name, formula in formulas.items()}
    share = answers["storage"].value
    goals = Goals(
        lost=checkpoints.lost.likely, part=checkpoints.part.likely,
        restart_s=None if checkpoints.restart_goal is None else checkpoints.restart_goal.likely,
    )  # fmt: skip
    found = cures(ranges, goals, nodes=nodes.likely, **kinds)
    cost = money.question(job, size=checkpoints.size, gpus=gpus, share=share, load=checkpoints.load.value)
    here = goodput.situation({name: value.likely for name, value in put.items()}, synchronous=kinds["synchronous"])
    now, ideal = here.shares(), here.over_ideal_storage().shares()
    verdict = judge(
        share, [(text, getattr(now, name) - getattr(ideal, name)) for name, text in PARTS.items()], found,
        lost=goals.lost, over=storage.over, unmet=_unmet(checkpoints, storage), nowhere=_nowhere(here),
        money=next((answer for answer in cost.answers if answer.formula is money.IDLE), None),
    )  # fmt: skip
    wires = network.question(
        job, nodes, reading=feeding.in_all, writing=checkpoints.write_needed.value,
        restarting=checkpoints.read_needed.value,
    )  # fmt: skip
    lost = Question(
        name="goodput", title="How much of the time trains?",
        answers=(answers["goodput"], answers["storage"], *(answers[name] for name in PARTS)),
        note="" if job.has("failures.other") else "a restart counts for what it loads alone: see failures.other",
    )  # fmt: skip
    return Plan(
        job=job, model=model, nodes=nodes, storage=storage, ranges=ranges, goodput=answers["goodput"],
        questions=(
            model.question(), storage.question(), feeding.question(storage.read), *checkpoints.questions(), wires,
            lost, cost,
        ),
        verdict=verdict, cures=tuple(found), shares=now, provider=offering.key if offering else None,
    )  # fmt: skip


def _nowhere(here: Situation) -> str:
    """Why nothing trains over storage that takes no time, either; empty where something does."""
    if trains(here.over_ideal_storage()) > 0:
        return ""
    if here.interval_s is None or trains(replace(here, interval_s=None).over_ideal_storage()) <= 0:
        return "Failures leave no time to train, whatever the storage."
    every = units.show(here.interval_s, units.SECONDS)
    return f"With a save only every {every} failures leave no time to train, whatever the storage."


def _unmet(checkpoints: Checkpoints, storage: Storage) -> list[str]:
    unmet = []
    if storage.ends_with_node:
        unmet.append("Saves would go to local disks, which end with their node: they want another place.")
    goal, load = checkpoints.restart_goal, checkpoints.load.value
    if goal is not None and load.likely > goal.likely:
        rate = checkpoints.read_needed.value
        unmet.append(f"A restart loads for {load}, not in {goal}: that takes storage that delivers {rate} in all.")
    interval, committed = checkpoints.interval, checkpoints.committed.value
    if interval is not None and committed.likely > interval.likely:
        rate = checkpoints.write_needed.value
        unmet.append(
            f"A save every {interval} cannot be: one is committed after {committed}; that takes storage that takes "
            f"{rate} in all."
        )
    return unmet
