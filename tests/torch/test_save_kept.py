"""Ranks name their plans instead of sending them again; what comes of it is what DCP would have planned, whatever
befell the saves before."""

from __future__ import annotations

import contextlib
import pickle
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from headrace.checkpoint import CheckpointId, Summary
from headrace.errors import CheckpointFailed
from headrace.torch.metadata import Place, to_manifest
from headrace.torch.save import kept
from headrace.torch.save.kept import Whole, results_of
from headrace.torch.save.planning import Planned
from headrace.torch.save.staging import lay_out
from headrace.torch.save.writer import VolumeWriter

State = dict[str, Any]
WORLD = 3
STATES: list[State] = [
    {"w": torch.zeros(4, 3), "b": torch.zeros(7), "n": 1},
    {"w": torch.zeros(3, 4), "b": torch.zeros(7), "n": 1},
    {"w": torch.zeros(4, 3), "a": {"b": torch.zeros(7)}, "n": 1},
    {"w": torch.zeros(4, 3), "a.b": torch.zeros(7), "n": 1},
]


class Own(DefaultSavePlanner):
    pass


class Lost(Exception):
    pass


class Job:
    """The ranks of a writer without processes: what goes from one to another is pickled."""

    def __init__(self) -> None:
        self.writers = [VolumeWriter("mem:1MiB", "run") for _ in range(WORLD)]
        self.plans = [writer._plans for writer in self.writers]
        self.planners: list[Planned] = []
        #: Bytes of plans that went over the group.
        self.moved = 0

    def plan(
        self, states: list[State], lost: int | None = None, own: dict[int, SavePlanner] | None = None
    ) -> tuple[list[SavePlan], Metadata]:
        """`lost`: the rank that does not hear its part. `own`: planners of ranks that have another one."""
        planners = [(own or {}).get(rank) for rank in range(WORLD)]
        self.planners = [Planned(*rank) for rank in zip(states, planners, self.plans, strict=True)]
        asked = []
        for rank, planner in enumerate(self.planners):
            planner.set_up_planner({}, is_coordinator=rank == 0)
            asked.append(self._moved(self.writers[rank].prepare_local_plan(planner.create_local_plan())))
        parts, metadata = self.planners[0].create_global_plan(asked)
        heard = []
        for rank, (planner, part) in enumerate(zip(self.planners, parts, strict=True)):
            if rank == lost:
                raise Lost
            heard.append(planner.finish_plan(self._moved(part)))
        return heard, metadata

    def _moved(self, plan: SavePlan) -> SavePlan:
        data = pickle.dumps(plan)
        self.moved += len(data)
        found: SavePlan = pickle.loads(data)
        return found


def planned_by_dcp(states: list[State]) -> tuple[list[SavePlan], Metadata]:
    planners = [DefaultSavePlanner() for _ in states]
    plans = []
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, is_coordinator=rank == 0)
        plans.append(planner.create_local_plan())
    return planners[0].create_global_plan(plans)


def same(found: tuple[list[SavePlan], Metadata], wanted: tuple[list[SavePlan], Metadata]) -> bool:
    return found[0] == wanted[0] and vars(found[1]) == vars(wanted[1])


def test_what_did_not_change_is_not_sent_again() -> None:
    job, states = Job(), [STATES[0]] * WORLD
    first = job.plan(states)
    sent = job.moved
    again = job.plan(states)
    assert same(first, planned_by_dcp(states)) and same(again, first)
    assert job.moved - sent < sent / 3
    # DCP sends it to all ranks at the end of a save, and nobody looks at it.
    assert len(pickle.dumps(again[1])) < 200


def test_any_saves_in_a_row_have_the_plans_of_dcp() -> None:
    chance, job, left_out, full = random.Random(3), Job(), 0, 0
    states = [STATES[0]] * WORLD
    for _ in range(120):
        if chance.random() < 0.3:
            # Some of the ranks have another state: what is not of one shape for all, DCP does not plan.
            states = [chance.choice(STATES[2:])] * WORLD if chance.random() < 0.5 else [chance.choice(STATES)] * WORLD
            if chance.random() < 0.5:
                states = [state | {f"own{rank}": torch.zeros(rank + 1)} for rank, state in enumerate(states)]
        before = job.moved
        own = {chance.randrange(WORLD): Own()} if chance.random() < 0.2 else {}
        try:
            found = job.plan(states, chance.choice([None, None, None, *range(WORLD)]), own)
        except Lost:
            continue
        assert same(found, planned_by_dcp(states))
        short = job.moved - before < 3000
        left_out, full = left_out + short, full + (not short)
    assert min(left_out, full) > 8


