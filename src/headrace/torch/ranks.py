"""The ranks that save together: their private group, the exchange between them, and what goes over it."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from headrace.errors import CheckpointFailed, UsageError
from headrace.torch.coordination import Exchange, SoloExchange, StoreExchange
from headrace.torch.options import WriterOptions
from headrace.volume import Grant, Receipt


def join(group: dist.ProcessGroup | None, options: WriterOptions) -> tuple[dist.ProcessGroup, Exchange]:
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
    return private, exchange(name, rank, world, options)


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
