"""One line of JSON a step and rank: what the step clock writes, and what everything that reports reads.

    {"rank": 0, "step": 7, "started_s": 1735689600.123, "data_wait_s": 0.0004, "compute_s": 0.41,
     "checkpoint_s": 0.03, "restart_s": 0.0, "tokens": 2048, "notes": {"loss": 4.21}}

The four times add up to the wall time of the step; nothing is in two of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import UsageError

#: In the order in which they are drawn. `restart`: restoring from storage before the first step of a process.
CATEGORIES = ("data_wait", "compute", "checkpoint", "restart")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of one rank. Times in seconds; `started_s` on the system's clock, to lay ranks side by side."""

    rank: int
    step: int
    started_s: float
    data_wait_s: float
    compute_s: float
    checkpoint_s: float = 0.0
    restart_s: float = 0.0
    #: Tokens this rank consumed in the step; 0 where the loop does not say.
    tokens: int = 0
    #: Whatever the loop wants to keep with the step (loss, hash of the inputs); JSON values.
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("data_wait_s", "compute_s", "checkpoint_s", "restart_s", "tokens"):
            if getattr(self, name) < 0:
                raise UsageError(f"StepRecord.{name}", expected="a number >= 0", found=str(getattr(self, name)))

    @property
    def total_s(self) -> float:
        """Wall time of the step."""
        return self.data_wait_s + self.compute_s + self.checkpoint_s + self.restart_s

    @property
    def storage_s(self) -> float:
        """The part of it in which this rank waited for storage."""
        return self.data_wait_s + self.checkpoint_s + self.restart_s

    def to_line(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str) -> StepRecord:
        """Raises `UsageError` for anything that is not a record."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise UsageError("not a step record", expected="a JSON line of a step clock", found=line[:80]) from error


def read_records(path: str | Path) -> Iterator[StepRecord]:
    """The records of one file. A torn last line (its writer was killed) is left out; damage elsewhere is an error."""
    text = Path(path).read_text(encoding="utf-8")
    lines = text.split("\n")
    complete, torn = lines[:-1], lines[-1]
    for line in complete:
        if line:
            yield StepRecord.from_line(line)
    if torn:
        try:
            yield StepRecord.from_line(torn)
        except UsageError:
            return


def write_records(path: str | Path, records: Iterable[StepRecord]) -> None:
    Path(path).write_text("".join(record.to_line() + "\n" for record in records), encoding="utf-8")