def test_who_takes_for_granted_what_the_other_does_not_have_is_told_and_the_next_save_works() -> None:
    for forgets in ("coordinator", "rank"):
        job, states = Job(), [STATES[0]] * WORLD
        job.plan(states)
        if forgets == "coordinator":
            job.plans[0].whole = Whole()
        else:
            job.plans[2].part._plan = None
        with pytest.raises(CheckpointFailed, match="takes for granted"):
            job.plan(states)
        assert same(job.plan(states), planned_by_dcp(states))


def test_what_was_left_out_is_not_lost_where_a_rank_has_a_planner_of_its_own() -> None:
    for flat in (True, False):
        job, states = Job(), [STATES[0] | {f"own{rank}": torch.zeros(rank + 1)} for rank in range(WORLD)]
        wanted = job.plan(states)[1].state_dict_metadata
        for rank, lost in [(0, None), (0, None), (2, None), (0, 1), (2, 1)]:
            with contextlib.suppress(Lost):
                found = job.plan(states, lost, {rank: Own(flatten_state_dict=flat or rank > 0)})
                assert found[1].state_dict_metadata == wanted
                assert [planner.whole for planner in job.planners] == [None] * WORLD
            # Whoever was not asked for its plan by name has told it to nobody.
            assert same(job.plan(states), planned_by_dcp(states))


def test_a_coordinator_in_a_plain_save_does_not_go_on_without_what_was_left_out() -> None:
    job, states = Job(), [STATES[0]] * WORLD
    job.plan(states)
    plain = DefaultSavePlanner()
    plain.set_up_planner(states[0], is_coordinator=True)
    asked = [plain.create_local_plan(), *(planner.create_local_plan() for planner in job.planners[1:])]
    parts, _ = plain.create_global_plan(asked)
    with pytest.raises(CheckpointFailed, match="the same call"):
        job.writers[0].prepare_global_plan(parts)
    # Told again, it is a plan as any other.
    asked = [plain.create_local_plan(), *(planner.create_local_plan() for planner in job.planners[1:])]
    parts, _ = plain.create_global_plan(asked)
    job.writers[0].prepare_global_plan(parts)


def test_a_coordinator_keeps_no_more_items_than_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "KEPT_ITEMS", 8)
    job, states = Job(), [STATES[0]] * WORLD
    for _ in range(3):
        assert same(job.plan(states), planned_by_dcp(states))
        assert [planner.whole for planner in job.planners] == [None] * WORLD


def test_the_manifest_of_the_save_before_is_taken_where_the_bytes_of_all_items_are_the_same() -> None:
    job = Job()
    whole = job.plans[0].whole
    found = []
    # A number has as many bytes as another, a text has not.
    for step, text in enumerate(["abc", "xyz", "longer " * 100, "longer " * 100]):
        states = [STATES[0] | {"text": text}] * WORLD
        parts, _ = job.plan(states)
        id = CheckpointId("run", step)
        results, wanted = [], {}
        for rank, (part, planner) in enumerate(zip(parts, job.planners, strict=True)):
            staged = lay_out(part, planner)
            results.append(results_of(staged.items, staged.offsets, staged.lengths, id.data(rank), planner.whole))
            for item, offset, length in zip(staged.items, staged.offsets, staged.lengths, strict=True):
                wanted[item.index] = Place(id.data(rank), offset, length)
        assert whole.places(results, id) == wanted
        found.append(whole.like(results) is not None)
        summary = Summary(run="run", step=step, created_unix=0.0, ranks=WORLD, item_count=0, data_bytes=0)
        whole.keep(results, _manifest(summary))
        other = [replace(one, whole="another") for one in results if isinstance(one, kept.Lengths)]
        with pytest.raises(CheckpointFailed, match="another plan"):
            whole.places(other, id)
    assert found == [False, True, False, True]
    assert MetadataIndex("text") in wanted


def _manifest(summary: Summary) -> Any:
    return to_manifest(summary, Metadata({}), {}, [])
