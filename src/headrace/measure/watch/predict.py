"""What the same loop would do with other storage, and how sure that is.

Three runs of one loop (DS-Analyzer's method): with data out of memory that need no preparation (a step takes `S`), from
a warm cache (`C`: preparation besides), from storage (`D`: reads besides). Storage that gives `x` bytes a second needs
`F = bytes / x` for a step. How far reads are hidden behind the rest depends on the loader, and is between two ends:

    as far as can be: it reads ahead      T = max(C, F)
    not at all: it reads when it is asked T = C + F

Utilisation is the share of a step that computes, `S / T`, as MLPerf Storage's AU counts it. The error is that of the
means, from the spread of blocks of steps; near `F = C`, where the one or the other ends a step, that of the blocks
themselves; and the distance of the two ends, where it is not known how the loader reads.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from headrace.errors import UsageError
from headrace.measure.watch.verdict import percent
from headrace.units import format_rate, format_seconds

#: Blocks of steps whose means are compared: neighbouring steps depend on each other, blocks of them hardly.
BLOCKS = 10
#: 95 % of a normal distribution; with ten blocks the t distribution's.
STUDENT = 2.26


@dataclass(frozen=True, kw_only=True)
class Mean:
    """Of steps, seconds. `error_s`: half the width of the interval in which the mean is with 95 %."""

    steps: int
    mean_s: float
    error_s: float
    #: Standard deviation of the means of blocks.
    spread_s: float = 0.0

    @classmethod
    def of(cls, walls: Sequence[float]) -> Mean:
        """`UsageError` for fewer than two steps."""
        if len(walls) < 2:
            raise UsageError("too few steps to say anything of them", expected="2 or more", found=str(len(walls)))
        blocks = min(BLOCKS, len(walls))
        bounds = [len(walls) * number // blocks for number in range(blocks + 1)]
        means = [statistics.fmean(walls[low:high]) for low, high in pairwise(bounds)]
        spread = statistics.stdev(means)
        # Of fewer blocks less is known.
        factor = STUDENT * BLOCKS / blocks / math.sqrt(blocks)
        return cls(steps=len(walls), mean_s=statistics.fmean(walls), error_s=factor * spread, spread_s=spread)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Utilisation from 0 to 1 with storage of this rate; it is in `low`..`high`."""

    rate_bytes_per_s: float
    utilisation: float
    low: float
    high: float

    @property
    def sentence(self) -> str:
        rate = format_rate(self.rate_bytes_per_s)
        points = max(self.high - self.utilisation, self.utilisation - self.low) * 100
        return (
            f"With storage of {rate} utilisation would be {percent(self.utilisation)} (within {points:.1f} points: "
            f"{percent(self.low)} to {percent(self.high)})."
        )


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """Seconds a step by subtraction, and what follows."""

    synthetic: Mean
    cached: Mean
    storage: Mean
    #: Of a step, read from storage; 0: not known.
    step_bytes: float = 0.0
    #: 1: reads are hidden behind the rest as far as can be; 0: not at all; None: not known.
    overlap: float | None = None

    @property
    def preparation_s(self) -> float:
        return max(0.0, self.cached.mean_s - self.synthetic.mean_s)

    @property
    def preparation_error_s(self) -> float:
        return math.hypot(self.cached.error_s, self.synthetic.error_s)

    @property
    def fetch_s(self) -> float:
        return max(0.0, self.storage.mean_s - self.cached.mean_s)

    @property
    def fetch_error_s(self) -> float:
        return math.hypot(self.storage.error_s, self.cached.error_s)

    @property
    def utilisation(self) -> float:
        """From storage, as it was measured."""
        return min(1.0, self.synthetic.mean_s / self.storage.mean_s)

    @property
    def measured_rate(self) -> float | None:
        """Bytes a second that storage gave, where the loop waited for it and it is known how the loader reads."""
        if (
            not self.step_bytes
            or self.overlap is None
            or self.fetch_s <= max(self.fetch_error_s, 0.05 * self.storage.mean_s)
        ):
            return None
        return self.step_bytes / (self.fetch_s + self.overlap * (self.storage.mean_s - self.fetch_s))

    def predict(self, rate_bytes_per_s: float) -> Prediction:
        """With storage that gives so many bytes a second to this rank. `UsageError` where the bytes of a step are not
        known."""
        if not self.step_bytes > 0:
            raise UsageError(
                "it is not known how many bytes a step reads", expected="batch_bytes= of Watch.loader, or --step-bytes"
            )
        if not rate_bytes_per_s > 0:
            raise UsageError("the rate of storage", expected="more than 0", found=str(rate_bytes_per_s))
        read, base = self.step_bytes / rate_bytes_per_s, self.cached
        hidden, plain = max(base.mean_s, read), base.mean_s + read
        ends = (hidden, plain) if self.overlap is None else (plain + (hidden - plain) * self.overlap,)
        # Where reads decide how long a step takes, how long the rest does is of no account.
        decides = read > base.mean_s and self.overlap == 1
        error = 0.0 if decides else base.error_s
        if abs(read - base.mean_s) < 2 * base.spread_s:
            error = math.hypot(error, base.spread_s)
        low = _share(self.synthetic.mean_s - self.synthetic.error_s, max(ends) + error)
        high = _share(self.synthetic.mean_s + self.synthetic.error_s, min(ends) - error)
        middle = _share(self.synthetic.mean_s, sum(ends) / len(ends))
        return Prediction(
            rate_bytes_per_s=rate_bytes_per_s, utilisation=middle, low=min(low, middle), high=max(high, middle)
        )

    @property
    def sentence(self) -> str:
        total = self.storage.mean_s
        stalls = {
            "fetch": (self.fetch_s, self.fetch_error_s),
            "preparation": (self.preparation_s, self.preparation_error_s),
        }
        told = [
            f"{name} stall {percent(stall / total)} of a step ({format_seconds(stall)} ± {format_seconds(error)})"
            for name, (stall, error) in stalls.items()
        ]
        if self.fetch_s <= max(self.fetch_error_s, 0.02 * total):
            verdict = "Storage is not your problem"
            if self.preparation_s > max(self.preparation_error_s, 0.02 * total):
                verdict += ": preparation is"
        elif self.fetch_s >= self.preparation_s:
            verdict = "Storage is your problem"
        else:
            verdict = "Preparation is your problem, and storage besides"
        text = f"{verdict}: {', '.join(told)}; utilisation {percent(self.utilisation)}"
        if self.measured_rate is not None:
            text += f", with {format_rate(self.measured_rate)} from storage"
        return f"{text}."

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "preparation_s": self.preparation_s, "preparation_error_s": self.preparation_error_s,
            "fetch_s": self.fetch_s, "fetch_error_s": self.fetch_error_s, "utilisation": self.utilisation,
            "measured_rate": self.measured_rate, "sentence": self.sentence,
        }  # fmt: skip


def _share(part_s: float, whole_s: float) -> float:
    return 1.0 if whole_s <= 0 else min(1.0, max(0.0, part_s / whole_s))
