"""Private gloo groups, made without torch's counters.

`dist.new_group` names a group by how many this process has made, or is in. Where ranks differ in that (one of them
failed between two groups; some are in more groups than others) they wait for one another at two places, until a
time-out or for ever. Here they meet in the store of the job (`coordination`), by who they are and what for, and the
group has the name that rank 0 draws there. A rank that does not come is told by its number, and the next meeting begins
afresh.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from headrace.errors import CheckpointFailed, UsageError
from headrace.torch.ranks.coordination import StoreExchange


@dataclass(frozen=True, kw_only=True)
class Private:
    """A group that no other part of the job talks over, and what its ranks agreed about."""

    group: dist.ProcessGroup
    rank: int
    world: int
    #: Rank of the job that is rank 0 of the group.
    source: int
    #: Equal on all of its ranks, and no other's.
    token: str


def private_group(group: dist.ProcessGroup | None, purpose: str, *, stall_s: float, deadline_s: float) -> Private:
    """Collective over the ranks of `group` (None: of the job), which make their groups for one purpose in one order.

    CheckpointFailed where a rank does not come within `deadline_s`, which is the group's time-out, too.
    """
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    me = dist.get_rank()
    if me not in members:
        raise UsageError("this rank is not one of process_group", found=f"rank {me}")
    rank, world = members.index(me), len(members)
    store = c10d._get_default_store()
    prefix = f"headrace/{purpose}/{hashlib.sha256(repr(members).encode()).hexdigest()[:32]}"
    meeting = StoreExchange(
        store, prefix, rank, world, stall_s=min(stall_s, deadline_s), deadline_s=deadline_s, doing="meeting"
    )
    with meeting.meeting():
        token = meeting.token
        try:
            # The one way to give torch the name of a group; DCP takes none that torch does not know of.
            made, _ = c10d._new_process_group_helper(
                world,
                rank,
                members,
                c10d.Backend(dist.Backend.GLOO),
                store.clone(),  # a client of its own
                f"headrace/{token}",  # type: ignore[arg-type]
                timeout=timedelta(seconds=deadline_s),
            )
        except RuntimeError as error:
            raise CheckpointFailed(
                "the ranks met, and could not connect",
                where=f"rank {rank} of {world}",
                found=str(error).splitlines()[0][:200],
                next_step="a rank ended behind the meeting, or its address cannot be reached (GLOO_SOCKET_IFNAME)",
            ) from error
    assert isinstance(made, dist.ProcessGroup)
    c10d._world.pg_group_ranks[made] = {of_job: number for number, of_job in enumerate(members)}
    return Private(group=made, rank=rank, world=world, source=members[0], token=token)


def leave(group: dist.ProcessGroup | None) -> None:
    """Of this process alone: the others need not come."""
    if group is not None and dist.is_initialized():
        # Another one that ended the job's groups took this one along.
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(group)
