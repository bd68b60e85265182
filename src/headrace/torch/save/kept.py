"""What the ranks of one writer tell each other of their plans once, and not again while nothing of it changes.

DCP's two collectives carry the plan of every rank to the coordinator and its part of the whole back, then a result for
each item to the coordinator, and what all of it is to everybody: pickles of all items, four times in every save.
The plans of a job are those of the save before, so here they are named:

    first   rank: its plan, with a name   ->  coordinator: plans the whole, keeps it     ->  rank: its part, keeps that
    then    rank: the names of both       ->  coordinator: these plans, so that whole    ->  rank: the name of it
            rank: the bytes of each item  ->  coordinator: the manifest of the save before, with another step

A rank leaves its plan out only where the save before gave it a part: whatever ended a save in between, it comes in full
again. The coordinator leaves out a part only where that rank says that it has it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from headrace.checkpoint import CheckpointId, Manifest
from headrace.checkpoint.layout import pack
from headrace.errors import CheckpointFailed
from headrace.torch.metadata import Place

#: Items of all ranks that a coordinator keeps, of 2 KB each: half a GiB. With more every save plans anew.
KEPT_ITEMS = 1 << 18


@dataclass(frozen=True)
class Asked:
    """`storage_data` of a rank's own plan."""

    plan: str
    #: The plan is that of the save before, and not in here.
    left_out: bool
    #: The whole of which the rank has its part.
    whole: str | None


@dataclass(frozen=True)
class Answered:
    """`storage_data` of a rank's part. Without items it is the one that the rank has."""

    whole: str
    left_out: bool


@dataclass(frozen=True)
class Lengths:
    """Instead of a `WriteResult` for each item of a part that the coordinator has: uint64[items], little-endian."""

    whole: str
    lengths: bytes


#: Of one rank, as it goes to the coordinator.
Results: TypeAlias = "list[WriteResult] | Lengths"


