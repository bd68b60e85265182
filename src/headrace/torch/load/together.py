"""The ranks of one load: who they are, rounds with deadlines and names, and a private gloo group for bytes.

Words go through the store of the rendezvous (`coordination`), so that a rank that is dead or late is
named; bytes go over a gloo group of the reader's own. No message of a load goes over the training group, and none
touches accelerator memory: what NCCL once took for an object it keeps.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from headrace.errors import HeadraceError, UsageError
from headrace.torch.ranks.aside import Aside
from headrace.torch.ranks.coordination import Exchange, PeerFailed, SoloExchange, StoreExchange
from headrace.units import format_seconds

#: Messages have smaller ones.
NO_TAG = 1 << 30


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Those of the job that are in this group (None: all)."""
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))


class Together:
    """One job's ranks, seen from one of them. Made anew where the group of a load is another one.

    Args:
        group: the ranks that load together; None: all.
        timeout_s: the longest that a rank is waited for.
        stall_s: a rank that gives no sign of life for so long in the middle of a load is taken for dead.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, timeout_s: float, stall_s: float) -> None:
        self.ranks = ranks_of(group)
        if dist.get_rank() not in self.ranks:
            raise UsageError("this rank is not one of process_group", found=f"rank {dist.get_rank()}")
        self.rank, self.world = self.ranks.index(dist.get_rank()), len(self.ranks)
        self._timeout_s = timeout_s
        self._group: Any = None
        self._aside = Aside("headrace-waits")
        #: Why nobody is waited for any more; and that a connection broke here.
        self._given_up: HeadraceError | None = None
        self._broken = False
        self._store: Any = dist.distributed_c10d._get_default_store()
        # Equal on all ranks of the group and for no other: they meet there.
        self._prefix = f"headrace/load/{hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:32]}"
        self.exchange = StoreExchange(
            self._store, self._prefix, self.rank, self.world, stall_s=stall_s, deadline_s=timeout_s, doing="load"
        )

    def meeting(self) -> contextlib.AbstractContextManager[None]:
        return self.exchange.meeting()

    def group(self) -> Any:
        """The private group, made when first asked for: by all ranks at the same step of a load.

        Not by `dist.new_group`: that names a group by how many this process has made or is in, and ranks that differ
        in that (a load of some of them is enough) wait for one another at two places.
        """
        if self._group is None:
            # A client of its own, whose time-outs are its own.
            name = f"{self._prefix}/{self.exchange.token}/bytes"
            store = dist.PrefixStore(name, self._store.clone())  # type: ignore[attr-defined]
            self._group = dist.ProcessGroupGloo(store, self.rank, self.world, timedelta(seconds=self._timeout_s))
        return self._group

    def connect(self) -> None:
        """Make the private group, where it is not there yet: on all ranks, those that have nothing to send, too."""
        with self.owed(0):
            self.group()

    def broadcast(self, data: bytes | None, length: int) -> bytes:
        """`data` of rank 0, of `length` bytes, on all."""
        held = bytearray(data if data is not None else length)
        if length:
            tensor = torch.frombuffer(held, dtype=torch.uint8)
            with self.owed(0):
                self._wait(self.group().broadcast(tensor, 0))
        return bytes(held)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Bytes go from rank to rank: who waits for one that gives no sign of life, or has left, waits no longer."""
        self._given_up, self._broken = None, False
        with self.exchange.watch(self._give_up):
            try:
                yield
            except PeerFailed as error:
                # Where a rank could not read, all messages come all the same.
                if self._broken and self._given_up is None:
                    self.exchange.give_up(error)
                raise

    def _give_up(self, why: HeadraceError) -> None:
        """On the thread that watches. A time-out closes all connections of the group; one whose other end has left
        meets none."""
        self._given_up = why
        group = self._group
        for rank in range(self.world if group is not None else 0):
            if rank != self.rank:
                with contextlib.suppress(RuntimeError):
                    nothing = torch.empty(1, dtype=torch.uint8)
                    group.recv([nothing], rank, NO_TAG).wait(timedelta(milliseconds=1))

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        with self.owed(rank):
            return self.group().send([tensor], rank, tag)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        with self.owed(rank):
            return self.group().recv([tensor], rank, tag)

    def wait(self, work: Any, rank: int) -> None:
        with self.owed(rank):
            self._wait(work)

    def _wait(self, work: Any) -> None:
        limit = timedelta(seconds=self._timeout_s)
        self._aside.call(lambda: work.wait(limit), lambda: self._given_up)

    @contextlib.contextmanager
    def owed(self, rank: int) -> Iterator[None]:
        """What gloo raises inside, as what it is: that rank did not answer."""
        try:
            yield
        except RuntimeError as error:
            self._broken = True
            why = self._given_up
            if why is not None:
                raise PeerFailed(why.what, where=why.where, found=why.found, next_step=why.next_step) from error
            raise PeerFailed(
                f"rank {self.ranks[rank]} did not do its part of the load",
                where=f"rank {self.ranks[self.rank]}",
                expected=f"its bytes within {format_seconds(self._timeout_s)}",
                found=str(error).splitlines()[0][:200],
                next_step="see the log of that rank",
            ) from error

    def close(self) -> None:
        """Of this process alone: the others need not come."""
        # Its connections end with it, and what was given up of them: the next load makes others.
        self._group, self._given_up, self._broken = None, None, False
        self._aside.close()


class Alone:
    """The same for a load of one process."""

    ranks: Sequence[int] = (0,)
    rank = 0
    world = 1

    def __init__(self) -> None:
        self.exchange: Exchange = SoloExchange()

    def meeting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def broadcast(self, data: bytes | None, length: int) -> bytes:
        assert data is not None
        return data

    def close(self) -> None:
        return None
