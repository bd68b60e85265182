"""One save, as one rank of it does it: its bytes, and on the coordinator the transaction around those of all ranks."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field, replace

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from headrace.checkpoint import CheckpointId, Manifest, Save, Summary, parse_checkpoint_id
from headrace.checkpoint.manifest import ObjectEntry, decode, encode
from headrace.errors import CheckpointFailed, HeadraceError
from headrace.torch.metadata import Place, to_manifest
from headrace.torch.ranks.attachment import Attachment
from headrace.torch.ranks.coordination import Exchange
from headrace.torch.save.group import decode_grant, decode_receipt, encode_grant, encode_receipt
from headrace.torch.save.kept import Results, Whole, results_of
from headrace.torch.save.options import SaveReport, WriterOptions
from headrace.torch.save.pacing import SHORT_BYTES, Pacer, PaceReport, within_seconds
from headrace.torch.save.planning import Planned
from headrace.torch.save.stager import Stager
from headrace.torch.save.staging import StagedPlan, Staging, lay_out
from headrace.torch.save.without_collectives import put_together
from headrace.units import format_seconds
from headrace.volume import Grant, Volume


@dataclass(frozen=True)
class _Written:
    """What became of a rank's grant: its receipt, or why there is none."""

    answer: bytes | Exception
    stage_seconds: float = 0.0
    rewritten_bytes: int = 0
    copied: dict[str, int] = field(default_factory=dict)
    compared: bool = False
    pacing: PaceReport | None = None


class OneSave:
    """The save under way, or the last one. `write` on every rank, then `commit` on the coordinator, or `abandon`."""

    def __init__(self, owner: threading.Thread | None = None) -> None:
        #: The thread that saves; None where it is known that no thread does any more.
        self.owner = owner
        self.report: SaveReport | None = None
        #: What this rank knows of a failure, for whoever meets the collective that broke behind it.
        self.failure: HeadraceError | None = None
        #: Of what is being written, where it gives way.
        self.pacer: Pacer | None = None
        self._save: Save | None = None
        self._now("is about to plan")

    def _now(self, doing: str) -> None:
        self._doing, self._since = doing, time.monotonic()

    @property
    def doing(self) -> str:
        """What this rank does of it, and for how long."""
        return f"it {self._doing} for {format_seconds(time.monotonic() - self._since)}"

    def write(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        *,
        id: CheckpointId,
        options: WriterOptions,
        exchange: Exchange,
        attachment: Attachment,
        staging: Staging,
        stager: Stager | None,
        apart: bool = False,
    ) -> Results:
        """This rank's part; returns when every rank has written, or raises on all of them. `apart`: nothing has brought
        the ranks together so far."""

        def allocate(messages: list[bytes]) -> list[bytes]:
            """Coordinator: byte counts of all ranks to grants."""
            asked = [json.loads(message) for message in messages]
            _refuse_others(id, [name for name, _ in asked])
            lengths = [length for _, length in asked]
            if not all(isinstance(length, int) and length >= 0 for length in lengths):
                raise CheckpointFailed("a rank asked for an impossible number of bytes", found=str(lengths)[:80])
            self._save = Save(
                attachment.session(),
                id,
                overwrite=options.overwrite,
                retention=options.retention,
                pin_requests=options.pin_requests,
            )
            return [encode_grant(grant) for grant in self._save.allocate(lengths)]

        with exchange.meeting() if apart else exchange.save():
            staged, mine = _lay_out(plan, planner, attachment, id)
            began = time.perf_counter()
            self._now("waits for the byte counts of all ranks")
            grant = decode_grant(exchange.round("grant", mine, allocate))
            granted = time.perf_counter()
            # A round that returns had no exception in it, so this rank has a plan.
            assert staged is not None
            self._now("writes its bytes")
            try:
                done = self._write_grant(grant, staged, planner, attachment, staging, stager, options, exchange)
            finally:
                self.pacer = None
                if stager is not None and stager.copy is not None:
                    stager.copy.let_go()
            written = time.perf_counter()
            self._now("waits for the other ranks to have written")
            exchange.round("receipt", done.answer, self._accept, self._heard)
            ended = time.perf_counter()
            self._now("waits for the commit")
        self.report = SaveReport(
            checkpoint_id=str(id),
            rank=exchange.rank,
            ranks=exchange.world,
            data_bytes=staged.data_bytes,
            object_bytes=staged.total_bytes,
            rewritten_bytes=done.rewritten_bytes,
            copied=done.copied,
            compared=done.compared,
            pacing=done.pacing,
            copy_bytes=0 if stager is None else stager.describe()["bytes"],
            grant_seconds=granted - began,
            stage_seconds=done.stage_seconds,
            write_seconds=written - granted - done.stage_seconds,
            wait_seconds=ended - written,
        )
        whole = planner.whole if isinstance(planner, Planned) and not apart else None
        return results_of(staged.items, staged.offsets, staged.lengths, id.data(exchange.rank), whole)

    def _write_grant(
        self,
        grant: Grant | None,
        staged: StagedPlan,
        planner: SavePlanner,
        attachment: Attachment,
        staging: Staging,
        stager: Stager | None,
        options: WriterOptions,
        exchange: Exchange,
    ) -> _Written:
        if grant is None:
            return _Written(encode_receipt(None))
        stage_seconds = 0.0
        try:
            volume = attachment.open(writable=True)
            began = time.perf_counter()
            gathered = staging.gather(staged, planner, seal=options.integrity)
            stage_seconds = time.perf_counter() - began
            rhythm = None if stager is None else stager.rhythm
            left_s = None if rhythm is None else rhythm.left_s
            if options.pacing and gathered.hurry is not None and staged.total_bytes >= SHORT_BYTES:
                self.pacer = gathered.parts.pace = Pacer(
                    staged.total_bytes,
                    within_s=within_seconds(options.deadline_s, left_s, staged.total_bytes, options.least_rate),
                    hurry=gathered.hurry,
                    ranks=exchange.world,
                    rank=exchange.rank,
                )
            losses = _losses(volume)
            receipt = volume.write_grant(grant, gathered.parts)
            if rhythm is not None and self.pacer is not None:
                rhythm.closing_s = self.pacer.since_answered_s
            rewritten = staged.total_bytes if _losses(volume) != losses else 0
            gathered.seals.compare(gathered.parts)
        except Exception as error:
            return _Written(error, stage_seconds)
        return _Written(
            encode_receipt(receipt),
            stage_seconds,
            rewritten,
            gathered.copied,
            compared=gathered.seals.complete,
            pacing=None if self.pacer is None else self.pacer.report(),
        )

    def commit(self, metadata: Metadata, results: list[Results], kept: Whole) -> SaveReport:
        """Coordinator: everything becomes visible, in one commit record."""
        save = self._save
        if save is None:
            raise CheckpointFailed("finish without a write before it")
        began = time.perf_counter()
        self._now("commits")
        manifest = kept.like(results)
        if manifest is None:
            manifest = self._manifest(metadata, kept.places(results, save.id))
            kept.keep(results, manifest)
        return self._commit(manifest, began)

    def commit_apart(self, metadata: Metadata, results: list[Results], exchange: Exchange) -> SaveReport:
        """The same where the ranks have planned apart, on every rank: each says what it has planned and written."""
        report = self.report
        if report is None:
            raise CheckpointFailed("finish without a write before it")
        done = report
        mine: bytes | Exception
        try:
            mine = encode(_part(metadata, Whole().places(results, parse_checkpoint_id(report.checkpoint_id)), report))
        except Exception as error:
            # The others wait for it.
            mine = error

        def decide(parts: list[bytes]) -> list[bytes]:
            nonlocal done
            began = time.perf_counter()
            self._now("commits")
            done = self._commit(self._manifest(*put_together([decode(part) for part in parts])), began)
            return [b""] * len(parts)

        with exchange.meeting():
            exchange.round("commit", mine, decide)
        return done

    def _manifest(self, metadata: Metadata, places: dict[MetadataIndex, Place]) -> Manifest:
        save, report = self._save, self.report
        if save is None or report is None:
            raise CheckpointFailed("finish without a write before it")
        summary = Summary(
            run=save.id.run,
            step=save.id.step,
            created_unix=save.created_unix,
            ranks=report.ranks,
            item_count=len(places),
            data_bytes=sum(place.length for place in places.values()),
        )
        return to_manifest(summary, metadata, places, save.objects)

    def _commit(self, manifest: Manifest, began: float) -> SaveReport:
        """A manifest of this save, or of one like it, of which the making `began` then."""
        save, report = self._save, self.report
        if save is None or report is None:
            raise CheckpointFailed("finish without a write before it")
        summary = replace(manifest.summary, run=save.id.run, step=save.id.step, created_unix=save.created_unix)
        sequence = save.commit(replace(manifest, summary=summary, objects=tuple(save.objects)))
        seconds = time.perf_counter() - began
        return replace(report, total_bytes=summary.data_bytes, commit_seconds=seconds, sequence=sequence)

    def abandon(self) -> None:
        """Nothing of it becomes visible any more; harmless behind a commit."""
        save, self._save = self._save, None
        if save is not None:
            save.abort()

    def _accept(self, messages: list[bytes]) -> list[bytes]:
        """Coordinator: what the ranks wrote."""
        assert self._save is not None
        self._save.accept([decode_receipt(message) for message in messages])
        return [b""] * len(messages)

    def _heard(self, messages: list[bytes]) -> None:
        """Coordinator: the save is given up, but these ranks have written, and their space need not wait for them."""
        if self._save is not None:
            self._save.settle([decode_receipt(message) for message in messages])


