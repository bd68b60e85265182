"""`VolumeReader`: torch.distributed.checkpoint loads from a volume, every byte verified, straight into the tensors.

    report = VolumeReader("nvme+tcp://...", "pretrain/step-00000100").load(state)         # on every rank of the job
    dcp.load(state, storage_reader=VolumeReader("nvme+tcp://...", "pretrain"))

`reader.load` is DCP's load (its planners, its plans) in rounds of our own: one rank reads the manifest and sends it to
the others; each says what bytes it wants; what several ranks want one of them reads, verifies, and sends to the others
(`headrace.checkpoint.shares`). A rank that fails, stops or dies is named to all others. With `dcp.load` each rank reads
what it wants by itself, and DCP's own collectives have the time-outs of their group.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from headrace.checkpoint import CheckpointId, Manifest, parse_checkpoint_id
from headrace.checkpoint.listing import Committed, latest_id, read_committed
from headrace.checkpoint.manifest import decode
from headrace.checkpoint.names import parse_path
from headrace.checkpoint.save import CHECKSUM_BLOCK_BYTES
from headrace.checkpoint.shares import U64, blocks_of, decode_share, encode_shares, share
from headrace.errors import CheckpointFailed, HeadraceError, ObjectNotFound, UsageError
from headrace.torch.load.planning import create_local_plan
from headrace.torch.load.plans import decode_plan, encode_plan
from headrace.torch.load.reading import U8, Reading, Wanted, rows_of_items, wanted
from headrace.torch.load.sharing import Exchange
from headrace.torch.load.together import Alone, Together, ranks_of
from headrace.torch.metadata import Place, from_manifest
from headrace.torch.ranks.attachment import Attachment, VolumeLike
from headrace.torch.ranks.failures import translated
from headrace.units import MIB
from headrace.volume import ObjectInfo

#: A manifest goes to all ranks through the store of the job where it is no more than that for all of them together.
ALONG_BYTES = 4 * MIB


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What one load did, as this rank saw it."""

    checkpoint_id: str
    step: int
    #: Bytes of items that this rank wanted, and bytes that it asked the volume for (rows around columns count).
    wanted_bytes: int
    read_bytes: int
    #: Wall clock, planning and exchange of the ranks included.
    seconds: float
    #: Bytes that came from other ranks.
    received_bytes: int = 0
    #: Of them, from when it knew what to read until it had all.
    read_seconds: float = 0.0
    #: Ranks that loaded together; what all of them read, and how many bytes any of them wanted. What is read for
    #: others, too, is read in whole checksum blocks.
    ranks: int = 1
    job_read_bytes: int = 0
    job_unique_bytes: int = 0

    @property
    def read_amplification(self) -> float:
        """Bytes that the job asked the volume for, for each byte that it wanted."""
        return self.job_read_bytes / self.job_unique_bytes if self.job_unique_bytes else 1.0


class _NoTraceback(logging.Filter):
    """`dcp.load` logs the traceback of an error of ours that it goes on to raise."""

    def filter(self, record: logging.LogRecord) -> bool:
        told = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        return not (isinstance(told, HeadraceError) and str(record.msg).startswith("Global metadata is not found"))


# DCP takes the root logger for it: a filter there sees what is logged to it directly, and nothing of other loggers.
logging.getLogger().addFilter(_NoTraceback())


