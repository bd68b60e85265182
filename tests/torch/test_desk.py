"""What the processes of a job ask of the one that has the session: each of them may be killed at any moment."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch.distributed as dist

from headrace.errors import CheckpointFailed
from headrace.torch.ranks.desk import Desk, Inquirer, Job, _began, _Place
from tests.torch.crew import Crew, Rank
from tests.waiting import PATIENCE_S, until

PREFIX = "volume"
#: How long a process that was killed is waited for here.
STALL_S = 3.0


@pytest.fixture
def store() -> Iterator[Any]:
    yield dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def job_of(store: Any, rank: int = 1) -> Job:
    return Job.of(store, rank, 2)


def echo(what: dict[str, Any]) -> Any:
    return what["say"]


def answers(rank: Rank, job: Job) -> None:
    Desk(job, PREFIX, echo, STALL_S)
    rank.say("open")
    rank.hear()


def takes_a_number(rank: Rank, job: Job) -> str:
    inquirer = Inquirer(job, PREFIX, PATIENCE_S)
    put = inquirer._store.compare_set

    def halt(key: str, expected: str, value: str) -> bytes:
        rank.say("taken")
        rank.hear()
        return put(key, expected, value)

    inquirer._store.compare_set = halt  # type: ignore[method-assign]
    return str(inquirer.ask({"say": "late"}))


@contextmanager
def crew(what: Any, job: Job) -> Iterator[Crew]:
    running = Crew(1, what, job)
    try:
        yield running
    finally:
        running.end()


def kill(running: Crew) -> None:
    os.kill(running.pids[0], signal.SIGKILL)
    running.join(dead=(0,))


@pytest.fixture
def desk(store: Any) -> Iterator[Desk]:
    found = Desk(job_of(store, 0), PREFIX, echo, STALL_S)
    yield found
    found.close()


def test_who_is_killed_before_it_asks_holds_nobody_up(store: Any, desk: Desk) -> None:
    """It has a number, under which nothing comes."""
    inquirer = Inquirer(job_of(store), PREFIX, PATIENCE_S)
    with crew(takes_a_number, job_of(store)) as running:
        running.hear(0, "taken")
        kill(running)
    assert [inquirer.ask({"say": word}) for word in ("first", "second")] == ["first", "second"]


def test_who_was_only_slow_asks_again(store: Any, desk: Desk) -> None:
    inquirer = Inquirer(job_of(store), PREFIX, PATIENCE_S)
    with crew(takes_a_number, job_of(store)) as running:
        running.hear(0, "taken")
        assert inquirer.ask({"say": "first"}) == "first"
        # Once more: it has another number by then.
        running.say(0, "go on")
        until(lambda: running.listen(0.1) or running.words[0].count("taken") > 1, "it asks again")
        running.say(0, "go on")
        assert running.join() == ["late"]
    assert inquirer.ask({"say": "second"}) == "second"


def test_a_desk_that_was_killed_is_named_within_its_time(store: Any) -> None:
    with crew(answers, job_of(store, 0)) as running:
        running.hear(0, "open")
        inquirer = Inquirer(job_of(store), PREFIX, 10 * PATIENCE_S)
        assert inquirer.ask({"say": "word"}) == "word"
        kill(running)
        who = f"process {running.pids[0]} on node {socket.gethostname()}, as seen by rank 1"
        with pytest.raises(CheckpointFailed, match=f"no sign of life for 3.* at {who}"):
            inquirer.ask({"say": "word"})
        # The next process of that rank goes on.
        assert not Inquirer(job_of(store, 0), PREFIX, PATIENCE_S).is_beside()
        after = Desk(job_of(store, 0), PREFIX, echo, STALL_S)
        assert inquirer.ask({"say": "word"}) == "word"
        after.close()


def test_a_process_that_ended_has_no_session_whether_its_parent_knows_it_or_not(store: Any) -> None:
    inquirer = Inquirer(job_of(store, 0), PREFIX, PATIENCE_S)
    assert not inquirer.is_there() and not inquirer.is_beside()
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        place = replace(_Place.here(STALL_S), pid=child.pid, began=_began(child.pid) or 0)
        said = job_of(store, 0).store(PREFIX)
        said.set("desk", json.dumps(asdict(place)))
        assert inquirer.is_there() and inquirer.is_beside()
        # Another one has its number.
        said.set("desk", json.dumps(asdict(replace(place, began=place.began - 1))))
        assert not inquirer.is_beside()
        said.set("desk", json.dumps(asdict(place)))
        child.kill()
        until(lambda: not inquirer.is_beside(), "it is taken for dead")
        os.kill(child.pid, 0)  # A zombie: nobody has asked how it ended.
    finally:
        child.kill()
        child.communicate()


def test_who_waits_hears_that_the_session_was_given_up(store: Any) -> None:
    asked, gone = threading.Event(), threading.Event()

    def answer(what: dict[str, Any]) -> bool:
        asked.set()
        return gone.wait(PATIENCE_S)

    desk = Desk(job_of(store, 0), PREFIX, answer, STALL_S)
    ending = threading.Thread(target=desk.close)
    try:
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(Inquirer(job_of(store), PREFIX, PATIENCE_S).ask, {"say": "word"})
            assert asked.wait(PATIENCE_S)
            ending.start()
            with pytest.raises(CheckpointFailed, match="has given it up"):
                asking.result()
    finally:
        gone.set()
        if ending.ident is not None:
            ending.join()


def test_two_jobs_on_one_store_have_a_desk_each(store: Any) -> None:
    one, other = (job_of(dist.PrefixStore(name, store)) for name in ("one", "other"))
    assert one == job_of(dist.PrefixStore("one", store)) != other
    first = Desk(replace(one, rank=0), PREFIX, lambda what: "one", STALL_S)
    assert not Inquirer(other, PREFIX, PATIENCE_S).is_there()
    second = Desk(replace(other, rank=0), PREFIX, lambda what: "other", STALL_S)
    assert [Inquirer(job, PREFIX, PATIENCE_S).ask({}) for job in (one, other)] == ["one", "other"]
    first.close()
    assert not Inquirer(one, PREFIX, PATIENCE_S).is_there() and Inquirer(other, PREFIX, PATIENCE_S).is_there()
    second.close()
