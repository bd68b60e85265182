"""Restoring a training job: which step, all ranks together; one load; and what became of it.

Rank 0 looks which steps there are, and all ranks try the same one. A step that some rank finds damaged is read once
more (what was damaged on the way is good then), and then, where that was asked for, all ranks go back to the one
before: the one that it goes on from, never one that the run had left behind (`headrace.checkpoint.order`).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Literal

from headrace.checkpoint import CheckpointId
from headrace.checkpoint.listing import read_info
from headrace.checkpoint.order import Found, back_from, find
from headrace.errors import CheckpointFailed, HeadraceError, ObjectNotFound, UsageError
from headrace.torch.job.certificate import Damage, RestartCertificate, process_age_s, slowest_path
from headrace.torch.job.training_state import Parts, Planner, put_back, tensors_of
from headrace.torch.load.reader import VolumeReader
from headrace.torch.ranks.agreement import Ranks
from headrace.torch.ranks.attachment import Attachment, VolumeLike
from headrace.torch.save.options import WriterOptions
from headrace.volume import Volume

OnDamage = Literal["raise", "previous"]

_log = logging.getLogger("headrace")
#: A step is given up only when as many readings of it, one after another, found damage.
_READINGS = 2


@dataclass(frozen=True)
class _Told:
    """What one rank tells the others about its try: an error, or its part of the certificate."""

    error: HeadraceError | None = None
    age_s: float = 0.0
    restore_s: float = 0.0
    read_s: float = 0.0
    path: str = ""
    wanted_bytes: int = 0
    read_bytes: int = 0
    unique_bytes: int = 0
    rng: str = ""
    data: str = ""


@dataclass(frozen=True, kw_only=True)
class Restored:
    certificate: RestartCertificate
    extra: dict[str, Any]


def restore(
    volume: VolumeLike,
    run: str,
    which: int | str,
    parts: Parts,
    ranks: Ranks,
    on_damage: OnDamage,
    options: WriterOptions,
) -> Restored | None:
    """Collective, with the patience of `options`. None where `which` is "latest" and there is none; nothing was touched
    then."""
    if on_damage not in ("raise", "previous"):
        raise UsageError("on_damage", expected='"raise" or "previous"', found=repr(on_damage))
    if which != "latest" and (not isinstance(which, int) or isinstance(which, bool)):
        raise UsageError("step", expected='"latest" or a number', found=repr(which))
    began = time.perf_counter()
    attachment = Attachment(volume)
    try:
        opened = attachment.open()
        steps = ranks.told(lambda: _candidates(opened, run, which, on_damage), "looking for a checkpoint")
        damaged: list[Damage] = []
        for step in steps:
            for reading in range(_READINGS):
                told, extra = _try(opened, CheckpointId(run, step), parts, ranks, began, options)
                failure = _failure(told)
                if failure is None:
                    return Restored(certificate=_certificate(opened, run, step, told, ranks, damaged), extra=extra)
                if failure.fault != "media":
                    raise failure
                if reading == 0:
                    _log.warning("headrace: step %d of %s is read once more: %s", step, run, failure)
            assert failure is not None
            if on_damage == "raise":
                failure.next_step = 'restore with on_damage="previous", which goes back to the step before it'
                raise failure
            damaged.append(Damage(checkpoint=str(CheckpointId(run, step)), error=str(failure)))
            if ranks.rank == 0:
                _log.error(
                    "headrace: step %d of %s is DAMAGED, going back to the one before it: %s", step, run, failure
                )
        if not damaged:
            return None
        raise CheckpointFailed(
            "every checkpoint that this run could go back to is damaged",
            where=run,
            found="; ".join(f"{each.checkpoint}: {each.error}" for each in damaged[:3]),
            next_step="`headrace volume scrub` says what else is; `headrace volume salvage` saves what can be saved",
        )
    finally:
        attachment.close()


def _candidates(volume: Volume, run: str, which: int | str, on_damage: OnDamage) -> list[int]:
    """Steps to try, in order."""
    volume.refresh()
    found = find(volume, run)
    ids = list(found.ids)
    if which == "latest":
        if not ids:
            return []
        wanted = ids[-1]
    else:
        wanted = CheckpointId(run, int(which))
        if wanted not in ids:
            raise ObjectNotFound(
                f"there is no committed checkpoint {wanted}",
                found=f"{len(ids)} of this run, the last of step {ids[-1].step}" if ids else "none of this run",
            )
        _warn_of_what_is_left_behind(found, ids[ids.index(wanted) + 1 :], wanted)
    steps = [id.step for id in back_from(found, wanted)]
    return steps if on_damage == "previous" else steps[:1]


def _warn_of_what_is_left_behind(found: Found, later: list[CheckpointId], wanted: CheckpointId) -> None:
    if not later:
        return
    _log.warning(
        "headrace: restoring step %d of %s, behind which others were committed, the last of them step %d: that is"
        ' "latest" until this run has saved; a step that it comes by again is replaced',
        wanted.step, wanted.run, later[-1].step,
    )  # fmt: skip
    kept = sorted(id.step for id in found.pinned if id.step > wanted.step)
    if kept:
        _log.warning(
            "headrace: of %s there are steps above %d that are pinned, and not replaced: a save of step %s will fail;"
            " unpin it before, or go on as another run",
            wanted.run, wanted.step, " or ".join(map(str, kept[:8])),
        )  # fmt: skip


def _try(
    volume: Volume, id: CheckpointId, parts: Parts, ranks: Ranks, began: float, options: WriterOptions
) -> tuple[list[_Told], dict[str, Any]]:
    """One load of one step: what every rank has to tell, and what the extras are."""
    planner = Planner(ranks)
    extra: dict[str, Any] = {}
    try:
        with VolumeReader(volume, str(id), timeout_s=options.deadline_s, stall_s=options.stall_s) as reader:
            state = tensors_of(parts)
            report = reader.load(state, planner=planner, process_group=ranks.group, no_dist=ranks.group is None)
            back = put_back(parts, state, planner, ranks)
        extra = dict(back.extra)
        mine = _Told(
            age_s=process_age_s(),
            restore_s=time.perf_counter() - began,
            read_s=report.read_seconds,
            path=slowest_path(volume.devices),
            wanted_bytes=report.wanted_bytes,
            read_bytes=report.read_bytes,
            unique_bytes=report.job_unique_bytes,
            rng=back.rng,
            data=back.data,
        )
    except HeadraceError as error:
        mine = _Told(error=error)
    except Exception as error:
        # The others wait for what this rank has to say, whatever befell it.
        mine = _Told(
            error=CheckpointFailed(
                f"restoring {id} failed on rank {ranks.rank}", found=f"{type(error).__name__}: {error}"
            )
        )
    return ranks.gather(mine, f"restoring {id}"), extra


def _failure(told: list[_Told]) -> HeadraceError | None:
    """The one error that all ranks act on: that of damage, if there is one, since the others follow from it."""
    errors = [each.error for each in told if each.error is not None]
    return next((error for error in errors if error.fault == "media"), errors[0] if errors else None)


def _certificate(
    volume: Volume, run: str, step: int, told: list[_Told], ranks: Ranks, damaged: list[Damage]
) -> RestartCertificate:
    id = CheckpointId(run, step)
    saved_by, commit, saved_unix = ranks.told(lambda: _origin(volume, id), "writing the restart certificate")
    slowest = max(range(len(told)), key=lambda rank: told[rank].read_s)
    unique, read = told[0].unique_bytes, sum(each.read_bytes for each in told)
    return RestartCertificate(
        checkpoint=str(id),
        step=step,
        commit=commit,
        saved_unix=saved_unix,
        saved_by_ranks=saved_by,
        ranks=ranks.world,
        unique_bytes=unique,
        wanted_bytes=sum(each.wanted_bytes for each in told),
        read_bytes=read,
        read_amplification=read / unique if unique else 1.0,
        # `VolumeReader` knows no other way to read.
        verified=True,
        restore_s=max(each.restore_s for each in told),
        slowest_rank=slowest,
        slowest_rank_s=told[slowest].read_s,
        slowest_path=told[slowest].path,
        rng=told[0].rng,
        data=told[0].data,
        damaged=tuple(damaged),
        process_to_restored_s=max(each.age_s for each in told),
    )


def _origin(volume: Volume, id: CheckpointId) -> tuple[int, int, float]:
    info = read_info(volume, id)
    return info.ranks, info.sequence, info.created_unix
