"""Rounds over the store: answers in order, errors by name to all, nothing is left behind."""

from __future__ import annotations

import time
from typing import Any

import pytest

from headrace.errors import CheckpointFailed, DeviceGone
from headrace.torch.ranks.coordination import MESSAGE_LIMIT, SoloExchange, StoreExchange
from tests.torch.crew import Rank, run


def exchange_of(rank: Rank, **options: float) -> StoreExchange:
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    return StoreExchange(store, "test", rank.rank, rank.world, **{"stall_s": 20.0, "deadline_s": 30.0} | options)


def rounds(rank: Rank, _: None) -> list[str]:
    import torch.distributed as dist

    exchange = exchange_of(rank)
    seen: list[str] = []

    def step(mine: bytes | Exception, answer: str = "") -> None:
        if rank.rank == 0:
            exchange.announce()
        dist.barrier()
        try:
            with exchange.save():
                reply = exchange.round(
                    "grant", mine, lambda all: [b"<" + b"+".join(all) + str(i).encode() for i in range(3)]
                )
                if answer == "decide":
                    exchange.round("receipt", b"", lambda _: [][0])
                exchange.round("receipt", reply, lambda all: [b""] * len(all))
                seen.append(reply.decode())
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
        dist.barrier()

    step(str(rank.rank).encode())
    step(ValueError("boom") if rank.rank == 2 else b"")
    step(DeviceGone("away", where="here") if rank.rank == 0 else b"")
    step(ValueError(f"boom {rank.rank}") if rank.rank else b"")
    step(b"", "decide")
    step(bytes(MESSAGE_LIMIT + 1) if rank.rank == 1 else b"")
    step(b"again")
    keys = []
    for _ in range(10):
        step(b"k")
        keys.append(dist.distributed_c10d._get_default_store().num_keys())
        # Counted by all before rank 0 begins the next save, which takes keys away and makes new ones.
        dist.barrier()
    assert keys[-1] == keys[3], "keys of old saves stay in the store"
    return seen


def test_answers_and_errors_reach_every_rank() -> None:
    results = run(3, rounds, None)
    for rank, seen in enumerate(results):
        assert seen[0] == f"<0+1+2{rank}"
        assert "boom" in seen[1]
        assert ("rank 2 failed" in seen[1]) == (rank != 2)
        assert "away at here" in seen[2]
        assert seen[2].startswith("DeviceGone" if rank == 0 else "CheckpointFailed")
        assert f"boom {rank or 1}" in seen[3]
        assert "list index out of range" in seen[4]
        assert "too long" in seen[5]
        assert seen[6] == f"<again+again+again{rank}"
    assert "2 ranks failed" in results[0][3]


def slow(rank: Rank, _: None) -> tuple[str, float]:
    import torch.distributed as dist

    exchange = exchange_of(rank, stall_s=20.0, deadline_s=2.0)
    # One of its own: the exchange asks through the other one.
    store: Any = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    if rank.rank == 0:
        exchange.announce()
    dist.barrier()
    began = time.monotonic()
    try:
        with exchange.save():
            if rank.rank == 1:
                store.wait(["given up"])
            exchange.round("grant", b"", lambda all: all)
    except CheckpointFailed as error:
        return str(error), time.monotonic() - began
    finally:
        if rank.rank == 0:
            store.set("given up", b"")
    return "", 0.0


def test_a_rank_that_is_alive_and_slow_is_named() -> None:
    for text, seconds in run(3, slow, None):
        assert "rank 1 did not finish within 2.0 s" in text
        assert seconds < 15


def meetings(rank: Rank, _: None) -> bytes:
    """Rank 1 comes first, and gives up; then all come, rank 1 last."""
    import torch.distributed as dist

    if rank.rank:
        with (
            pytest.raises(CheckpointFailed, match="rank 0 did not finish"),
            exchange_of(rank, stall_s=0.1, deadline_s=0.1).meeting(),
        ):
            pass
    dist.barrier()
    if rank.rank:
        # For as long the other one could begin with what is left.
        time.sleep(0.5)
    exchange = exchange_of(rank)
    with exchange.meeting():
        return exchange.round("first", b"%d" % rank.rank, lambda all: [b"+".join(all)] * 2)


def test_a_rank_that_gave_up_is_waited_for_when_it_comes_again() -> None:
    assert run(2, meetings, None) == [b"0+1"] * 2


def test_alone() -> None:
    exchange = SoloExchange()
    with exchange.save():
        assert exchange.round("grant", b"x", lambda all: [all[0] * 2]) == b"xx"
        with pytest.raises(DeviceGone):
            exchange.round("grant", DeviceGone("away"), lambda all: all)
