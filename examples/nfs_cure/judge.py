"""Watch, bench and plan held against each other: what each says of a path, and where they do not agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.nfs_cure.inside import STARVED
from examples.nfs_cure.world import MEASURED, SAMPLES_PER_S, TOKEN_BYTES, TOKENS_PER_S, World
from headrace.measure.watch.join import attribute
from headrace.measure.watch.record import files_of
from headrace.measure.watch.verdict import problem, sentence
from headrace.plan import Plan, make_plan, read_job

#: Of AU, in points: as far as they may be apart.
POINTS = 5.0
#: How `Watch` begins where it does not see storage hold training up.
_WELL = ("Storage is not your", "No single thing is your problem", "What nobody marked is your problem")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One job over one path. AUs are shares of 1; rates are the cloud's, bytes a second."""

    job: str
    path: str
    rate: float
    bench_au: float
    plan_au: float
    #: As far as storage goes: a step without waiting for storage / a step.
    watch_au: float
    #: The share of the time that computes.
    whole_au: float
    #: The medium gave all that was handed out: none of it lay in a cache.
    cold: bool
    #: What `Watch` says that most was lost to; None: nothing worth a word.
    cause: str | None
    #: Of accelerator time, to storage and to what could be.
    storage_share: float
    starved_share: float
    watch_sentence: str
    plan_problem: str
    plan_sentence: str
    #: Points that the plan says another storage would give; 0: it says that nothing needs to change.
    plan_gain: float


def judge(world: World, measured: Sequence[Mapping[str, Any]], watched: Path) -> list[Row]:
    """`measured`: as `inside` printed it. `watched`: the folder with what `Watch` wrote."""
    rows = []
    for said in measured:
        job, path = said["job"], said["path"]
        found = attribute(files_of([watched / f"{job}-{path}"]))
        storage = found.storage_share + found.share("blocked")
        plan = make_plan_of(world, job, said["bytes_per_s"] * world.dilation)
        busy = next(answer for q in plan.questions if q.name == "feeding" for answer in q.answers[-1:])
        rows.append(
            Row(
                job=job,
                path=path,
                rate=said["bytes_per_s"] * world.dilation,
                bench_au=said["bench_au"],
                plan_au=busy.value.likely,
                watch_au=1 - storage,
                whole_au=found.share("compute"),
                cold=said["medium_bytes"] >= said["bytes"] and said["bench_medium_bytes"] >= said["bench_bytes"],
                cause=problem(found),
                storage_share=storage,
                starved_share=found.share("starved"),
                watch_sentence=sentence(found),
                plan_problem=plan.verdict.problem,
                plan_sentence=plan.verdict.sentence,
                plan_gain=100 * next((c.gain.value.likely for c in plan.verdict.cures if c.name == "read"), 0.0),
            )
        )
    return rows


def make_plan_of(world: World, job: str, rate: float) -> Plan:
    """What `headrace plan` says of the job in the cloud, over storage that gives this rate there."""
    said: dict[str, Any] = {
        "gpus": world.accelerators, "gpus_per_node": world.accelerators, "storage.read": rate, "storage.write": rate,
    }  # fmt: skip
    if job == "images":
        # ResNet-50.
        said |= {
            "model.parameters": 25.6e6, "feed.samples_per_s": SAMPLES_PER_S, "feed.sample_bytes": world.sample_bytes,
        }  # fmt: skip
    else:
        said |= {"model.parameters": 8.03e9, "feed.tokens_per_s": TOKENS_PER_S, "feed.token_bytes": TOKEN_BYTES}
    return make_plan(read_job(None, said))


def too_busy(rows: Sequence[Row]) -> str | None:
    """Why nothing can be said: the guest had no CPU, and that is what was measured."""
    starved = [f"{row.job} over {row.path} {row.starved_share:.0%}" for row in rows if row.starved_share > STARVED]
    return (
        f"the emulated CPU was lacking, for this machine is busy: {', '.join(starved)} of the time" if starved else None
    )


def disagreements(rows: Sequence[Row]) -> list[str]:
    """A sentence each; none: watch, bench and plan agree on cause, size and cure."""
    found = []
    by_name = {(row.job, row.path): row for row in rows}
    if list(by_name) != MEASURED:
        return [f"not measured: {sorted(set(MEASURED) - set(by_name))}"]
    for row in rows:
        where = f"{row.job} over {row.path}"
        if not row.cold:
            found.append(f"{where}: read from a cache, and not from the medium")
        for name, au in (("bench", row.bench_au), ("plan", row.plan_au)):
            if abs(au - row.watch_au) * 100 > POINTS:
                found.append(f"{where}: {name} says AU {au:.1%}, watch saw {row.watch_au:.1%}")
        if (row.job, row.path) != ("images", "nfs"):
            if row.cause in ("fetch", "blocked") or not row.watch_sentence.startswith(_WELL):
                found.append(f"{where}: watch says that it is storage ({row.watch_sentence})")
            if row.plan_problem != "no" or row.plan_gain:
                found.append(f"{where}: plan says that it is storage ({row.plan_sentence})")
    sick, cured = by_name["images", "nfs"], by_name["images", "nvme"]
    if sick.cause != "fetch":
        found.append(f"images over nfs: watch does not say that reads are waited for ({sick.watch_sentence})")
    if sick.plan_problem != "yes":
        found.append(f"images over nfs: plan does not say that it is storage ({sick.plan_sentence})")
    if not 0.3 <= sick.watch_au <= 0.9:
        found.append(f"images over nfs: AU {sick.watch_au:.1%} is no problem to be cured, or one beyond measure")
    gained = 100 * (cured.watch_au - sick.watch_au)
    if abs(gained - sick.plan_gain) > POINTS:
        found.append(f"the cure: plan says +{sick.plan_gain:.0f} points, {gained:+.0f} were seen over nvme")
    return found
