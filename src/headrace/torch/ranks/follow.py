"""The ranks of a job follow a volume together: rank 0 looks, and all come to the state that it saw.

So a job of a thousand ranks costs the targets one reader's looks, and all ranks decide alike: a new shard, a new
checkpoint is there for everybody or for nobody. What is said goes over a gloo group of its own, never over that of
training; no rank waits in it for longer than a few seconds while nothing happens.
"""

from __future__ import annotations

import random
import time

import torch.distributed as dist

from headrace.errors import DeviceError, ObjectNotFound, UsageError, VolumeError
from headrace.torch.ranks.agreement import Ranks
from headrace.volume import ObjectInfo, Volume
from headrace.volume.follow import INTERVAL_S, LONGEST_S, Deadline, Pace

#: Rank 0 says so often, at least, that there is nothing yet.
ROUND_S = 5.0
#: Ranks that look at once, when there is something, spread over so much time that they are so many a second.
LOOKS_PER_S = 5000
#: A reader that comes after another one sees at least as much; tried more than once all the same.
_TRIES = 5


class Follower:
    """Made, and used, by all ranks of `group` (None: of the job) together; one process alone may have one, too.

    Args:
        volume: this rank's own, open. A session of it may be this process's.
        patience_s: how long a rank may be late. A rank that is gone ends the waiting of the others at once, mostly.
    """

    def __init__(self, volume: Volume, *, group: dist.ProcessGroup | None = None, patience_s: float = 600.0) -> None:
        if not patience_s > ROUND_S:
            raise UsageError("patience_s", expected=f"above {ROUND_S:g}", found=str(patience_s))
        self._volume = volume
        self._ranks = Ranks(group, deadline_s=patience_s, purpose="follow", failure=DeviceError)

    def look(self) -> int:
        """The sequence of the state that rank 0 sees; every rank sees that one, or a newer one, when this returns.

        Costs two small reads on rank 0 while nothing happens: call it at every step if you like. What rank 0 fails
        with, all ranks raise.
        """
        sequence = self._ranks.told(self._seen, "looking at the volume")
        self._come_to(sequence)
        return sequence

    def wait_for(
        self,
        name: str,
        *,
        timeout_s: float | None = None,
        interval_s: float = INTERVAL_S,
        longest_s: float = LONGEST_S,
    ) -> ObjectInfo:
        """The object `name`, once it is committed: `Volume.wait_for`, of which rank 0 does the looking."""
        pace, deadline = Pace(interval_s, longest_s), Deadline(timeout_s)
        while True:
            sequence = self._ranks.told(lambda: self._look_for(name, pace, deadline), f"waiting for {name!r}")
            if sequence is not None:
                self._come_to(sequence)
                return self._volume.stat(name)

    def close(self) -> None:
        """Of this process alone: the others need not come."""
        self._ranks.close()

    def _seen(self) -> int:
        self._volume.poll()
        return self._volume.sequence

    def _look_for(self, name: str, pace: Pace, deadline: Deadline) -> int | None:
        """On rank 0: the sequence where it is there; None: not yet."""
        now = Deadline(ROUND_S)
        while True:
            sequence = self._seen()
            if name in self._volume:
                return sequence
            wait_s = pace.wait_s()
            if not deadline.sleep(min(wait_s, ROUND_S)):
                raise ObjectNotFound(
                    f"no object {name!r} came", where=repr(self._volume), expected=f"within {deadline.timeout_s:g} s"
                )
            if now.over:
                return None

    def _come_to(self, sequence: int) -> None:
        for attempt in range(_TRIES):
            if self._volume.sequence >= sequence:
                return
            time.sleep(random.uniform(0, (attempt + 1) * self._ranks.world / LOOKS_PER_S))
            self._volume.refresh()
        if self._volume.sequence < sequence:
            raise VolumeError(
                "this rank does not see what rank 0 sees",
                where=repr(self._volume),
                expected=f"commit {sequence}",
                found=f"commit {self._volume.sequence}",
                next_step="is it the same volume, over the same members?",
            )
