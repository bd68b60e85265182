"""What `headrace demo` can be told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UsageError
from headrace.units import GIB, MIB


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the job is. A step trains on `global_batch` x `sequence` tokens."""

    width: int
    heads: int
    layers: int
    sequence: int
    global_batch: int
    micro_batch: int
    vocabulary: int
    #: Of the default corpus; a corpus that was given is taken whole.
    corpus_bytes: int
    #: Of any corpus, that a tokenizer is trained on.
    train_bytes: int
    steps: int
    save_every: int
    #: Each of the two namespaces; their files are sparse.
    namespace_bytes: int


FULL = Scale(
    width=192,
    heads=6,
    layers=4,
    sequence=128,
    global_batch=8,
    micro_batch=2,
    vocabulary=8192,
    corpus_bytes=24 * MIB,
    train_bytes=8 * MIB,
    steps=36,
    save_every=6,
    namespace_bytes=2 * GIB,
)
#: For tests: the same job, all of its faults, a model so small that steps cost little beside starting the processes.
SMALL = Scale(
    width=96,
    heads=3,
    layers=2,
    sequence=64,
    global_batch=8,
    micro_batch=2,
    vocabulary=2048,
    corpus_bytes=1 * MIB,
    train_bytes=1 * MIB,
    steps=20,
    save_every=4,
    namespace_bytes=512 * MIB,
)


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of one run of the demo; None means the default that the field describes."""

    #: Work there and leave everything; None: a temporary directory that is removed.
    keep: Path | None = None
    #: A folder of text, a .jsonl or a .parquet; None: the text of Python's standard library.
    corpus: Path | None = None
    #: A tokenizer.json; None: one is trained on the corpus.
    tokenizer: Path | None = None
    #: Training steps; None: the scale's.
    steps: int | None = None
    ranks: int = 2
    resume_ranks: int = 1
    #: Dollars an accelerator hour; None: no dollars are shown.
    gpu_hour_price: float | None = None
    small: bool = False
    report: Path = Path("demo-report.html")
    #: A summary in JSON on standard output; all else goes to standard error.
    json: bool = False

    def __post_init__(self) -> None:
        scale = self.scale
        for name in ("ranks", "resume_ranks"):
            ranks = getattr(self, name)
            most = scale.global_batch // scale.micro_batch
            if ranks < 1 or most % ranks:
                raise UsageError(
                    f"--{name.replace('_', '-')}",
                    expected=f"a divisor of {most} (micro batches in a global batch of {scale.global_batch})",
                    found=str(ranks),
                )
        # One checkpoint before the first fault, up to two outages, one rank killed, and one more to end with.
        least = 5 * scale.save_every
        if self.steps is not None and not least <= self.steps <= 100_000:
            raise UsageError(
                "--steps", expected=f"{least} to 100000 (a checkpoint every {scale.save_every})", found=str(self.steps)
            )
        if self.gpu_hour_price is not None and not 0 <= self.gpu_hour_price < math.inf:
            raise UsageError("--gpu-hour-price", expected="a price >= 0", found=str(self.gpu_hour_price))
        if self.corpus is not None and not self.corpus.exists():
            raise UsageError("the corpus does not exist", where=str(self.corpus), next_step="check --corpus")
        if self.tokenizer is not None and not self.tokenizer.is_file():
            raise UsageError("the tokenizer is not a file", where=str(self.tokenizer), next_step="check --tokenizer")
        if not self.report.parent.is_dir():
            raise UsageError("the report's directory does not exist", where=str(self.report.parent))
        if self.report.is_dir():
            raise UsageError("--report", expected="a file", found=f"the directory {self.report}")
        if self.keep is not None and self.keep.exists() and (not self.keep.is_dir() or any(self.keep.iterdir())):
            raise UsageError(
                "--keep", expected="an empty or new directory", found=str(self.keep), next_step="choose another"
            )

    @property
    def scale(self) -> Scale:
        return SMALL if self.small else FULL

    @property
    def step_count(self) -> int:
        return self.scale.steps if self.steps is None else self.steps
