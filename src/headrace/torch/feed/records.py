"""Batches of records out of a volume, decoded, in an order that any number of ranks shares.

    with RecordLoader(volume, "images", kinds=["jpg", "cls"], decode=to_tensors, global_batch=256, threads=4) as loader:
        for pictures, classes in loader:
            loss = model(pictures, classes)

The native engine reads `prefetch` batches ahead, and they are decoded as they come, by threads or processes of this
loader: training has nothing to wait for but the end of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import default_collate

from headrace.dataset.decoding.decoder import Record
from headrace.dataset.feed.options import FeedMetrics
from headrace.dataset.feed.records import RecordFeed, RecordFeedBatch, RecordFeedOptions
from headrace.dataset.order.mixture import Mixture
from headrace.dataset.order.records import RecordState
from headrace.dataset.records.records import Records
from headrace.errors import HeadraceError, UsageError
from headrace.torch.feed.loader import OrderOptions
from headrace.torch.feed.ordered import Ordered
from headrace.torch.feed.parallel import data_rank
from headrace.volume import Volume

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

Batch = TypeVar("Batch")


class RecordOptions(OrderOptions, total=False):
    """`headrace.dataset.RecordFeedOptions` says what each means, and the default."""

    ahead_bytes: int
    kept_bytes: int
    index_bytes: int
    threads: int
    processes: int


class RecordLoader(Ordered, Generic[Batch]):
    """Iterator over batches of decoded records. `rows` of a batch is `global_batch / accumulation / world`.

    `data`: a dataset of records of the volume, or a `Mixture` of several. `kinds`: fields that are read; None: all.

    `decode`: what becomes of one record, which it gets as its fields by kind, `{"jpg": memoryview}`: views of memory
    that lives as long as any of them. `threads` of them at a time, in the order of the samples; 0: in the call that
    asks for the batch. None: nothing, the fields as they are.

    `collate`: what becomes of the rows of a batch, a list of what `decode` gave. None: `default_collate` of PyTorch,
    which stacks arrays, tensors and numbers, also in tuples and dictionaries, or, where nothing is decoded, the list.

    Order, ranks, `mesh`, steps, states and errors are those of `TokenLoader`. A state fits the very records that it was
    saved with; a copy of them is another dataset. What `decode` raises comes out of the step of its batch, with a note
    that names the record, and the batch is the next one again.
    """

    _feed: RecordFeed[Any]
    _state = RecordState

    def __init__(
        self,
        volume: Volume,
        data: str | Mixture,
        *,
        global_batch: int,
        kinds: Sequence[str] | None = None,
        decode: Callable[[Record], Any] | None = None,
        collate: Callable[[list[Any]], Batch] | None = None,
        rank: int | None = None,
        world: int | None = None,
        mesh: DeviceMesh | None = None,
        mesh_dims: str | Sequence[str] | None = None,
        **options: Unpack[RecordOptions],
    ) -> None:
        rank, world = data_rank(rank, world, mesh, mesh_dims)
        self.options = RecordFeedOptions(global_batch=global_batch, rank=rank, world=world, **options)
        sources = {name: Records.open(volume, name) for name in (data.weights if isinstance(data, Mixture) else [data])}
        counts = [len(records) for records in sources.values()]
        shares = data.shares(counts) if isinstance(data, Mixture) else [1]
        self._collate = collate or (list if decode is None else default_collate)
        self._feed = RecordFeed(sources, self.options, shares=shares, kinds=kinds, decode=decode)
        self._last: RecordFeedBatch[Any] | None = None

    def __iter__(self) -> Self:
        counted = self._feed.counted
        try:
            self._feed.begin()
        except BaseException as error:
            if not isinstance(error, HeadraceError):
                self._feed.back_to(counted)
            raise
        return self

    def __next__(self) -> Batch:
        counted, last = self._feed.counted, self._last
        try:
            batch = self._feed.acquire()
            if batch is None:
                raise StopIteration
            made = self._collated(batch.items)
            self._last = batch
            return made
        except BaseException as error:
            # Rows that cannot be collated, or Ctrl-C, at whatever line: nothing was handed out, and the batch is the
            # next one again. An error of the feed's own has moved nothing.
            if self._feed.counted != counted or not isinstance(error, Exception):
                self._feed.back_to(counted)
                self._last = last
            raise

    @property
    def last_batch_ids(self) -> npt.NDArray[np.int64]:
        """Numbers of the records in the batch that was handed out last, row by row: int64[rows]. `UsageError` before
        the first batch."""
        return np.array(self._last_batch().samples, np.int64)

    @property
    def last_batch_datasets(self) -> list[str]:
        """Names of the datasets of the rows of the batch that was handed out last. `UsageError` before the first."""
        names = list(self._feed.sources)
        return [names[source] for source in self._last_batch().sources.tolist()]

    def metrics(self) -> FeedMetrics:
        """Counters of this rank; `headrace.metrics` has those of a node, and of paths."""
        return self._feed.metrics()

    def close(self) -> None:
        """Let go of what is ahead, and end who decodes. The volume stays open: it is the caller's."""
        self._feed.close()

    def _collated(self, rows: list[Any]) -> Batch:
        try:
            return cast(Batch, self._collate(rows))
        except StopIteration as error:
            # It would be the end of the batches.
            raise RuntimeError("StopIteration while a batch was collated") from error

    def _last_batch(self) -> RecordFeedBatch[Any]:
        if self._last is None:
            raise UsageError("no batch was handed out yet", where=self._feed.name)
        return self._last
