"""What the ranks of a job tell one another beside training: a private gloo group, used by the main thread alone.

No message goes over the group of training: a rank may come here while another one's collective of training is still
under way. Nor over that of saves (`VolumeWriter.process_group`), in which another thread talks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from headrace.errors import CheckpointFailed, HeadraceError, UsageError

T = TypeVar("T")


class Ranks:
    """Made, and used, by all ranks of `group` (None: of the job) together. One process alone is rank 0 of 1.

    CheckpointFailed where a rank does not come within `deadline_s`, or is gone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, deadline_s: float = 600.0) -> None:
        #: None where there is one process.
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world, self._source = 0, 1, 0
        if not (dist.is_available() and dist.is_initialized()):
            return
        members = None if group is None else dist.get_process_group_ranks(group)
        private = dist.new_group(
            members,
            backend="gloo",
            timeout=timedelta(seconds=deadline_s),
            use_local_synchronization=members is not None,
        )
        if not isinstance(private, dist.ProcessGroup):
            raise UsageError("this rank is not one of process_group", found=f"rank {dist.get_rank()}")
        self.group = private
        self.rank, self.world = dist.get_rank(private), dist.get_world_size(private)
        self._source = dist.get_global_rank(private, 0)

    def highest(self, numbers: Sequence[float], doing: str) -> list[float]:
        """Of each of the numbers the highest that any rank gives."""
        if self.group is None:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.float64)
        with self._lost(doing):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return [float(number) for number in tensor]

    def gather(self, value: T, doing: str) -> list[T]:
        """What every rank gives, by rank, on all of them."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world
        with self._lost(doing):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def told(self, decide: Callable[[], T], doing: str) -> T:
        """What rank 0 decides, or fails with, on every rank."""
        message: list[Any] = [None]
        failure: BaseException | None = None
        if self.rank == 0:
            try:
                message = [decide()]
            except BaseException as error:
                failure = error
                message = [error if isinstance(error, HeadraceError) else CheckpointFailed(f"rank 0: {error!r}")]
        if self.group is not None:
            with self._lost(doing):
                dist.broadcast_object_list(message, src=self._source, group=self.group)
        if failure is not None:
            raise failure
        if isinstance(message[0], HeadraceError):
            raise message[0]
        told: T = message[0]
        return told

    @contextmanager
    def _lost(self, doing: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CheckpointFailed(
                f"the ranks have lost one another while {doing}",
                where=f"rank {self.rank} of {self.world}",
                found=str(error).splitlines()[0],
                next_step="a rank ended, or did not come so far in time: see the logs of the others",
            ) from error

    def close(self) -> None:
        """All ranks leave."""
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
