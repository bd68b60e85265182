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

from headrace.dataset.feed.feed import FeedBatch, _end_of, _joined, _used
from headrace.dataset.order.mixture import GlobalOrder
from headrace.dataset.tokens.samples import WINDOWS, Places, Plan, Samples
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
        self.ends = np.array([_end_of(each) if each.kind == WINDOWS else -1 for each in self.samples])

    def submit(self, positions: npt.ArrayLike) -> ChosenRead:
        """Start to read the samples at these places, a row each. `UsageError` for a negative place."""
        return ChosenRead(self, np.asarray(positions, np.int64))


class ChosenRead:
    """A batch on its way. Where packed samples lie is read first; `advance` asks whether that is known."""

    def __init__(self, chosen: Chosen, positions: I64) -> None:
        self._chosen = chosen
        self._positions = positions
        self._sources, self._samples = chosen.order.at(positions)
        self._plans: list[tuple[int, I64, Plan]] = []
        for source in np.unique(self._sources).tolist():
            rows = np.flatnonzero(self._sources == source)
            self._plans.append((source, rows, chosen.samples[source].plan(self._samples[rows])))
        self._tokens: npt.NDArray[Any] | None = None
        self._pieces: list[Places] = []
        self._transfers: list[VolumeTransfer] = []
        self.advance()

    def advance(self) -> None:
        """Ask for the tokens where it is known by now where they lie; never blocks."""
        if self._tokens is None and all(plan.transfer is None or plan.transfer.done() for _, _, plan in self._plans):
            self._read()

    def wait(self) -> FeedBatch:
        """All rows; the memory is the caller's. The error of the first read that failed; `DeviceTimeout` where they do
        not come within `stall_timeout_s`."""
        end = time.monotonic() + self._chosen.stall_timeout_s
        if self._tokens is None:
            _wait([plan.transfer for _, _, plan in self._plans if plan.transfer is not None], end)
            self._read()
        tokens = self._tokens
        assert tokens is not None
        _wait(self._transfers, end)
        pieces = _joined(self._pieces)
        if int(pieces.lengths.sum()) < tokens.size:
            for row, used in zip(*_used(pieces), strict=True):
                tokens[row, used:] = self._chosen.pad_id
        return FeedBatch(
            slot=-1,
            tokens=tokens,
            sources=self._sources,
            samples=self._samples,
            position=int(self._positions[0]),
            pieces=pieces,
            ends=self._chosen.ends[self._sources],
        )

    def _read(self) -> None:
        first = self._chosen.samples[0]
        width = first.sequence_length + 1
        tokens = np.empty((len(self._positions), width), first.stream.dtype)
        for source, rows, plan in self._plans:
            found = plan.places()
            pieces = Places(found.starts, found.lengths, rows[found.rows], found.places)
            places = pieces.rows * width + pieces.places
            stream = self._chosen.samples[source].stream
            self._transfers.append(
                stream.submit_pieces(pieces.starts, pieces.lengths, tokens, places, verify=self._chosen.verify)
            )
            self._pieces.append(pieces)
        self._tokens = tokens


def _wait(transfers: list[VolumeTransfer], end_s: float) -> None:
    for transfer in transfers:
        transfer.wait(max(0.0, end_s - time.monotonic()))
