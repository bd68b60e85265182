"""The ranks that save together: their private group, the exchange between them, and what goes over it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from headrace.errors import CheckpointFailed, UsageError
from headrace.torch.ranks.coordination import Exchange, SoloExchange, StoreExchange
from headrace.torch.save.options import WriterOptions
from headrace.volume import Grant, Receipt


class Turns:
    """What the coordinator decides before each asynchronous save, and the others hear: on the trainers' threads."""

    def __init__(self, prefix: str, rank: int, world: int, limit_s: float) -> None:
        self._rank, self._world, self._limit_s = rank, world, limit_s
        self._number = 0
        if world > 1:
            # A client of its own: the store's may be waiting on the thread of a save.
            store = dist.distributed_c10d._get_default_store()
            self._store: Any = dist.PrefixStore(f"{prefix}/turn", store.clone())  # type: ignore[attr-defined]

    def decide(self, mine: bool) -> bool:
        """The coordinator's `mine`, on every rank. CheckpointFailed where it says nothing in time."""
        if self._world == 1:
            return mine
        number, self._number = self._number, self._number + 1
        try:
            if self._rank == 0:
                self._store.set(str(number), b"1" if mine else b"0")
                return mine
            self._store.set_timeout(timedelta(seconds=self._limit_s))
            return bool(bytes(self._store.get(str(number))) == b"1")
        except (dist.DistError, RuntimeError) as error:
            raise CheckpointFailed(
                "rank 0 did not say whether its save before this one is under way",
                where=f"rank {self._rank}",
                expected=f"an answer within {self._limit_s:.0f} s",
                found=str(error).splitlines()[0],
                next_step="see the log of rank 0; all ranks must save equally often",
            ) from error


def join(group: dist.ProcessGroup | None, options: WriterOptions) -> tuple[dist.ProcessGroup, Exchange, Turns]:
    """A private gloo group and an exchange over the job's store. Collective over `group`."""
    timeout = timedelta(seconds=options.deadline_s)
    if group is None:
        private = dist.new_group(backend="gloo", timeout=timeout)
    else:
        ranks = dist.get_process_group_ranks(group)
        private = dist.new_group(ranks, backend="gloo", timeout=timeout, use_local_synchronization=True)
    if not isinstance(private, dist.ProcessGroup):
        raise UsageError("this rank is not one of process_group", found=f"rank {dist.get_rank()}")
    rank, world = dist.get_rank(private), dist.get_world_size(private)
    # Equal on all ranks and new for each writer: the group's name would do, but is not public.
    prefix = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.uint8)
    dist.broadcast(prefix, src=dist.get_global_rank(private, 0), group=private)
    name = f"headrace/{bytes(prefix.tolist()).hex()}"
    return private, exchange(name, rank, world, options), Turns(name, rank, world, options.stall_s)


def join_checkpoint_process(options: WriterOptions) -> Exchange:
    if not (dist.is_available() and dist.is_initialized()):
        raise CheckpointFailed(
            "this writer was pickled to a process without torch.distributed",
            next_step="construct a writer there instead",
        )
    return exchange("headrace/checkpoint-process", dist.get_rank(), dist.get_world_size(), options)


def exchange(prefix: str, rank: int, world: int, options: WriterOptions) -> Exchange:
    if world == 1:
        return SoloExchange()
    # The store of the rendezvous: every rank of the job reaches it, and no port of our own must be found and opened.
    store = dist.distributed_c10d._get_default_store()
    return StoreExchange(store, prefix, rank, world, stall_s=options.stall_s, deadline_s=options.deadline_s)


def encode_grant(grant: Grant | None) -> bytes:
    return b"" if grant is None else grant.to_json().encode()


def decode_grant(message: bytes) -> Grant | None:
    return Grant.from_json(message.decode()) if message else None


def encode_receipt(receipt: Receipt | None) -> bytes:
    return b"" if receipt is None else receipt.to_json().encode()


def decode_receipt(message: bytes) -> Receipt | None:
    return Receipt.from_json(message.decode()) if message else None
