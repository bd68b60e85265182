"""Ranks put together: what the job spent, and the verdict.

Training ranks go in step: a collective ends when the slowest rank arrives. A rank that waits for its data makes all
others wait too, and theirs looks like compute in their own records. So a step's storage time is, in each category, the
*longest* that any of its ranks waited, and every rank pays it. Two limits: ranks that wait for different things at the
same time are counted twice; ranks that wait for the same thing one after the other inside one step, with a collective
between them, are counted once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from headrace.errors import UsageError
from headrace.measure import arithmetic, statistics
from headrace.measure.records import StepRecord
from headrace.units import format_bytes, format_seconds

#: Below this share of accelerator time spent waiting for data, feeding is called "not the bottleneck".
FEED_THRESHOLD = 0.02


@dataclass(frozen=True, kw_only=True)
class JobStep:
    """One step over all its ranks; seconds. `compute_s` is what is left of the longest rank's wall time."""

    step: int
    started_s: float
    ranks: int
    data_wait_s: float
    compute_s: float
    checkpoint_s: float
    restart_s: float
    tokens: int

    @property
    def total_s(self) -> float:
        return self.data_wait_s + self.compute_s + self.checkpoint_s + self.restart_s


def join_ranks(records: Iterable[StepRecord]) -> list[JobStep]:
    """Records of all ranks of one run (each step once, but for what came after the last) -> its steps in time order."""
    by_step: dict[int, dict[int, list[StepRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        by_step[record.step][record.rank].append(record)
    steps = []
    for number, ranks in by_step.items():
        waits = {
            name: max(sum(getattr(r, f"{name}_s") for r in rows) for rows in ranks.values())
            for name in ("data_wait", "checkpoint", "restart")
        }
        wall = max(sum(r.total_s for r in rows) for rows in ranks.values())
        every = [r for rows in ranks.values() for r in rows]
        steps.append(
            JobStep(
                step=number,
                started_s=min(r.started_s for r in every),
                ranks=len(ranks),
                data_wait_s=waits["data_wait"],
                compute_s=max(0.0, wall - sum(waits.values())),
                checkpoint_s=waits["checkpoint"],
                restart_s=waits["restart"],
                tokens=sum(r.tokens for r in every),
            )
        )
    return sorted(steps, key=lambda step: (step.started_s, step.step))


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A job's accelerator time, in seconds of all ranks together (`*_gpu_s`), and per step (`*_s`, quantiles)."""

    steps: int
    tokens: int
    wall_s: float
    total_gpu_s: float
    data_wait_gpu_s: float
    compute_gpu_s: float
    checkpoint_gpu_s: float
    restart_gpu_s: float
    step_p50_s: float
    step_p99_s: float
    data_wait_p50_s: float
    data_wait_p99_s: float
    #: Dollars an accelerator hour; None: nobody said, so no dollars are shown.
    gpu_hour_price: float | None = None

    @property
    def data_wait_share(self) -> float:
        return statistics.share(self.data_wait_gpu_s, self.total_gpu_s)

    @property
    def checkpoint_share(self) -> float:
        return statistics.share(self.checkpoint_gpu_s, self.total_gpu_s)

    @property
    def restart_share(self) -> float:
        return statistics.share(self.restart_gpu_s, self.total_gpu_s)

    @property
    def storage_gpu_s(self) -> float:
        return self.data_wait_gpu_s + self.checkpoint_gpu_s + self.restart_gpu_s

    @property
    def storage_share(self) -> float:
        return statistics.share(self.storage_gpu_s, self.total_gpu_s)

    @property
    def tokens_per_s(self) -> float:
        return 0.0 if self.wall_s <= 0 else self.tokens / self.wall_s

    def verdict(self, *, token_bytes: int | None = None, accelerator: str = "accelerator") -> Verdict:
        """`token_bytes`: the job is fed with tokens of this size, and the verdict says what feeding demanded."""
        return _judge(self, token_bytes, accelerator)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "data_wait_share": self.data_wait_share,
            "checkpoint_share": self.checkpoint_share,
            "restart_share": self.restart_share,
            "storage_gpu_s": self.storage_gpu_s,
            "storage_share": self.storage_share,
            "tokens_per_s": self.tokens_per_s,
        }


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One sentence, and the figures it was made from."""

    sentence: str
    storage_share: float
    storage_gpu_s: float
    storage_dollars: float | None
    #: True where data wait stayed below `threshold`.
    feeding_is_fine: bool
    threshold: float = FEED_THRESHOLD

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(records: Iterable[StepRecord] | Iterable[JobStep], gpu_hour_price: float | None = None) -> Summary:
    """One run's records of all ranks (or steps that were joined already, of several runs one after the other).

    Raises `UsageError` when there are none, or for a negative price.
    """
    rows = list(records)
    if not rows:
        raise UsageError("no steps to summarise", expected="the records of at least one step")
    if gpu_hour_price is not None:
        arithmetic.dollars(0.0, gpu_hour_price)
    steps = join_ranks(r for r in rows if isinstance(r, StepRecord)) + [r for r in rows if isinstance(r, JobStep)]
    walls = [step.total_s for step in steps]
    waits = [step.data_wait_s for step in steps]

    def pay(name: str) -> float:
        return sum(arithmetic.gpu_seconds(getattr(step, name), step.ranks) for step in steps)

    return Summary(
        steps=len(steps),
        tokens=sum(step.tokens for step in steps),
        wall_s=sum(walls),
        total_gpu_s=pay("total_s"),
        data_wait_gpu_s=pay("data_wait_s"),
        compute_gpu_s=pay("compute_s"),
        checkpoint_gpu_s=pay("checkpoint_s"),
        restart_gpu_s=pay("restart_s"),
        step_p50_s=statistics.p50(walls),
        step_p99_s=statistics.p99(walls),
        data_wait_p50_s=statistics.p50(waits),
        data_wait_p99_s=statistics.p99(waits),
        gpu_hour_price=gpu_hour_price,
    )


def _percent(value: float) -> str:
    return f"{value * 100:.1f} %" if value >= 0.001 or value == 0 else f"{value * 100:.2f} %"


def _judge(summary: Summary, token_bytes: int | None, accelerator: str) -> Verdict:
    price = summary.gpu_hour_price
    cost = None if price is None else arithmetic.dollars(summary.storage_gpu_s, price)
    fine = summary.data_wait_share < FEED_THRESHOLD
    parts = [
        f"data wait {_percent(summary.data_wait_share)}",
        f"checkpoint stall {_percent(summary.checkpoint_share)}",
    ]
    if summary.restart_gpu_s:
        parts.append(f"restore {_percent(summary.restart_share)}")
    sentence = (
        f"Storage cost {_percent(summary.storage_share)} of {accelerator} time ({', '.join(parts)}): "
        f"{format_seconds(summary.storage_gpu_s)} of {format_seconds(summary.total_gpu_s)}"
    )
    if cost is not None and price is not None:
        amount = f"${cost:.2f}" if cost >= 0.01 else f"${cost:.4f}"
        sentence += f", {amount} at ${price:g} an hour"
    demand = ""
    if token_bytes is not None:
        rate = arithmetic.feed_demand_bytes_per_s(summary.tokens, token_bytes, summary.wall_s)
        demand = f", which needed {format_bytes(rate)}/s of tokens"
    threshold = _percent(FEED_THRESHOLD)
    if fine:
        sentence += f". Storage is not the bottleneck for feeding this job{demand} (data wait is under {threshold})."
    else:
        sentence += f". Feeding does hold this job up{demand} (data wait is not under {threshold})."
    return Verdict(
        sentence=sentence,
        storage_share=summary.storage_share,
        storage_gpu_s=summary.storage_gpu_s,
        storage_dollars=cost,
        feeding_is_fine=fine,
    )