def _part(metadata: Metadata, places: dict[MetadataIndex, Place], report: SaveReport) -> Manifest:
    """What one rank has planned and written."""
    id = parse_checkpoint_id(report.checkpoint_id)
    summary = Summary(
        run=id.run, step=id.step, created_unix=0.0, ranks=1, item_count=len(places), data_bytes=report.data_bytes
    )
    entry = ObjectEntry(name=id.data(report.rank), length_bytes=report.object_bytes)
    return to_manifest(summary, metadata, places, [entry])


def _lay_out(
    plan: SavePlan, planner: SavePlanner, attachment: Attachment, id: CheckpointId
) -> tuple[StagedPlan | None, bytes | Exception]:
    # An error of this rank must reach the others through the round: they wait for its byte count.
    try:
        attachment.open(writable=True)
        staged = lay_out(plan, planner)
    except Exception as error:
        return None, error
    return staged, json.dumps([str(id), staged.total_bytes]).encode()


def _refuse_others(id: CheckpointId, names: list[str]) -> None:
    # Their bytes would stand in one checkpoint.
    for rank, name in enumerate(names):
        if name != str(id):
            raise CheckpointFailed(
                "the ranks save different checkpoints",
                where=f"rank {rank}",
                expected=f"{id}, as rank 0",
                found=name,
                next_step="all ranks must save the same steps, in the same order",
            )


def _losses(volume: Volume) -> int:
    """Associations that the members lost so far; where that moves during a write, the write was repeated."""
    return sum(device.loss_count() for device in volume.devices)
