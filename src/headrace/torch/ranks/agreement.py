"""What the ranks of a job tell one another beside training: a private gloo group, used by the main thread alone.

No message goes over the group of training: a rank may come here while another one's collective of training is still
under way. Nor over that of saves (`VolumeWriter.process_group`), in which another thread talks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from headrace.errors import CheckpointFailed, HeadraceError
from headrace.torch.ranks.groups import leave, private_group

T = TypeVar("T")


class Ranks:
    """Made, and used, by all ranks of `group` (None: of the job) together. One process alone is rank 0 of 1.

    Args:
        purpose: whose group it is: those of one purpose are made in one order on all ranks.
        failure: raised where a rank does not come within `deadline_s`, or is gone.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        deadline_s: float = 600.0,
        purpose: str = "job",
        failure: type[HeadraceError] = CheckpointFailed,
    ) -> None:
        #: None where there is one process.
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world, self._source = 0, 1, 0
        self._failure = failure
        if dist.is_available() and dist.is_initialized():
            try:
                made = private_group(group, purpose, stall_s=60.0, deadline_s=deadline_s)
            except CheckpointFailed as error:
                raise failure(
                    error.what, where=error.where, expected=error.expected, found=error.found, next_step=error.next_step
                ) from error
            self.group, self.rank, self.world, self._source = made.group, made.rank, made.world, made.source

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
                message = [
                    error if isinstance(error, HeadraceError) else self._failure(f"rank 0 was stopped: {error!r}")
                ]
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
            raise self._failure(
                f"the ranks have lost one another while {doing}",
                where=f"rank {self.rank} of {self.world}",
                found=str(error).splitlines()[0],
                next_step="a rank ended, or did not come so far in time: see the logs of the others",
            ) from error

    def close(self) -> None:
        """Of this process alone: the others need not come."""
        group, self.group = self.group, None
        leave(group)
