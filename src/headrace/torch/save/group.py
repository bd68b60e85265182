"""The ranks that save together: their private group, the exchange between them, and what goes over it."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from headrace.errors import CheckpointFailed
from headrace.torch.ranks.coordination import Exchange, SoloExchange, StoreExchange
from headrace.torch.ranks.groups import private_group
from headrace.torch.save.options import WriterOptions
from headrace.volume import Grant, Receipt


class Turns:
    """What the coordinator decides before each asynchronous save, and the others hear: on the trainers' threads.

    The coordinator beats from the beginning to `close`: it is not in a save while the others wait for its word.
    """

    def __init__(self, prefix: str = "", rank: int = 0, world: int = 1, options: WriterOptions | None = None) -> None:
        self._number = 0
        self._exchange: StoreExchange | None = None
        self._pulse = contextlib.ExitStack()
        if world > 1 and options is not None and options.when_busy != "wait":
            found = exchange(f"{prefix}/turn", rank, world, options)
            assert isinstance(found, StoreExchange)
            self._exchange = found
            if rank == 0:
                self._pulse.enter_context(found.pulse())

    def decide(self, mine: bool) -> bool:
        """The coordinator's `mine`, on every rank. CheckpointFailed where it is silent, or says nothing in time."""
        if self._exchange is None:
            return mine
        self._number += 1
        return self._exchange.said(f"turn/{self._number}", b"1" if mine else b"0", "turn") == b"1"

    def close(self) -> None:
        self._pulse.close()


def join(group: dist.ProcessGroup | None, options: WriterOptions) -> tuple[dist.ProcessGroup, Exchange, Turns]:
    """A private gloo group and an exchange over the job's store. Collective over `group`."""
    private = private_group(group, "save", stall_s=options.stall_s, deadline_s=options.deadline_s)
    name = f"headrace/{private.token}"
    rank, world = private.rank, private.world
    return private.group, exchange(name, rank, world, options), Turns(name, rank, world, options)


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
