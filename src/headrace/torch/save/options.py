"""What a `VolumeWriter` is told, and what it tells of a save."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headrace.checkpoint import Retention
from headrace.errors import UsageError
from headrace.torch.save.pacing import PaceReport


@dataclass(frozen=True, kw_only=True)
class WriterOptions:
    """How a `VolumeWriter` behaves. Equal on all ranks."""

    #: Seconds without a sign of life after which a rank that takes part in a save is taken for dead. A process that is
    #: stopped, or holds the GIL, for longer fails the save.
    stall_s: float = 60.0
    #: Seconds that one round of a save (all ranks have written; all ranks have answered) may take, and time-out of
    #: `process_group`. Raise it where a rank writes for longer than that.
    deadline_s: float = 600.0
    #: After a commit only this many checkpoints of the run remain; None: all of them.
    keep_last: int | None = None
    #: Steps that are multiples of it remain beside the last ones, as those do that are pinned. None: no others.
    keep_every: int | None = None
    #: A folder in which people ask for pins while the job holds the volume (`headrace checkpoint pin --ask FOLDER`):
    #: the coordinator looks there at each commit, and pins with it. None: nobody can ask.
    pin_requests: str | None = None
    #: Replace a committed checkpoint of the same step, in the same commit; else saving it again is an error.
    overwrite: bool = False
    #: Where another run's session holds the volume and gives no sign of life: "refuse", or take over from it,
    #: "if-dead". A process that lives but is stopped for some seconds looks dead, and loses the volume. A dead
    #: predecessor of the same `run_id` is taken over from in either case.
    takeover: Literal["refuse", "if-dead"] = "refuse"
    #: Write where a target has no reservations, too: nothing keeps a writer out there that was taken over from.
    unfenced: bool = False
    #: What `writer.async_save` does while the one before is under way: "wait" for it, "skip" the new one (its report
    #: says so), or "raise" CheckpointBusy. Rank 0 decides for all: one question to the store of the job.
    when_busy: Literal["wait", "skip", "raise"] = "wait"
    #: The copy that an asynchronous save is made from is checksummed "behind" it, by a thread, or in the "copy", before
    #: `async_save` returns; that is compared with what was written, and a difference fails the save. With "copy"
    #: synchronous saves are checksummed before they are written, too. "off": only the volume's own checksums, which are
    #: of what was written.
    integrity: Literal["behind", "copy", "off"] = "behind"
    #: While an asynchronous save writes, and nobody waits for it, reads of training go first: those of this process's
    #: feeds, and others where the way to the targets has become slower. `SaveReport.pacing` tells.
    pacing: bool = True
    #: The fewest bytes a second that each rank then writes, whatever waits. None: as many as end the save in 0.8 of the
    #: longest time between the last few, and in half of `deadline_s`.
    least_rate: float | None = None
    #: That copy lies in shared memory from the beginning: for saves from DCP's checkpoint process.
    shared_copy: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.stall_s <= self.deadline_s:
            raise UsageError(
                "stall_s", expected=f"above 0 and at most deadline_s ({self.deadline_s})", found=str(self.stall_s)
            )
        if self.least_rate is not None and not self.least_rate > 0:
            raise UsageError("least_rate", expected="above 0, in bytes a second", found=str(self.least_rate))
        _ = self.retention
        for name, choices in (
            ("takeover", ("refuse", "if-dead")),
            ("when_busy", ("wait", "skip", "raise")),
            ("integrity", ("behind", "copy", "off")),
        ):
            if (found := getattr(self, name)) not in choices:
                raise UsageError(name, expected=" or ".join(f'"{choice}"' for choice in choices), found=repr(found))

    @property
    def retention(self) -> Retention | None:
        if self.keep_last is not None:
            return Retention(keep_last=self.keep_last, keep_every=self.keep_every)
        if self.keep_every is not None:
            raise UsageError("keep_every without keep_last", next_step="nothing is deleted then: give both or neither")
        return None


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What one save did, as this rank saw it. Seconds are wall clock."""

    checkpoint_id: str
    rank: int
    ranks: int
    #: Bytes of items that this rank wrote; `object_bytes` with the gaps between them.
    data_bytes: int
    object_bytes: int
    #: Written a second time because an association was lost before its flush: the storage had trouble.
    rewritten_bytes: int
    #: Waiting for extents, thus for the slowest rank to begin.
    grant_seconds: float
    #: Finding the items, and copying those that cannot be written from where they are.
    stage_seconds: float
    #: Writing, checksumming and flushing.
    write_seconds: float
    #: Waiting for the other ranks to have written.
    wait_seconds: float
    #: Coordinator only, else None: bytes of items of all ranks, seconds of the commit, its sequence number.
    total_bytes: int | None = None
    commit_seconds: float | None = None
    sequence: int | None = None
    #: Bytes that were copied on the host to be written, by the reason: a tensor that is "on cuda:0", "not contiguous".
    #: All else was written from where it was.
    copied: dict[str, int] = field(default_factory=dict)
    #: Host memory that is kept for the copies of asynchronous saves.
    copy_bytes: int = 0
    #: What was written was compared with checksums of what was copied (`WriterOptions.integrity`).
    compared: bool = False
    #: Nothing was saved: the save before was under way (`WriterOptions.when_busy`).
    skipped: bool = False
    #: How it gave way to reads (`WriterOptions.pacing`); None where it had not to: a synchronous save, a short one.
    pacing: PaceReport | None = None