class Quiet(Metadata):
    """Of the whole. DCP sends it to all ranks when a save is done, where nobody looks at it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Metadata, ({},)


class Part:
    """What a rank remembers."""

    def __init__(self) -> None:
        self._name = ""
        #: The coordinator has the plan of this name.
        self._told: str | None = None
        self._whole: str | None = None
        self._plan: SavePlan | None = None
        #: Of which the save under way is, if the coordinator keeps it.
        self.whole: str | None = None

    def renamed(self) -> None:
        """The rank plans otherwise from now on."""
        self._name = uuid.uuid4().hex

    def ask(self, plan: SavePlan) -> SavePlan:
        """What goes to the coordinator for this plan."""
        told, self._told = self._told == self._name, None
        asked = Asked(self._name, told, self._whole)
        return SavePlan([], storage_data=asked, planner_data={}) if told else replace(plan, storage_data=asked)

    def went(self, plan: SavePlan) -> None:
        """This is what goes to the coordinator. By another planner, it makes that forget what it was told before."""
        if not isinstance(plan.storage_data, Asked):
            self._told = None

    def heard(self, plan: SavePlan) -> SavePlan:
        """What the rank writes: its part, of which this came from the coordinator."""
        answer, self.whole = plan.storage_data, None
        if not isinstance(answer, Answered):
            self._whole = self._plan = None
            return plan
        if answer.left_out:
            if self._plan is None or self._whole != answer.whole:
                # So that the next save brings it.
                self._whole = None
                raise CheckpointFailed("the coordinator takes for granted what this rank does not have")
        else:
            self._plan = replace(plan, storage_data=None)
        assert self._plan is not None
        self._told = self._name
        self.whole = self._whole = answer.whole
        return self._plan


@dataclass(frozen=True, kw_only=True)
class _Whole:
    name: str
    #: Of the plans that it was made of, and the options that it was made with.
    made_of: tuple[Any, ...]
    parts: list[SavePlan]
    metadata: Metadata


class Whole:
    """What the coordinator remembers."""

    def __init__(self) -> None:
        self._plans: dict[int, tuple[str, SavePlan]] = {}
        self._whole: _Whole | None = None
        self._results: tuple[Lengths, ...] = ()
        self._manifest: Manifest | None = None

    def plan(self, planner: DefaultSavePlanner, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """`planner.create_global_plan`, for what ranks asked."""
        asked = [plan.storage_data for plan in plans]
        names = tuple(one.plan if isinstance(one, Asked) else None for one in asked)
        made_of = (names, planner.flatten_state_dict, planner.dedup_save_to_lowest_rank)
        if self._whole is None or self._whole.made_of != made_of:
            found = self._make(planner, self.full(plans), made_of)
            if self._whole is None:
                return found
        whole = self._whole
        answers = [
            SavePlan([], storage_data=Answered(whole.name, True))
            if one.whole == whole.name
            else replace(part, storage_data=Answered(whole.name, False))
            for one, part in zip(asked, whole.parts, strict=True)
        ]
        return answers, whole.metadata

    def full(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """With what ranks left out, for a planner that plans the whole itself."""
        return [self._full(rank, plan) for rank, plan in enumerate(plans)]

    def _full(self, rank: int, plan: SavePlan) -> SavePlan:
        asked = plan.storage_data
        if not isinstance(asked, Asked):
            return plan
        if not asked.left_out:
            self._plans[rank] = (asked.plan, replace(plan, storage_data=None))
        name, found = self._plans.get(rank, ("", plan))
        if name != asked.plan:
            raise CheckpointFailed(f"rank {rank} takes for granted what the coordinator does not have")
        return found

    def _make(
        self, planner: DefaultSavePlanner, plans: list[SavePlan], made_of: tuple[Any, ...]
    ) -> tuple[list[SavePlan], Metadata]:
        self._whole = self._manifest = None
        parts, metadata = planner.create_global_plan(plans)
        quiet = Quiet(**vars(metadata))
        if None in made_of[0] or sum(len(plan.items) for plan in plans) > KEPT_ITEMS:
            self._plans.clear()
        else:
            self._whole = _Whole(name=uuid.uuid4().hex, made_of=made_of, parts=parts, metadata=quiet)
        return parts, quiet

    # ---- what was written --------------------------------------------------------------------------------------

    def places(self, results: Sequence[Results], id: CheckpointId) -> dict[MetadataIndex, Place]:
        """Where each item lies. CheckpointFailed for results of another whole."""
        found: dict[MetadataIndex, Place] = {}
        for rank, of_rank in enumerate(results):
            if not isinstance(of_rank, Lengths):
                found.update((result.index, result.storage_data) for result in of_rank)
                continue
            whole = self._whole
            items = whole.parts[rank].items if whole is not None and whole.name == of_rank.whole else []
            lengths = np.frombuffer(of_rank.lengths, "<u8").tolist()
            if len(items) != len(lengths):
                raise CheckpointFailed(
                    "a rank wrote another plan than the coordinator has",
                    where=f"rank {rank}",
                    expected=f"{len(items)} items",
                    found=str(len(lengths)),
                )
            name = id.data(rank)
            for item, offset, length in zip(items, pack(lengths)[0], lengths, strict=True):
                found[item.index] = Place(name, offset, length)
        return found

    def like(self, results: Sequence[Results]) -> Manifest | None:
        """That of a save with the same results, which differs in its summary and the names of objects alone."""
        return self._manifest if self._results and list(self._results) == list(results) else None

    def keep(self, results: Sequence[Results], manifest: Manifest) -> None:
        named = tuple(one for one in results if isinstance(one, Lengths))
        self._results = named if len(named) == len(results) else ()
        self._manifest = manifest if self._results else None


def refuse_left_out(plans: Sequence[SavePlan]) -> None:
    """CheckpointFailed where a part is of a plan that was left out, by a planner that does not know of that: what the
    rank has would be in no checkpoint."""
    for rank, plan in enumerate(plans):
        if isinstance(plan.storage_data, Asked) and plan.storage_data.left_out:
            raise CheckpointFailed(
                "the ranks do not save with the same call",
                where=f"rank {rank}",
                expected="a plan, for a coordinator in dcp.save",
                found="the name of one, of writer.save",
                next_step="save with writer.save on every rank, or with dcp.save on every rank",
            )


def results_of(
    items: Sequence[WriteItem], offsets: Sequence[int], lengths: Sequence[int], name: str, whole: str | None
) -> Results:
    """What a rank that wrote these items to the object `name` says of it."""
    if whole is not None:
        return Lengths(whole, np.array(lengths, "<u8").tobytes())
    return [
        WriteResult(index=item.index, size_in_bytes=length, storage_data=Place(name, offset, length))
        for item, offset, length in zip(items, offsets, lengths, strict=True)
    ]


__all__ = ["Lengths", "Part", "Results", "Whole", "refuse_left_out", "results_of"]
