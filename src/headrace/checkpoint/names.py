"""What the objects of a checkpoint are called.

    RUN/step-NNNNNNNN/manifest            what the save holds, see `headrace.checkpoint.manifest`
    RUN/step-NNNNNNNN/rank-RRRRR.data     the items of one rank, one after another
    RUN/step-NNNNNNNN/pin                 nothing deletes a step that has one, see `headrace.checkpoint.retention`

A *checkpoint id* is `RUN/step-N` with any number of leading zeros in N; `RUN` may itself have parts (`team/llama`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.errors import UsageError

#: Steps are written with eight digits so that names sort as numbers do; larger ones grow a digit and still parse.
STEP_DIGITS = 8
STEP_LIMIT = 10**15
RUN_BYTES_LIMIT = 512

_STEP = re.compile(r"step-([0-9]{1,16})\Z")


def check_run(run: str) -> str:
    """`run` itself; UsageError where it cannot be part of an object name."""
    encoded = run.encode("utf-8", "surrogatepass")
    if len(encoded) > RUN_BYTES_LIMIT or "\0" in run or not all(run.split("/")):
        raise UsageError(
            "this cannot be the name of a run",
            expected=f"1 to {RUN_BYTES_LIMIT} bytes of text, parts separated by single slashes",
            found=repr(run),
        )
    if _STEP.match(run.rsplit("/", 1)[-1]):
        raise UsageError("a run cannot end in a step", expected='a name such as "pretrain"', found=repr(run))
    return run


@dataclass(frozen=True, order=True)
class CheckpointId:
    """One step of one run; `str()` gives the canonical id, the prefix of all its objects."""

    run: str
    step: int

    def __post_init__(self) -> None:
        check_run(self.run)
        if not 0 <= self.step < STEP_LIMIT:
            raise UsageError("step is out of range", expected=f"0 to {STEP_LIMIT - 1}", found=str(self.step))

    def __str__(self) -> str:
        return f"{self.run}/step-{self.step:0{STEP_DIGITS}d}"

    @property
    def manifest(self) -> str:
        return f"{self}/manifest"

    @property
    def pin(self) -> str:
        return f"{self}/pin"

    def data(self, rank: int) -> str:
        return f"{self}/rank-{rank:05d}.data"


def parse_checkpoint_id(text: str, *, run: str | None = None) -> CheckpointId:
    """`"RUN/step-100"` -> CheckpointId; `"step-100"` alone is meant within `run`. UsageError on anything else."""
    head, _, tail = text.removesuffix("/").rpartition("/")
    match = _STEP.match(tail)
    if match is None or not (head or run):
        raise UsageError(
            "this is not a checkpoint id",
            expected='"RUN/step-N", for example "pretrain/step-00000100"',
            found=repr(text),
        )
    return CheckpointId(check_run(head or run or ""), int(match[1]))


def parse_path(text: str) -> tuple[str, CheckpointId | None]:
    """A run, and which of its checkpoints; None: `text` names the run alone. UsageError where it is neither."""
    try:
        id = parse_checkpoint_id(text)
    except UsageError:
        return check_run(text.removesuffix("/")), None
    return id.run, id


def parse_manifest_name(name: str) -> CheckpointId | None:
    """The checkpoint whose manifest this object is; None where it is no manifest."""
    return _parse_name(name, "manifest")


def is_manifest(name: str) -> bool:
    """For `CopyOptions.last`: a checkpoint is there when its manifest is, and the latest is the one committed last."""
    return parse_manifest_name(name) is not None


def parse_pin_name(name: str) -> CheckpointId | None:
    """The checkpoint whose pin this object is; None where it is no pin."""
    return _parse_name(name, "pin")


def _parse_name(name: str, kind: str) -> CheckpointId | None:
    head, _, tail = name.rpartition("/")
    if tail != kind:
        return None
    run, _, step = head.rpartition("/")
    match = _STEP.match(step)
    if match is None or not run:
        return None
    try:
        found = CheckpointId(run, int(match[1]))
    except UsageError:
        return None
    return found if f"{found}/{kind}" == name else None
