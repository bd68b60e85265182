"""Batches out of a volume, as tensors, in an order that any number of ranks shares.

    with TokenLoader(volume, "corpus", sequence_length=1024, global_batch=32, seed=1) as loader:
        for batch in loader:                       # int64 [32 / world, 1025]
            loss = model(batch[:, :-1], batch[:, 1:])

    with DocumentLoader(volume, "corpus", sequence_length=1024, global_batch=32, seed=1) as loader:
        for batch in loader:                       # whole documents, packed: input_ids, labels, position_ids, ...
            loss = model(**batch)

No worker processes: the native engine keeps `prefetch` batches ahead in a fixed ring. Every tensor that is handed out
is the caller's own (widening the tokens to int64 is the copy), so nothing it holds is ever overwritten.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh

from headrace.dataset.feed.feed import Feed, FeedBatch, FeedMetrics, FeedOptions
from headrace.dataset.feed.ring import check_memory
from headrace.dataset.order.mixture import Mixture
from headrace.dataset.order.state import LoaderState
from headrace.dataset.tokens.samples import WINDOWS, Samples, open_samples
from headrace.dataset.tokens.segments import IGNORED
from headrace.dataset.tokens.stream import TokenStream
from headrace.errors import HeadraceError, UsageError
from headrace.torch.feed.ordered import Ordered
from headrace.torch.feed.parallel import data_rank
from headrace.torch.feed.reused import Reused
from headrace.volume import Volume

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

Batch = TypeVar("Batch")


class Documents(TypedDict):
    """A batch of documents. `rows` is `global_batch / accumulation / world`."""

    #: int64[rows, sequence_length].
    input_ids: torch.Tensor
    #: int64[rows, sequence_length]: what comes next, and -100 (what losses ignore) where that is of another document,
    #: or padding.
    labels: torch.Tensor
    #: int64[rows, sequence_length]: from 0 in every document, or part of one, and in padding.
    position_ids: torch.Tensor
    #: int32[segments + 1]: where documents begin in the inputs, all rows one after another, and the end,
    #: rows * sequence_length. The padding of a row counts as one.
    cu_seqlens: torch.Tensor
    #: Of the longest segment.
    max_seqlen: int


class OrderOptions(TypedDict, total=False):
    """`headrace.dataset.FeedOptions` says what each means, and the default."""

    accumulation: int
    seed: int
    prefetch: int
    epochs: int | None
    stall_timeout_s: float
    verify: bool
    stage: str | None
    allow_global_batch_change: bool


class LoaderOptions(OrderOptions, total=False):
    """What both loaders take."""

    rank: int | None
    world: int | None
    mesh: DeviceMesh | None
    mesh_dims: str | Sequence[str] | None
    device: torch.device | str | None


class _Loader(Ordered, ABC, Generic[Batch]):
    """What the loaders of tokens share: ring, device."""

    _feed: Feed
    _state = LoaderState

    def __init__(
        self,
        volume: Volume,
        data: str | Mixture,
        *,
        sequence_length: int,
        global_batch: int,
        samples: str | Mapping[str, str],
        pad_id: int | None = None,
        rank: int | None = None,
        world: int | None = None,
        mesh: DeviceMesh | None = None,
        mesh_dims: str | Sequence[str] | None = None,
        device: torch.device | str | None = None,
        **order: Unpack[OrderOptions],
    ) -> None:
        rank, world = data_rank(rank, world, mesh, mesh_dims)
        options = FeedOptions(
            sequence_length=sequence_length, global_batch=global_batch, rank=rank, world=world, **order
        )
        self.options = options
        self._device = _usable(device)
        sources = open_sources(volume, data, samples, sequence_length)
        counts = [each.sample_count for each in sources.values()]
        shares = data.shares(counts) if isinstance(data, Mixture) else [1]
        self._pinned: list[torch.Tensor] = []
        #: CUDA: the buffer that the last copy reads from, and when it has.
        self._copied: tuple[torch.cuda.Event, FeedBatch] | None = None
        shape = (options.local_batch, sequence_length + 1)
        kind = torch.uint16 if next(iter(sources.values())).stream.dtype == np.uint16 else torch.int32

        def pinned() -> npt.NDArray[Any]:
            self._pinned = []
            # One more than is read ahead: the one that is being copied.
            count = options.prefetch + 1
            check_memory(count, options.local_batch, shape[1] * kind.itemsize)
            memory = torch.empty((count, *shape), dtype=kind, pin_memory=True)
            self._pinned = list(memory)
            return memory.numpy()

        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        buffers = pinned if self._device.type == "cuda" else None
        self._feed = Feed(sources, options, shares=shares, buffers=buffers, pad_id=pad_id)
        self._made = Reused(shape)
        #: Sources and samples of the batch that was handed out last.
        self._last: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None

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
            self._release_copied()
            batch = self._feed.acquire()
            if batch is None:
                raise StopIteration
            made = self._make(batch)
            self._last = batch.sources, batch.samples
            if self._copied is None:
                self._feed.release(batch)
            return made
        except BaseException as error:
            # Memory of the device that is short, or Ctrl-C, at whatever line: nothing was handed out, and the batch is
            # the next one again. An error of the feed's own has moved nothing.
            if self._feed.counted != counted or not isinstance(error, HeadraceError | StopIteration):
                self._feed.back_to(counted)
                self._copied, self._last = None, last
            raise

    @abstractmethod
    def _make(self, batch: FeedBatch) -> Batch:
        """What the caller gets; the batch's buffer is free for the next one afterwards."""

    @property
    def last_batch_ids(self) -> npt.NDArray[np.int64]:
        """Numbers of the samples in the batch that was handed out last, row by row: int64[rows]. Sample s of windows is
        tokens `[s * sequence_length, (s + 1) * sequence_length]` of the dataset. `UsageError` before the first
        batch."""
        return np.array(self._last_batch()[1], np.int64)

    @property
    def last_batch_datasets(self) -> list[str]:
        """Names of the datasets of the rows of the batch that was handed out last. `UsageError` before the first."""
        names = list(self._feed.sources)
        return [names[source] for source in self._last_batch()[0].tolist()]

    @property
    def ring_bytes(self) -> int:
        """Memory that the loader holds for batches that are read ahead. In ordinary memory that of two more batches is
        kept to be used again."""
        return self._feed.ring_bytes

    def metrics(self) -> FeedMetrics:
        """Counters of this rank; `headrace.metrics` has those of a node, and of paths."""
        return self._feed.metrics()

    def close(self) -> None:
        """Let go of the ring. The volume stays open: it is the caller's."""
        self._release_copied()
        self._feed.close()

    def _last_batch(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self._last is None:
            raise UsageError("no batch was handed out yet", where=self._feed.where)
        return self._last

    def _tokens(self, batch: FeedBatch) -> torch.Tensor:
        """int64[rows, sequence_length + 1], the caller's own."""
        if self._device.type == "cuda":
            return self._to_cuda(batch)
        return self._made.tensor(batch.tokens)

    def _to_cuda(self, batch: FeedBatch) -> torch.Tensor:
        consumer = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            narrow = self._pinned[batch.slot].to(self._device, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
            # CUDA has few kernels for uint16; its bits as int16, widened and masked, are the same numbers.
            if narrow.dtype == torch.uint16:
                tensor = narrow.view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
            else:
                tensor = narrow.to(torch.int64)
        consumer.wait_stream(self._stream)
        # Made on another stream than it is used on: the allocator must not give its memory away too early.
        tensor.record_stream(consumer)
        self._copied = (copied, batch)
        return tensor

    def _release_copied(self) -> None:
        if self._copied is not None:
            event, batch = self._copied
            event.synchronize()
            self._copied = None
            self._feed.release(batch)


class TokenLoader(_Loader[torch.Tensor]):
    """Iterator over int64 tensors `[rows, sequence_length + 1]`: inputs and targets in one, contiguous windows of the
    tokens, whatever documents they are of. `rows` is `global_batch / accumulation / world`.

    `data`: a dataset of the volume, or a `Mixture` of several.

    Step k is samples `[k * global_batch, (k + 1) * global_batch)` of the global order. A step comes in `accumulation`
    batches, equal parts of it one after another, and rank r of w has the r-th of the w equal, contiguous parts of each:
    the union over the ranks is the same for every w. Epochs follow one another without a gap.

    `rank`, `world`: from the default process group where it is initialized, else 0 of 1. Ranks that share their data
    (tensor, pipeline, context parallel) give their data-parallel rank and size, or `mesh`: a `DeviceMesh` whose
    dimensions `mesh_dims` (by default those named dp, dp_replicate, dp_shard) divide the data; along all others ranks
    get the same.

    `device`: a CUDA device; batches are then copied to it on a stream of their own out of pinned memory and widened
    there, and the caller's current stream waits for them. None: tensors in ordinary memory.

    Other options: `headrace.dataset.FeedOptions`. Memory held is `ring_bytes`.

    `state_dict()` counts batches handed out, not those read ahead. `load_state_dict` wants a loader that has not begun,
    and `DatasetError` says what differs where data, seed, shares, samples or (unless allowed) global batch are not
    those of the state. `DeviceTimeout` where a batch does not come within `stall_timeout_s`. After an error, of the
    volume's or of the device's memory, the same batch is the next one: none is left out.
    """

    def __init__(
        self,
        volume: Volume,
        data: str | Mixture,
        *,
        sequence_length: int,
        global_batch: int,
        **options: Unpack[LoaderOptions],
    ) -> None:
        super().__init__(
            volume, data, sequence_length=sequence_length, global_batch=global_batch, samples=WINDOWS, **options
        )

    def _make(self, batch: FeedBatch) -> torch.Tensor:
        return self._tokens(batch)


class DocumentLoader(_Loader[Documents]):
    """Iterator over `Documents`: as `TokenLoader`, with what a model needs to keep documents apart.

    `samples`: "packed" (several whole documents a row) or "padded" (one), which `headrace dataset pack` has stored; or
    "windows", in which documents are told apart by the token that ends them. For a mixture also a dictionary, by name
    of the dataset. `pad_id`: the token in padding; by default the one that ends a document, where it is known, else 0.
    """

    def __init__(
        self,
        volume: Volume,
        data: str | Mixture,
        *,
        sequence_length: int,
        global_batch: int,
        samples: str | Mapping[str, str] = "packed",
        pad_id: int | None = None,
        **options: Unpack[LoaderOptions],
    ) -> None:
        super().__init__(
            volume, data, sequence_length=sequence_length, global_batch=global_batch, samples=samples, pad_id=pad_id,
            **options,
        )  # fmt: skip
        #: Three tensors a batch, of one shape.
        self._parts = Reused((self.options.local_batch, sequence_length), kept=6)
        if not self._feed.tells_documents:
            raise UsageError(
                "it is not known where documents end in windows",
                where=self._feed.where,
                expected="a dataset with a manifest",
                next_step='pack it (`headrace dataset pack`), and use samples="packed"',
            )

    def _make(self, batch: FeedBatch) -> Documents:
        segments = batch.segments()
        ends = segments.cu_seqlens()
        bounds, longest = torch.from_numpy(ends).to(self._device), int(np.diff(ends).max())
        if self._device.type != "cuda":
            return {
                "input_ids": self._parts.tensor(batch.tokens[:, :-1]),
                "labels": self._parts.filled(partial(segments.labels, batch.tokens)),
                "position_ids": self._parts.filled(segments.position_ids),
                "cu_seqlens": bounds,
                "max_seqlen": longest,
            }
        tokens = self._tokens(batch)
        ignored = torch.from_numpy(segments.ignored()).to(self._device)
        return {
            "input_ids": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].masked_fill(ignored, IGNORED),
            "position_ids": torch.from_numpy(segments.position_ids()).to(self._device),
            "cu_seqlens": bounds,
            "max_seqlen": longest,
        }


def open_sources(
    volume: Volume, data: str | Mixture, samples: str | Mapping[str, str], sequence_length: int
) -> dict[str, Samples]:
    names = list(data.weights) if isinstance(data, Mixture) else [data]
    if not isinstance(samples, str) and set(samples) != set(names):
        raise UsageError("samples are not told for each dataset", expected=" ".join(names), found=" ".join(samples))
    return {
        name: open_samples(
            TokenStream.open(volume, name), samples if isinstance(samples, str) else samples[name], sequence_length
        )
        for name in names
    }


def _usable(device: torch.device | str | None) -> torch.device:
    try:
        found = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError):
        raise UsageError("there is no such device", where="device", found=repr(device)) from None
    if found.type not in ("cpu", "cuda"):
        raise UsageError("no batches can be made on this device", expected="cpu or cuda", found=str(found))
    count = torch.cuda.device_count() if found.type == "cuda" and torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= count:
        raise UsageError(
            "there is no such device",
            where=f"device {found}",
            expected=f"one of the {count} CUDA devices of this machine" if count else "a CUDA device",
            found="none that PyTorch can use" if not count else None,
            next_step="leave device out for batches in ordinary memory",
        )
    return found
