"""The plan of one rank's save, without what costs again for each tensor of each save.

torch logs every key at the top of a state dict that goes through `save`, and asks every DTensor where its shard lies:
a quarter of a millisecond a tensor, on the way of a save and on each rank. So the state does not go that way, and what
a rank plans is kept as long as all that it was made of stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from headrace.torch.save.kept import Part, Whole

#: All that `DefaultSavePlanner` makes an item of, in the order of the state.
Signature: TypeAlias = "list[tuple[Any, ...]]"


def plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """As DCP does: what has a `state_dict` at the top stands for that."""
    # Whether a tensor is Stateful takes thirty times as long to find out as whether it is a tensor.
    return {
        key: value.state_dict() if not isinstance(value, torch.Tensor) and isinstance(value, Stateful) else value
        for key, value in state.items()
    }


class Plans:
    """What a writer keeps: the items of its last plan, and what they were made of; what it told the others of it."""

    def __init__(self) -> None:
        self._made_of: Signature | None = None
        self._names: Any = None
        self._items: list[WriteItem] = []
        self.part = Part()
        #: On the coordinator.
        self.whole = Whole()

    def create(self, planner: DefaultSavePlanner) -> SavePlan:
        """`planner.create_local_plan()`."""
        made_of = signature(planner.state_dict)
        names = planner.mappings if planner.flatten_state_dict else None
        if made_of is None or made_of != self._made_of:
            plan = planner.create_local_plan()
            self._made_of, self._names, self._items = made_of, names, list(plan.items)
            self.part.renamed()
            return plan
        if names != self._names:
            self._names = names
            self.part.renamed()
        planner.plan = SavePlan(list(self._items), planner_data=names)
        return planner.plan

    def ask(self, planner: DefaultSavePlanner) -> SavePlan:
        """The same, as it goes to the coordinator."""
        plan = self.create(planner)
        return plan if self._made_of is None else self.part.ask(plan)


def signature(state: Mapping[str, Any]) -> Signature | None:
    """None where there are kinds of tensors that plan for themselves."""
    rows: Signature = []
    for name, value in state.items():
        kind = type(value)
        if kind is DTensor:
            local = getattr(value, "_local_tensor", None)
            if type(local) is not torch.Tensor:
                return None
            rows.append((name, kind, value.device_mesh, value.placements, value.shape, *_facts(local)))
        elif kind in (torch.Tensor, torch.nn.Parameter):
            rows.append((name, kind, *_facts(value)))
        elif isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
            return None
        else:
            # An item of bytes: its plan has its name alone.
            rows.append((name,))
    return rows


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.layout, tensor.requires_grad, tensor.is_pinned()


class Planned(SavePlanner):
    """A planner whose plans are kept. With a `state` it has that already, whatever `save` is given."""

    def __init__(self, state: Mapping[str, Any] | None, planner: SavePlanner | None, plans: Plans) -> None:
        self._state = state
        self._planner = planner or DefaultSavePlanner()
        self._plans = plans

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        # Here an error of this rank reaches the others.
        state = state_dict if self._state is None else plain(self._state)
        if "storage_meta" in inspect.signature(self._planner.set_up_planner).parameters:
            self._planner.set_up_planner(state, storage_meta=storage_meta, is_coordinator=is_coordinator)
        else:
            # One that was written for an older torch.
            self._planner.set_up_planner(state, is_coordinator=is_coordinator)

    def create_local_plan(self) -> SavePlan:
        planner = self._default()
        return self._planner.create_local_plan() if planner is None else self._plans.ask(planner)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        planner = self._default()
        if planner is None:
            return self._planner.create_global_plan(self._plans.whole.full(all_plans))
        return self._plans.whole.plan(planner, all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return self._planner.finish_plan(self._plans.part.heard(new_plan))

    def _default(self) -> DefaultSavePlanner | None:
        """The planner, where it is one whose plans are known to be made of the state alone."""
        planner = self._planner
        kept = type(planner) is DefaultSavePlanner and not getattr(planner, "_enable_plan_caching", False)
        return planner if kept and isinstance(planner, DefaultSavePlanner) else None

    @property
    def whole(self) -> str | None:
        """Of which the plan that was finished is a part, where the coordinator keeps it."""
        return self._plans.part.whole

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._planner.resolve_data(write_item)


__all__ = ["Planned", "Plans", "plain", "signature"]
