"""What holds (`docs/volume-format.md`, 5) in a bad world, and each rule that it rests on missed when it is off.

More of it, and one seed again: `python -m tests.volume.simulation --help`.
"""

from __future__ import annotations

import random
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.testing import Quirks
from headrace.volume.catalog import commit
from headrace.volume.writing import past
from tests.volume.processes.rounds import History, Rounds
from tests.volume.simulation.chain import Chain, Violation, content
from tests.volume.simulation.rules import HARSH, RULES, STORMS, UNKNOWN_FATE, without
from tests.volume.simulation.run import run
from tests.volume.simulation.weather import Weather

#: Worlds of each test run; others every time, and printed.
SEEDS = 12
#: Within so many worlds a rule that is off is missed,
WORLDS = 60
#: from this one on: what is looked for rarely happens, and here it was seen.
FIRST = {"settled": 27, "look before a commit": 14, "wait": 7, "drained": 3}


def test_no_promise_is_broken() -> None:
    first = random.SystemRandom().randrange(1 << 31)
    print(f"python -m tests.volume.simulation --first {first} --seeds {SEEDS}")
    counts: dict[str, int] = {}
    for seed in range(first, first + SEEDS):
        try:
            made = run(seed)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        for what, count in made.counts.items():
            counts[what] = counts.get(what, 0) + count
    # It was worth something.
    assert all(counts.get(what) for what in ("commit", "session", "look", "read", "grant", "power cut", "killed"))


def test_a_seed_is_one_run() -> None:
    assert run(11).log == run(11).log != run(12).log


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_is_off_is_missed(rule: str) -> None:
    with without(rule):
        for seed in range(first := FIRST.get(rule, 0), first + WORLDS):
            try:
                run(seed, storm=STORMS.get(rule))
            except (Violation, HeadraceError) as error:
                print(f"seed {seed}: {error}")
                break
        else:
            pytest.fail(f"{WORLDS} worlds do not need it")
    # It was this rule that was missed.
    run(seed, storm=STORMS.get(rule))


@pytest.mark.parametrize(
    ("storm", "owner", "rule"),
    [(UNKNOWN_FATE, commit, "refuge"), (HARSH, past, "wait_until_quiet")],
    ids=["one", "one after another"],
)
def test_sessions_of_unknown_fate(storm: Weather, owner: Any, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a target that fences without draining. Their successors go to the other pair of log areas, or wait; worlds in
    which none has to do not count. More: `--storm "unknown fate"`, `--storm harsh`."""
    needed: list[bool] = []
    obeyed = getattr(owner, rule)

    def watched(first: Any, *others: Any) -> Any:
        found = obeyed(first, *others)
        needed.append(rule != "refuge" or found != first.area ^ 1)
        return found

    monkeypatch.setattr(owner, rule, watched)
    worlds = 0
    for seed in range(WORLDS):
        needed.clear()
        run(seed, storm=(storm, Quirks(fences_without_draining=True)))
        worlds += any(needed)
        if worlds == 4:
            return
    pytest.fail(f"{worlds} of {WORLDS} worlds needed it")


# ---- the model, by hand ----------------------------------------------------------------------------------------------


def test_what_was_acknowledged_is_the_last_state() -> None:
    chain = Chain()
    one = chain.attempt("a", 0, {"x": 1})
    chain.acknowledged(one)
    assert chain.observed("r", {"x": 1}, 1) == 1
    for wrong in ({}, {"x": 2}, {"x": 1, "y": 1}):
        with pytest.raises(Violation, match="nobody committed"):
            chain.observed("r", wrong, 1)
    assert chain.observed("r", {}, 0) == 0, "a look that began before"


def test_a_commit_in_flight_is_there_or_not_until_somebody_knows() -> None:
    chain = Chain()
    one, other = chain.attempt("a", 0, {"x": 1}), chain.attempt("a", 0, {"y": 2})
    chain.after_cut([{}, {}], 0)
    chain.after_cut([{}, {"x": 1}], 0)
    with pytest.raises(Violation, match="taken back"):
        chain.after_cut([{"x": 1}, {}], 0)
    with pytest.raises(Violation, match="nobody committed"):
        chain.after_cut([{"z": 1}], 0)
    assert chain.observed("r", {"x": 1}, 0) == 1
    with pytest.raises(Violation, match="1 is the last"):
        chain.acknowledged(other)
    chain.acknowledged(one)


def test_a_session_that_opened_without_it_excludes_it() -> None:
    chain = Chain()
    one = chain.attempt("a", 0, {"x": 1})
    chain.opened("b", {}, 0)
    with pytest.raises(Violation, match="does not know"):
        chain.acknowledged(one)
    with pytest.raises(Violation, match="nobody committed"):
        chain.observed("r", {"x": 1}, 0)
    assert len({content(length) for length in range(1, 100)}) == 99


@pytest.mark.slow
def test_processes_are_killed() -> None:
    """Two rounds of `python -m tests.volume.processes`."""
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"python -m tests.volume.processes --rounds 2 --seed {seed}")
    with tempfile.TemporaryDirectory() as folder:
        rounds = Rounds(Path(folder), seed)
        try:
            for _ in range(2):
                rounds.run(2.0)
            rounds.empty()
            assert rounds.counts["looks"] and rounds.counts["commits"]
        finally:
            rounds.close()
            print(rounds.counts, rounds.ends, *rounds.log, sep="\n")


def test_the_history_of_sessions() -> None:
    """What a successor may find, and what a zombie may have been told."""
    old = [{"session": 1, "opened": []}, {"committing": ["a"]}, {"acknowledged": ["a"]}, {"committing": ["a", "b"]}]
    for found, late, fine in (
        (["a"], [], True),
        (["a", "b"], [], True),
        (["a", "b"], [{"acknowledged": ["a", "b"]}], True),
        (["a"], [{"acknowledged": ["a", "b"]}], False),
        ([], [], False),
        (["a", "c"], [], False),
    ):
        history = History()
        assert history.session(1, [*old, *late]) == 1 + len(late)
        with nullcontext() if fine else pytest.raises(AssertionError, match="another state"):
            history.session(2, [{"session": 2, "opened": found}])