class VolumeReader(StorageReader):
    """DCP's `StorageReader` over a volume.

    Args:
        volume: address of the volume (a URI, several of them for several members), or an open `Volume`.
        path: a checkpoint id, `"pretrain/step-100"`, or a run, `"pretrain"`: its latest committed step at that time.
        timeout_s: the longest that one lot of reads may take, and that a rank waits for the others in `load`. Behind it
            a load ends when no read is under way any more: by the devices' `loss_timeout` at the latest.
        stall_s: a rank that gives no sign of life for so long in the middle of a `load` is taken for dead.

    Raises HeadraceError: ObjectNotFound for a step that was never committed, ChecksumMismatch with the name of the
    damaged tensor. `dcp.load` wraps those into `CheckpointException`, which is *not* an `Exception`.
    """

    def __init__(
        self, volume: VolumeLike, path: str = "run", *, timeout_s: float = 600.0, stall_s: float = 60.0
    ) -> None:
        super().__init__()
        for name, value in (("timeout_s", timeout_s), ("stall_s", stall_s)):
            if not value > 0:
                raise UsageError(name, expected="above 0", found=str(value))
        self._attachment = Attachment(volume)
        self._run, self._id = parse_path(path)
        self._timeout_s = timeout_s
        self._stall_s = min(stall_s, timeout_s)
        self._metadata: Metadata | None = None
        self._places: dict[MetadataIndex, Place] = {}
        self._loaded: CheckpointId | None = None
        self._ranks: Together | None = None
        #: Of the manifest: its objects by number, their lengths, and what each is in the volume, once it was looked up.
        self._numbers: dict[str, int] = {}
        self._lengths: list[int] = []
        self._infos: dict[int, ObjectInfo] = {}
        #: The manifest that was read, and the sequence of its commit; must be the same on all ranks of a load.
        self._sequence = 0
        self._failure: HeadraceError | None = None
        #: Bytes of items that the last load wanted, and bytes that it asked the volume for.
        self.wanted_bytes = 0
        self.read_bytes = 0

    def load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str | None = None,
        *,
        planner: LoadPlanner | None = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> LoadReport:
        """Fill `state_dict` in place, all ranks of `process_group` (default: all) together. HeadraceError in its own
        kind, on every rank. `no_dist`: this process loads alone although torch.distributed is initialised."""
        began = time.perf_counter()
        if checkpoint_id is not None:
            self.reset(checkpoint_id)
        alone = (
            no_dist or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(process_group) == 1
        )
        ranks = Alone() if alone else self._together(process_group)
        with translated("load", lambda: self._failure, lambda: str(self._loaded) if self._loaded else None):
            try:
                with ranks.meeting():
                    # All ranks must have the same keys, as in DCP.
                    plain = {
                        key: value.state_dict() if _stateful(value) else value
                        for key, value in sorted(state_dict.items())
                    }
                    report = self._load(plain, planner or DefaultLoadPlanner(), ranks)
            except BaseException:
                # What is still on its way to another rank must not meet the next load.
                ranks.close()
                raise
        for key, value in plain.items():
            if _stateful(state_dict[key]):
                state_dict[key].load_state_dict(value)
            else:
                state_dict[key] = value
        return replace(report, seconds=time.perf_counter() - began)

    def _together(self, group: dist.ProcessGroup | None) -> Together:
        if self._ranks is not None and self._ranks.ranks != ranks_of(group):
            self._ranks.close()
            self._ranks = None
        self._ranks = self._ranks or Together(group, timeout_s=self._timeout_s, stall_s=self._stall_s)
        return self._ranks

    def _load(self, state: dict[str, Any], planner: LoadPlanner, ranks: Together | Alone) -> LoadReport:
        found = self._read_manifest_once(ranks)
        mine: bytes | Exception
        plan = LoadPlan([])
        items: list[Wanted] = []
        # DCP's plans are gathered only for planners that do something with all of them.
        gathers = type(planner).create_global_plan is not DefaultLoadPlanner.create_global_plan
        try:
            metadata = self._take(*found)
            planner.set_up_planner(state, metadata, ranks.rank == 0)
            self.set_up_storage_reader(metadata, ranks.rank == 0)
            plan = create_local_plan(planner)
            items = self._items(plan)
            mine = encode_plan(plan) if gathers else _pack(self._wants(items))
        except Exception as error:
            mine = _told(error, ranks)
        unique = 0

        def decide(messages: list[bytes]) -> list[bytes]:
            nonlocal unique
            plans = [b""] * len(messages)
            if gathers:
                made = planner.create_global_plan([decode_plan(message) for message in messages])
                plans = [encode_plan(one) for one in made]
                wants = [self._wants(self._items(one)) for one in made]
            else:
                wants = [_unpack(message) for message in messages]
            union = blocks_of(np.concatenate(wants), self._lengths, 1)
            unique = int((union[:, 2] - union[:, 1]).sum())
            blocks = [blocks_of(rows, self._lengths, CHECKSUM_BLOCK_BYTES) for rows in wants]
            shares = share(blocks)
            # Nothing for anybody where no rank has a message: then nobody waits for another one's bytes.
            shared = encode_shares(shares) if any(map(len, shares)) else [b""] * len(shares)
            both = list(zip(plans, shared, strict=True))
            # What many ranks get alike is in memory once.
            alike = {(id(plan), id(one)): (plan, one) for plan, one in both}
            pairs = {key: _pair(*pair) for key, pair in alike.items()}
            return [pairs[id(plan), id(one)] for plan, one in both]

        changed, shared = _unpair(ranks.exchange.round("plan", mine, decide))
        share_of = decode_share(shared) if shared else None
        if share_of is not None and isinstance(ranks, Together):
            # All are here now: what a planner does next may take long, or fail.
            ranks.connect()
        exchange: Exchange | None = None
        began = time.perf_counter()
        reading: Reading | _Failed
        try:
            if gathers:
                plan = decode_plan(changed)
            final = planner.finish_plan(plan)
            if gathers or final is not plan:
                items = self._items(final)
            reading = self._reading(items, planner)
            if share_of is not None:
                reading.leave_to(share_of)
            reading.count()
        except Exception as error:
            reading = _Failed(error)
        try:
            if share_of is not None and isinstance(ranks, Together):
                exchange = Exchange(ranks, share_of, reading.read_message, reading.arrived)
                with ranks.watched():
                    exchange.run()
            reading.run()
            self.read_bytes = reading.read_bytes
            mine = str(self.read_bytes).encode()
        except Exception as error:
            mine = _told(error, ranks)
        read_seconds = time.perf_counter() - began
        totals = ranks.exchange.round(
            "end",
            mine,
            lambda found: [json.dumps([sum(map(int, found)), unique]).encode()] * len(found),
        )
        job_read, job_unique = json.loads(totals)
        assert self._loaded is not None
        return LoadReport(
            checkpoint_id=str(self._loaded),
            step=self._loaded.step,
            wanted_bytes=self.wanted_bytes,
            read_bytes=self.read_bytes,
            received_bytes=0 if exchange is None else exchange.received_bytes,
            read_seconds=read_seconds,
            ranks=ranks.world,
            job_read_bytes=job_read,
            job_unique_bytes=job_unique,
            seconds=0.0,
        )

    def _read_manifest_once(self, ranks: Together | Alone) -> tuple[CheckpointId, int, Manifest]:
        """The manifest as rank 0 finds it, on all ranks."""
        one: Committed | None = None

        def find(messages: list[bytes]) -> list[bytes]:
            nonlocal one
            one = self._find()
            data = one.encoded
            # A short one comes along, a long one as bytes from rank to rank: the store is one process.
            along = data if len(data) * len(messages) <= ALONG_BYTES else b""
            head = json.dumps([str(one.id), one.sequence, len(data)]).encode()
            return [_pair(head, along)] * len(messages)

        self._failure = None
        head, data = _unpair(ranks.exchange.round("manifest", b"", find))
        id, sequence, length = json.loads(head)
        if len(data) != length:
            data = ranks.broadcast(None if one is None else one.encoded, length)
        return parse_checkpoint_id(id), sequence, decode(data) if one is None else one.manifest

    @property
    def checkpoint_id(self) -> str:
        return self._run if self._id is None else str(self._id)

    @property
    def sequence(self) -> int:
        """Of the commit of the manifest that was read last."""
        return self._sequence

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._metadata, self._places = None, {}
        if checkpoint_id:
            self._run, self._id = parse_path(os.fspath(checkpoint_id))

    # Not `**kwargs`: DCP looks for that very name, and would come again for metadata of one rank, which we never have.
    def read_metadata(self, *args: Any, **unused: Any) -> Metadata:
        self._failure = None
        try:
            found = self._find()
            metadata = self._take(found.id, found.sequence, found.manifest)
            # These very objects, not what may have their names by the time they are read.
            self._infos = dict(enumerate(found.objects))
        except HeadraceError as error:
            # DCP turns it into an AssertionError.
            self._failure = error
            raise
        return metadata

    def _find(self) -> Committed:
        return read_committed(self._attachment.open(), self._id if self._id is not None else self._latest())

    def _take(self, id: CheckpointId, sequence: int, manifest: Manifest) -> Metadata:
        metadata = from_manifest(manifest)
        self._numbers = {entry.name: number for number, entry in enumerate(manifest.objects)}
        self._lengths = [entry.length_bytes for entry in manifest.objects]
        self._infos = {}
        self._sequence = sequence
        self._loaded = id
        self.wanted_bytes = self.read_bytes = 0
        metadata.storage_meta = StorageMeta(checkpoint_id=str(id))
        return metadata

    def _info(self, number: int) -> ObjectInfo:
        """Of the object of the commit whose manifest was read."""
        found = self._infos.get(number)
        if found is None:
            assert self._loaded is not None
            volume, manifest = self._attachment.open(), self._loaded.manifest
            if volume.sequence_of(manifest) != self._sequence:
                # Another rank saw a later commit than this one has.
                volume.refresh()
            name = next(name for name, of in self._numbers.items() if of == number)
            # Looked at in between, whatever another thread does to the volume: it is of that commit.
            before = volume.sequence_of(manifest)
            found = volume.stat(name) if name in volume else None
            if found is None or not before == self._sequence == volume.sequence_of(manifest):
                raise ObjectNotFound(
                    f"checkpoint {self._loaded} was replaced while it was loaded", next_step="load it again"
                )
            self._infos[number] = found
        return found

    def _latest(self) -> CheckpointId:
        found = latest_id(self._attachment.open(), self._run)
        if found is None:
            raise ObjectNotFound(
                f"there is no committed checkpoint of run {self._run!r}",
                next_step="`headrace volume ls` lists what is there, as RUN/step-N/manifest",
            )
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._metadata = metadata
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=f"{self._loaded} of commit {self._sequence}")

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        # Every rank looks by itself, and a commit between two looks would give some of them another state.
        seen = sorted({str(plan.storage_data) for plan in plans})
        if len(seen) > 1:
            raise CheckpointFailed(
                "the ranks found different checkpoints: one was committed while they looked",
                where=f"run {self._run!r}",
                expected="one",
                found=", ".join(seen),
                next_step="let one rank find the step, and name it to all: RUN/step-N",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        reading = self._reading(self._items(plan), planner)
        reading.count()
        reading.run()
        self.read_bytes += reading.read_bytes
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            parse_checkpoint_id(os.fspath(checkpoint_id))
        except UsageError:
            return False
        return True

    def close(self) -> None:
        """Close the volume, where it is the reader's own, and the group of its loads."""
        self._attachment.close()
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def __enter__(self) -> VolumeReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one load --------------------------------------------------------------------------------------------------

    def _items(self, plan: LoadPlan) -> list[Wanted]:
        assert self._metadata is not None
        found = []
        for item in plan.items:
            place = self._places.get(item.storage_index)
            if place is None:
                raise CheckpointFailed(f"the plan wants a chunk of {item.storage_index.fqn!r} that was never saved")
            found.append(wanted(item, place, self._numbers[place.object], self._metadata))
        return found

    def _wants(self, items: Sequence[Wanted]) -> U64:
        return blocks_of(rows_of_items(items), self._lengths, 1)

    def _reading(self, items: Sequence[Wanted], planner: LoadPlanner) -> Reading:
        self.wanted_bytes += sum(one.wanted_bytes for one in items)
        return Reading(self._attachment.open(), self._info, items, planner, self._timeout_s)


class _Failed:
    """In the place of a `Reading` that could not be made: the others get as void what this rank owes them, and it is
    told where the load ends. Nobody waits."""

    read_bytes = 0

    def __init__(self, error: Exception) -> None:
        self._error = error

    def read_message(self, rows: U64, into: U8, number: int) -> NoReturn:
        raise self._error

    def arrived(self, number: int, data: U8) -> NoReturn:
        raise self._error

    def run(self) -> NoReturn:
        raise self._error


def _stateful(value: Any) -> bool:
    # Of a tensor, which never is, it takes thirty times as long to find out.
    return not isinstance(value, torch.Tensor) and isinstance(value, Stateful)


def _told(error: Exception, ranks: Together | Alone) -> Exception:
    """What is not ours, as what all ranks may hear."""
    if isinstance(error, HeadraceError) or ranks.world == 1:
        return error
    told = CheckpointFailed(
        f"the load was given up: rank {ranks.ranks[ranks.rank]} failed",
        found=f"{type(error).__name__}: {error}",
        next_step="what was loaded so far is not to be used",
    )
    told.__cause__ = error
    return told


def _pair(first: bytes, second: bytes) -> bytes:
    return len(first).to_bytes(8, "little") + first + second


def _unpair(data: bytes) -> tuple[bytes, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


def _pack(rows: U64) -> bytes:
    return rows.astype("<u8", copy=False).tobytes()


def _unpack(data: bytes) -> U64:
    return np.frombuffer(data, "<u8").reshape(-1, 3).astype(np.uint64, copy=False)
