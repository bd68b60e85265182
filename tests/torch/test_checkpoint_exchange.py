"""Rounds over the store: answers in order, errors by name to all, nothing is left behind."""

from __future__ import annotations

import pickle
import re
import time
from typing import Any

import pytest

from headrace.errors import CheckpointFailed, DeviceGone
from headrace.torch.ranks.coordination import MESSAGE_LIMIT, STORE_QUESTIONS_PER_S, SoloExchange, StoreExchange, looks
from tests.stopping import stopped
from tests.torch.crew import Crew, Rank, run

#: Longer than a thread stands still on a machine that is busy.
TURN_STALL_S = 10.0


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
        # Rank 2, too, where it stood still for so long.
        assert re.search(r"ranks? 1\b.* did not finish within 2\.0 s", text), text
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
        word = f"{exchange.token}/word"
        with exchange.watch(lambda _: None):
            if rank.rank:
                exchange.give_up(CheckpointFailed("this rank has left"))
        found = exchange.round("first", b"%d" % rank.rank, lambda all: [b"+".join(all)] * 2)
    dist.barrier()
    assert not exchange._store.check([word]), "nobody takes it away any more"
    return found


def test_a_rank_that_gave_up_is_waited_for_when_it_comes_again() -> None:
    assert run(2, meetings, None) == [b"0+1"] * 2


def test_a_meeting_that_loses_the_store_tells_what_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 was there, and cannot be told any more that rank 2 did not come."""
    import torch.distributed as dist

    exchange = StoreExchange(dist.HashStore(), "test", 0, 3, stall_s=20.0, deadline_s=0.1)
    exchange._store.set("here/1", b"1")
    get = exchange._store.get
    left = [1]

    def gone(key: str) -> bytes:
        if not left:
            raise dist.DistStoreError("gone")
        left.clear()
        return get(key)

    monkeypatch.setattr(exchange._store, "get", gone)
    with pytest.raises(CheckpointFailed, match="rank 2 did not finish within"), exchange.meeting():
        pass


def taken_back(rank: Rank, _: None) -> str:
    """Rank 1 gives up while rank 0 still waits for rank 2, and comes again."""
    patient = exchange_of(rank, stall_s=50.0, deadline_s=600.0)
    if rank.rank == 0:
        rank.say("waits")
    elif rank.rank == 2:
        rank.hear()
    else:
        rank.hear()
        with pytest.raises(CheckpointFailed), exchange_of(rank, stall_s=1.0, deadline_s=1.0).meeting():
            pass
        rank.say("gave up")
    with patient.meeting():
        return patient.token


def test_a_word_that_was_taken_back_is_not_answered() -> None:
    crew = Crew(3, taken_back)
    crew.hear(0, "waits")
    crew.say(1, "come")
    crew.hear(1, "gave up")
    crew.say(2, "come")
    assert len(set(crew.join())) == 1


def turns(rank: Rank, _: None) -> str:
    """Ranks 1 and 2 of the job, of which 1 says whose turn it is; rank 0 has the store, and no part in it."""
    from headrace.torch.save.group import Turns
    from headrace.torch.save.options import WriterOptions

    if rank.rank == 0:
        rank.hear()
        return ""
    options = WriterOptions(when_busy="skip", stall_s=TURN_STALL_S, deadline_s=600)
    whose = Turns("turns", rank.rank - 1, 2, options)
    try:
        if rank.rank == 1:
            rank.say("beats")
            # It lives, and is late: for longer than a rank may be silent.
            rank.hear()
            time.sleep(1.2 * TURN_STALL_S)
            assert whose.decide(True)
            rank.say("decided")
            rank.hear()
            return ""
        rank.hear()
        rank.say("asks")
        assert whose.decide(False)
        rank.hear()
        rank.say("asks again")
        with pytest.raises(CheckpointFailed) as caught:
            whose.decide(False)
        rank.say("failed")
        return str(caught.value)
    finally:
        whose.close()


def test_who_says_whose_turn_it_is_may_be_late_and_not_silent() -> None:
    crew = Crew(3, turns)
    crew.hear(1, "beats")
    crew.say(2, "ask")
    crew.hear(2, "asks")
    crew.say(1, "be late")
    crew.hear(1, "decided")
    with stopped(crew.pids[1]):
        crew.say(2, "ask again")
        crew.hear(2, "failed")
    crew.say(1, "end")
    crew.say(0, "end")
    assert "rank 0 gave no sign of life" in crew.join()[2]


def hostile(rank: Rank, _: None) -> list[str]:
    """Somebody else writes to the store in the place of rank 1."""
    import torch.distributed as dist

    exchange = exchange_of(rank)
    found = []
    for bad in (b"!", b"!" + pickle.dumps(1), b'!{"rank": 1}', b'!{"rank": 1, "kind": "X", "text": 3}', b"![[]]"):
        if rank.rank == 0:
            exchange.announce()
        dist.barrier()
        with exchange.save():
            if rank.rank == 1:
                exchange._store.set(f"{exchange.token}/grant/1", bad)
            else:
                with pytest.raises(CheckpointFailed) as caught:
                    exchange.round("grant", b"", lambda all: [b""] * len(all))
                found.append(str(caught.value))
            dist.barrier()
    return found


def test_what_others_write_into_the_store_is_no_message() -> None:
    for text in run(2, hostile)[0]:
        assert "in the place of a message is none" in text


def test_alone() -> None:
    exchange = SoloExchange()
    with exchange.save():
        assert exchange.round("grant", b"x", lambda all: [all[0] * 2]) == b"xx"
        with pytest.raises(DeviceGone):
            exchange.round("grant", DeviceGone("away"), lambda all: all)


def test_few_ranks_look_often_and_many_leave_the_store_alone() -> None:
    waited = 0.0
    for pause, _ in zip(looks(2), range(300), strict=False):
        assert pause <= min(0.0006 + waited / 9, 0.05)
        waited += pause
    assert waited > 5 and pause == 0.05, "not twenty times a second for ever"
    many = [pause for pause, _ in zip(looks(1000), range(100), strict=False)]
    assert min(many[15:]) >= 1000 / STORE_QUESTIONS_PER_S
    assert sum(many[:15]) < 1, "and they begin soon"
