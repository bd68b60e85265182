"""`TokenLoader`: batches of tokens out of a volume, as tensors, in an order that any number of ranks shares.

    with TokenLoader(volume, "corpus", sequence_length=1024, global_batch=32, seed=1) as loader:
        for batch in loader:                       # int64 [32 / world, 1025]
            loss = model(batch[:, :-1], batch[:, 1:])

No worker processes: the native engine keeps `prefetch` batches ahead in a fixed ring. Every tensor that is handed out
is the caller's own (widening the tokens to int64 is the copy), so nothing it holds is ever overwritten.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed

from headrace.dataset.feed import FeedBatch, FeedMetrics, FeedOptions, WindowFeed
from headrace.dataset.state import LoaderState
from headrace.dataset.stream import TokenStream
from headrace.errors import UsageError
from headrace.volume import Volume


class TokenLoader:
    """Iterator over int64 tensors `[global_batch / world, sequence_length + 1]`: inputs and targets in one.

    Step k is samples `[k * global_batch, (k + 1) * global_batch)` of the global order, and rank r of w has the r-th of
    its w equal, contiguous parts: the union over the ranks is the same for every w. Epochs follow one another without a
    gap.

    `rank`, `world`: from the default process group where it is initialized, else 0 of 1. Ranks that share their data
    (tensor, pipeline, context parallel) give their data-parallel rank and size.

    `device`: a CUDA device; batches are then copied to it on a stream of their own out of pinned memory and widened
    there, and the caller's current stream waits for them. None: tensors in ordinary memory.

    Other options: `headrace.dataset.feed.FeedOptions`. Memory held is `ring_bytes`.

    `state_dict()` counts batches handed out, not those read ahead. `load_state_dict` wants a loader that has not begun,
    and `DatasetError` says what differs where data, seed, window or (unless allowed) global batch are not those of the
    state. `DeviceTimeout` where a batch does not come within `stall_timeout_s`.
    """

    def __init__(
        self,
        volume: Volume,
        name: str,
        *,
        sequence_length: int,
        global_batch: int,
        rank: int | None = None,
        world: int | None = None,
        seed: int = 0,
        prefetch: int = 4,
        epochs: int | None = None,
        stall_timeout_s: float = 300.0,
        device: torch.device | str | None = None,
        verify: bool = True,
        allow_global_batch_change: bool = False,
    ) -> None:
        if (rank is None) != (world is None):
            raise UsageError("rank and world belong together", expected="both or none")
        if rank is None or world is None:
            rank, world = _from_process_group()
        options = FeedOptions(
            sequence_length=sequence_length,
            global_batch=global_batch,
            rank=rank,
            world=world,
            seed=seed,
            prefetch=prefetch,
            epochs=epochs,
            stall_timeout_s=stall_timeout_s,
            verify=verify,
            allow_global_batch_change=allow_global_batch_change,
        )
        self.options = options
        self.stream = TokenStream.open(volume, name)
        self._device = torch.device(device) if device is not None else torch.device("cpu")
        if self._device.type not in ("cpu", "cuda"):
            raise UsageError("no batches can be made on this device", expected="cpu or cuda", found=str(self._device))
        self._pinned: list[torch.Tensor] = []
        #: CUDA: the buffer that the last copy reads from, and when it has.
        self._copied: tuple[torch.cuda.Event, FeedBatch] | None = None
        if self._device.type == "cuda":
            shape = (options.local_batch, sequence_length + 1)
            kind = torch.uint16 if self.stream.dtype == np.uint16 else torch.int32
            # One more than is read ahead: the one that is being copied.
            self._pinned = [torch.empty(shape, dtype=kind, pin_memory=True) for _ in range(prefetch + 1)]
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._feed = WindowFeed(self.stream, options, [tensor.numpy() for tensor in self._pinned] or None)
        self._last_samples: npt.NDArray[np.int64] | None = None

    def __iter__(self) -> TokenLoader:
        self._feed.begin()
        return self

    def __next__(self) -> torch.Tensor:
        self._release_copied()
        batch = self._feed.acquire()
        if batch is None:
            raise StopIteration
        self._last_samples = batch.samples
        if self._device.type == "cuda":
            return self._to_cuda(batch)
        tensor = torch.from_numpy(batch.tokens.astype(np.int64))
        self._feed.release(batch)
        return tensor

    @property
    def sample_count(self) -> int:
        """Samples an epoch."""
        return self._feed.sampler.sample_count

    @property
    def consumed(self) -> int:
        """Samples handed out to all ranks together, over all epochs."""
        return self._feed.consumed

    @property
    def last_batch_ids(self) -> npt.NDArray[np.int64]:
        """Numbers of the samples in the batch that was handed out last, row by row: int64[local_batch]. Sample s is
        tokens `[s * sequence_length, (s + 1) * sequence_length]` of the dataset. `UsageError` before the first
        batch."""
        if self._last_samples is None:
            raise UsageError("no batch was handed out yet", where=self.stream.name)
        return np.array(self._last_samples, np.int64)

    @property
    def ring_bytes(self) -> int:
        """Memory that the loader holds for batches."""
        return self._feed.ring_bytes

    def metrics(self) -> FeedMetrics:
        return self._feed.metrics()

    def state_dict(self) -> dict[str, int | str]:
        """A few numbers and strings; the same on every rank."""
        return self._feed.state().to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` stands, in no time, with any number of ranks."""
        self._feed.load_state(LoaderState.from_dict(state))

    def close(self) -> None:
        """Let go of the ring. The volume stays open: it is the caller's."""
        self._release_copied()
        self._feed.close()

    def __enter__(self) -> TokenLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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


def _from_process_group() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
