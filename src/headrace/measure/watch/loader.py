"""Any loader, watched: what is iterated over stays what it was, and `next` is timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headrace.errors import UsageError
from headrace.measure.watch.source import Source

if TYPE_CHECKING:
    from headrace.measure.watch.watch import Watch

Batch = TypeVar("Batch")


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
        wait = watch.waiting(source)
        source.begin()
        iterator: Iterator[Batch] | None = None
        batch: Any = None
        number: int | None = None
        bytes_of = source.batch_bytes if source.teller is None else 0
        size = 0 if callable(bytes_of) else bytes_of or 0
        try:
            while True:
                if count % self._per_step == 0:
                    number = watch.begin_step()
                wait.begin()
                try:
                    if iterator is None:
                        iterator = iter(self._batches)
                    batch = next(iterator, _END)
                except BaseException:
                    wait.end()
                    raise
                if batch is _END:
                    wait.end()
                    return
                wait.end(size)
                count += 1
                if callable(bytes_of):
                    watch.add_bytes(int(bytes_of(batch)))
                yield batch
        finally:
            # Also where the loop was left. A wait for a batch that did not come is no step.
            watch.leave_loop(number, drop=iterator is not None and batch is _END and count % self._per_step == 0)

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
