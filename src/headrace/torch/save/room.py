"""Room for the checkpoints of a job, kept before its first step: a volume that is too small says so then."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from headrace.checkpoint import Retention
from headrace.checkpoint.layout import ITEM_ALIGNMENT
from headrace.checkpoint.retention import reserve
from headrace.errors import CheckpointFailed, HeadraceError
from headrace.torch.ranks.attachment import Attachment
from headrace.torch.save.staging import lay_out
from headrace.units import KIB

#: What the object of a rank takes beside its items, at most: it ends at a whole block, and has a table of checksums.
OBJECT_ROOM_BYTES = 64 * KIB

#: Name and offsets of an item -> its bytes: what several ranks have is written by one of them.
_Items: TypeAlias = dict[tuple[str, tuple[int, ...]], int]


def reserve_room(
    state_dict: dict[str, Any],
    attachment: Attachment,
    run: str,
    retention: Retention | None,
    group: dist.ProcessGroup | None,
) -> int:
    """Bytes of one checkpoint of this state, for which the coordinator has kept room. Collective over `group`.

    Every rank raises what any of them met.
    """
    everybody = _gathered(_measured(state_dict, group), group)
    answer: int | HeadraceError = 0
    if everybody is not None:
        try:
            answer = _reserved(everybody, attachment, run, retention)
        except HeadraceError as error:
            answer = error
    if group is not None:
        said = [answer]
        dist.broadcast_object_list(said, src=dist.get_global_rank(group, 0), group=group)
        answer = said[0]
    if isinstance(answer, HeadraceError):
        raise answer
    return answer


def _measured(state_dict: dict[str, Any], group: dist.ProcessGroup | None) -> _Items | HeadraceError:
    """As the default planner would have this rank write it; no tensor is touched."""
    try:
        planner = DefaultSavePlanner()
        planner.set_up_planner(state_dict, None, group is None or dist.get_rank(group) == 0)
        staged = lay_out(planner.create_local_plan(), planner)
    except HeadraceError as error:
        return error
    except Exception as error:
        # The others wait for what this rank has.
        return CheckpointFailed("this state cannot be saved", found=f"{type(error).__name__}: {error}")
    places = ((item.index.fqn, tuple(item.index.offset or ())) for item in staged.items)
    return dict(zip(places, staged.lengths, strict=True))


def _gathered(mine: _Items | HeadraceError, group: dist.ProcessGroup | None) -> list[_Items | HeadraceError] | None:
    """On the coordinator what every rank has, else None."""
    if group is None:
        return [mine]
    first = dist.get_rank(group) == 0
    found: list[Any] | None = [None] * dist.get_world_size(group) if first else None
    dist.gather_object(mine, found, dst=dist.get_global_rank(group, 0), group=group)
    return found


def _reserved(
    everybody: list[_Items | HeadraceError], attachment: Attachment, run: str, retention: Retention | None
) -> int:
    items: _Items = {}
    for rank, found in enumerate(everybody):
        if isinstance(found, HeadraceError):
            found.what = f"rank {rank}: {found.what}"
            raise found
        items |= found
    total = sum(items.values())
    room = total + len(items) * ITEM_ALIGNMENT + len(everybody) * OBJECT_ROOM_BYTES
    reserve(attachment.session(), run, room, retention)
    return total
