"""Samples that somebody else chooses: places of the global order, a batch of them in one read.

`Feed` knows what comes next and keeps a ring of it filled. A framework with a sampler and worker processes of its own
asks for places instead, in any order, here. Each batch is read to memory of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dataset.feed.stretch import FeedBatch, Stretch
from headrace.dataset.order.mixture import GlobalOrder
from headrace.dataset.tokens.samples import Samples, ends_of
from headrace.volume import VolumeTransfer

I64 = npt.NDArray[np.int64]


class Chosen:
    """Of these samples in this order. Holds no buffers; threads may share it. `pad_id`: as of `Feed`."""

    def __init__(
        self,
        sources: Mapping[str, Samples],
        order: GlobalOrder,
        *,
        pad_id: int,
        verify: bool = True,
        stall_timeout_s: float = 300.0,
    ) -> None:
        self.samples = list(sources.values())
        self.order = order
        self.pad_id = pad_id
        self.verify = verify
        self.stall_timeout_s = stall_timeout_s
        self.ends = ends_of(self.samples)

    def submit(self, positions: npt.ArrayLike) -> ChosenRead:
        """Start to read the samples at these places, a row each. `UsageError` for a negative place."""
        return ChosenRead(self, np.asarray(positions, np.int64))


class ChosenRead:
    """A batch on its way. Where packed samples lie is read first; `advance` asks whether that is known."""

    def __init__(self, chosen: Chosen, positions: I64) -> None:
        self._chosen = chosen
        sources, samples = chosen.order.at(positions)
        self._batch = Stretch(chosen.samples, chosen.ends, int(positions[0]), 0, sources[None], samples[None])
        self._tokens: npt.NDArray[Any] | None = None
        self._transfers: list[VolumeTransfer] = []
        self._batch.plan()
        if self._batch.error is not None:
            raise self._batch.error
        self.advance()

    def advance(self) -> None:
        """Ask for the tokens where it is known by now where they lie; never blocks."""
        if self._tokens is None and self._batch.ready():
            self._read()

    def wait(self) -> FeedBatch:
        """All rows; the memory is the caller's. The error of the first read that failed; `DeviceTimeout` where they do
        not come within `stall_timeout_s`."""
        end = time.monotonic() + self._chosen.stall_timeout_s
        if self._tokens is None:
            _wait(self._batch.transfers, end)
            self._read()
        tokens = self._tokens
        assert tokens is not None
        _wait(self._transfers, end)
        self._batch.pad(0, tokens, self._chosen.pad_id)
        return FeedBatch(-1, tokens, self._batch, 0)

    def _read(self) -> None:
        first = self._chosen.samples[0]
        width = first.sequence_length + 1
        if not self._batch.parts:
            self._batch.find()
        tokens = np.empty((self._batch.rows, width), first.stream.dtype)
        # Those of an attempt that failed read into memory that nobody has.
        self._transfers = []
        for part in self._batch.parts:
            stream = self._chosen.samples[part.source].stream
            places = part.rows * width + part.places
            self._transfers.append(
                stream.submit_pieces(part.starts, part.lengths, tokens, places, verify=self._chosen.verify)
            )
        self._tokens = tokens


def _wait(transfers: list[VolumeTransfer], end_s: float) -> None:
    for transfer in transfers:
        transfer.wait(max(0.0, end_s - time.monotonic()))
