"""Any loader, watched: what is iterated over stays what it was, and `next` is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headrace.errors import UsageError
from headrace.measure.watch import host
from headrace.measure.watch.wait import HelperShares, teller_of

if TYPE_CHECKING:
    from headrace.measure.watch.watch import Watch

Batch = TypeVar("Batch")


class Source:
    """What is known of a loader that steps wait for, over all its epochs."""

    def __init__(self, batches: Any, batch_bytes: int | Callable[[Any], int] | None = None) -> None:
        self.teller = teller_of(batches)
        self.batch_bytes = batch_bytes
        self.helpers = host.Helpers()
        self.shares = HelperShares()
        self._before: set[str] | None = None
        #: Since helpers were looked at: waits of steps, how many steps waited, and how many there were.
        self.wait_s = 0.0
        self.waits = self.steps = 0

    def before(self) -> None:
        """It begins: who comes from now on, until the first batch is there, helps it."""
        self._before = host.tasks()

    def begun(self) -> None:
        if self._before is not None:
            self.helpers.add(host.tasks() - self._before)
            self._before = None

    def bytes_of(self, batch: Any) -> int:
        if callable(self.batch_bytes):
            return int(self.batch_bytes(batch))
        return self.batch_bytes or 0

    def look(self, window_s: float) -> dict[str, Any]:
        """What its helpers did in a window; the shares are those of it from now on."""
        count, on_cpu, waited = self.helpers.since()
        if not count:
            return {"reads_ahead": self.teller is not None}
        if self.wait_s > 0:
            bound = self.waits * 2 >= self.steps
            self.shares.update(count, on_cpu, waited, window_s, self.wait_s, bound)
        self.wait_s, self.waits, self.steps = 0.0, 0, 0
        return {
            "reads_ahead": True,
            "helpers": count,
            "helpers_cpu_s": round(on_cpu, 4),
            "helpers_run_queue_s": round(waited, 4),
        }


class WatchedLoader(Generic[Batch]):
    """Iterates over what it was made of, any number of times; all else is that loader's own."""

    def __init__(self, watch: Watch, batches: Any, source: Source, batches_per_step: int) -> None:
        if batches_per_step < 1:
            raise UsageError("batches_per_step", expected="1 or more", found=str(batches_per_step))
        self._watch = watch
        self._batches = batches
        self._source = source
        self._per_step = batches_per_step
        self._running: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        watch, source, count = self._watch, self._source, 0
        source.before()
        iterator: Iterator[Batch] | None = None
        batch: Any = None
        try:
            while True:
                if count % self._per_step == 0:
                    watch.begin_step()
                with watch.waiting(source):
                    if iterator is None:
                        iterator = iter(self._batches)
                    batch = next(iterator, _END)
                if batch is _END:
                    return
                if not count:
                    source.begun()
                count += 1
                if source.teller is None:
                    watch.add_bytes(source.bytes_of(batch))
                yield batch
        finally:
            # Also where the loop was left. A wait for a batch that did not come is no step.
            watch.leave_loop(drop=iterator is not None and batch is _END and count % self._per_step == 0)

    def __next__(self) -> Batch:
        """For `next(loader)`."""
        if self._running is None:
            self._running = iter(self)
        try:
            return next(self._running)
        except StopIteration:
            self._running = None
            raise

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._batches, name)


#: What `next` gives at the end of a loader.
_END: Any = object()
