"""What is known of a loader that steps wait for: what it tells of itself, and what its helpers do meanwhile."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from typing import Any

from headrace.measure.watch import host
from headrace.measure.watch.wait import HelperShares, Used, teller_of

#: Of a loader that does not tell, and works in threads of its own or not at all.
NOTHING_TOLD = (None, -1)
#: A wait is long from so many times on what looking at helpers costs.
_LONG = 200


class Source:
    """Of one loader, over all its epochs."""

    def __init__(self, batches: Any, batch_bytes: int | Callable[[Any], int] | None = None) -> None:
        self.teller = teller_of(batches)
        self.batch_bytes = batch_bytes
        #: In the thread that trains.
        self._works = False
        #: A wait has nothing to ask it for.
        self.quiet = self.teller is None
        self.helpers = host.Helpers()
        #: What they do, as was seen in the last wait in which they were looked at; None: there are none.
        self.shares: HelperShares | None = None
        #: A wait that begins now is one in which they are looked at; until it ends what they had done before.
        self.look_at = math.inf
        self.before: dict[str, Used] | None = None
        self._since = 0.0
        #: When it was last read what they had done, and what; a wait of less is not worth another reading.
        self._seen: tuple[float, dict[str, Used]] = (0.0, {})
        self._long_s = math.inf
        #: Tasks before its first batch of an epoch.
        self._tasks: set[str] | None = None
        #: There were helpers; or the loader tells, as those of headrace do, which read ahead.
        self._reads_ahead = self.teller is not None
        self._last: dict[str, Used] = {}

    @property
    def devices(self) -> list[Any]:
        """Of a loader of headrace: what it reads from."""
        return list(getattr(self.teller, "devices", None) or ())

    def told(self) -> tuple[tuple[float, float, int] | None, int]:
        """What a loader that tells has counted; and how often the thread that trains has let go of its CPU to wait for
        something, where it works in that: else -1, not asked for."""
        sleeps = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if self._works else -1
        return None if self.teller is None else self.teller.waited, sleeps

    def see(self, *, works: bool) -> None:
        """Whether it did in the last long wait."""
        self._works, self.quiet = works, self.teller is None and not works

    def begin(self) -> None:
        """It begins: who comes from now on, until its first batch is there, helps it."""
        self._tasks, self.look_at = host.tasks(), 0.0

    def look(self) -> None:
        """A step begins to wait for a batch."""
        # Those of an epoch before; who comes has done nothing yet.
        self.before = self.helpers.read()
        self._since = time.perf_counter()

    def looked(self) -> HelperShares | None:
        """The batch is there: what they did."""
        wall_s = time.perf_counter() - self._since
        before, self.before = self.before or {}, None
        if self._tasks is not None:
            self.helpers.add(host.tasks() - self._tasks)
            self._tasks = None
            before = dict.fromkeys(self.helpers.read(), (0.0, 0.0)) | before
        started = time.thread_time()
        after = self.helpers.read()
        self.shares = HelperShares.of(before, after, wall_s) if after else None
        self._reads_ahead |= bool(after)
        # They were read twice.
        cost_s, now = 2 * (time.thread_time() - started), time.perf_counter()
        self.look_at = now + cost_s / host.COST if after else math.inf
        self._seen, self._long_s = (now, after), _LONG * cost_s if after else math.inf
        return self.shares

    def shares_in(self, wall_s: float) -> HelperShares | None:
        """In a wait that has ended and in which they were not looked at: as in the last one, but for one that was most
        of the time since. A stall says nothing of other waits, and they nothing of it."""
        if wall_s <= self._long_s:
            return self.shares
        now = time.perf_counter()
        since, before = self._seen
        if 2 * wall_s < now - since:
            return self.shares
        after = self.helpers.read()
        self._seen = now, after
        return HelperShares.of(before, after, now - since)

    def counters(self) -> dict[str, Any]:
        """Of its helpers, since it was asked before."""
        now, last = self.helpers.read(), self._last
        self._last, self._seen = now, (time.perf_counter(), now)
        found: dict[str, Any] = {"reads_ahead": self._reads_ahead, "reads_apart": self.teller is not None}
        if not now:
            return found
        on_cpu, waiting = (sum(used[i] - last.get(name, (0.0, 0.0))[i] for name, used in now.items()) for i in (0, 1))
        return found | {
            "helpers": len(now), "helpers_cpu_s": round(on_cpu, 4),
            "helpers_run_queue_s": round(waiting, 4),
        }  # fmt: skip
