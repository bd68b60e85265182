"""What comes next, and where it lies: some batches of the order, one after another.

What is the same for many batches is reckoned once for all of them. Samples that lie where arithmetic says come in
stretches of hundreds of batches; where a packing says it, a stretch is what one read of the packing tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dataset.tokens.samples import WINDOWS, Places, Plan, Samples
from headrace.dataset.tokens.segments import Segments
from headrace.errors import HeadraceError
from headrace.volume import VolumeTransfer

I64 = npt.NDArray[np.int64]


class Part(NamedTuple):
    """Where the samples of one source lie, batch by batch: int64[pieces] each."""

    source: int
    starts: I64
    lengths: I64
    #: Batch of the stretch, row of the batch, place in the row.
    batches: I64
    rows: I64
    places: I64
    #: How many pieces are of batches before each, and of all.
    bounds: list[int]
    #: Each piece is the first of its row.
    alone: bool


class Stretch:
    """First it is found out where its samples lie (`plan`, `find`), then its batches are read, some at a time."""

    def __init__(self, of: Sequence[Samples], ends: I64, position: int, joint: int, sources: I64, samples: I64) -> None:
        """`of`, `ends`: all sources, and the token that ends a document of windows, or -1, of each. `sources`,
        `samples`: int64[batches, rows]. `position`: of the first batch in the global order, `joint` from one to the
        next."""
        self.position, self.joint = position, joint
        self.sources, self.samples = sources, samples
        self.ends = ends
        self.count, self.rows = samples.shape
        self._of = of
        self._plans: list[tuple[int, I64 | None, Plan]] = []
        #: Empty until it is found.
        self.parts: list[Part] = []
        #: Of each batch.
        self.token_counts: list[int] = []
        #: Tokens of each row, int64[batches, rows]; None where all are full.
        self.used: I64 | None = None
        #: How many of its batches are being read, or were.
        self.begun = 0
        #: What is wrong with it, which somebody has to be told.
        self.error: HeadraceError | None = None
        #: That was told: planned again when it is asked for again.
        self.failed = False

    def plan(self) -> None:
        """Start to find out where the samples lie. What is wrong is kept."""
        self.failed, self.error, self._plans = False, None, []
        samples = self.samples.reshape(-1)
        try:
            if len(self._of) == 1:
                self._plans.append((0, None, self._of[0].plan(samples)))
                return
            sources = self.sources.reshape(-1)
            for source in np.unique(sources).tolist():
                rows = np.flatnonzero(sources == source)
                self._plans.append((source, rows, self._of[source].plan(samples[rows])))
        except HeadraceError as error:
            self.error = error

    @property
    def transfers(self) -> list[VolumeTransfer]:
        """What has to come before `find`."""
        return [plan.transfer for _, _, plan in self._plans if plan.transfer is not None]

    def ready(self) -> bool:
        """`find` would not wait, and has something to find."""
        return not self.failed and self.error is None and all(transfer.done() for transfer in self.transfers)

    def find(self) -> None:
        """Take what the plans say; the error of the first that failed."""
        parts = [self._part(*each) for each in self._plans]
        width = self._of[0].sequence_length + 1
        if any(self._of[part.source].kind != WINDOWS for part in parts):
            used = np.zeros(self.count * self.rows, np.int64)
            for part in parts:
                # Pieces of a row lie side by side. A sum of so few whole numbers is exact.
                flat = part.batches * self.rows + part.rows
                used += np.bincount(flat, part.lengths, used.size).astype(np.int64)
            self.used = used.reshape(self.count, self.rows)
            self.token_counts = self.used.sum(axis=1).tolist()
        else:
            self.token_counts = [self.rows * width] * self.count
        self.parts, self._plans = parts, []

    def _part(self, source: int, mine: I64 | None, plan: Plan) -> Part:
        found = plan.places()
        batches, rows = np.divmod(found.rows if mine is None else mine[found.rows], self.rows)
        bounds = np.searchsorted(batches, np.arange(self.count + 1)).tolist()
        return Part(
            source, found.starts, found.lengths, batches, rows, found.places, bounds, not bool(found.places.any())
        )

    def alone(self) -> list[Stretch]:
        """Its batches, a stretch each, planned anew: what is wrong with one of them is then wrong with that one."""
        each = [
            Stretch(self._of, self.ends, self.position + at * self.joint, self.joint, *self._rows(at))
            for at in range(self.begun, self.count)
        ]
        for stretch in each:
            stretch.plan()
        return each

    def _rows(self, at: int) -> tuple[I64, I64]:
        return self.sources[at : at + 1], self.samples[at : at + 1]

    def pieces(self, at: int) -> Places:
        """Of one batch."""
        some = [
            Places(part.starts[here], part.lengths[here], part.rows[here], part.places[here])
            for part in self.parts
            for here in [slice(part.bounds[at], part.bounds[at + 1])]
        ]
        return some[0] if len(some) == 1 else Places(*map(np.concatenate, zip(*some, strict=True)))

    def pad(self, at: int, tokens: npt.NDArray[Any], pad_id: int) -> None:
        """Fill what no document fills of this batch's rows."""
        if self.used is not None and self.token_counts[at] < tokens.size:
            for row, used in enumerate(self.used[at].tolist()):
                tokens[row, used:] = pad_id


class FeedBatch:
    """A buffer that was filled, lent until it is released."""

    __slots__ = ("_at", "_stretch", "slot", "tokens")

    def __init__(self, slot: int, tokens: npt.NDArray[Any], stretch: Stretch, at: int) -> None:
        self.slot = slot
        #: dtype[local_batch, sequence_length + 1].
        self.tokens = tokens
        # The rest is seldom asked for.
        self._stretch = stretch
        self._at = at

    @property
    def sources(self) -> I64:
        """Of which of the datasets, in the order of their names, each row is: int64[local_batch]."""
        sources: I64 = self._stretch.sources[self._at]
        return sources

    @property
    def samples(self) -> I64:
        """Numbers of the samples in them: int64[local_batch]."""
        samples: I64 = self._stretch.samples[self._at]
        return samples

    @property
    def position(self) -> int:
        """Place of the first sample of the batch of all ranks in the global order."""
        return self._stretch.position + self._at * self._stretch.joint

    @property
    def pieces(self) -> Places:
        """What lies where in the rows: windows, or pieces of documents."""
        return self._stretch.pieces(self._at)

    @property
    def ends(self) -> I64:
        """Of each row, the token that ends a document, where the row is a window; else -1: int64[local_batch]."""
        return self._stretch.ends[self.sources]

    def segments(self) -> Segments:
        """Where documents begin. Reads the tokens of windows: before the buffer is released."""
        begins = np.zeros(self.tokens.shape, np.bool_)
        begins[:, 0] = True
        ends, pieces, used = self.ends, self.pieces, self._stretch.used
        # Compared as what they are: as int64 all tokens would be widened first.
        kind = self.tokens.dtype
        windows = np.flatnonzero(ends >= 0)
        if len(windows) == len(ends):
            np.equal(self.tokens[:, :-1], ends.astype(kind)[:, None], out=begins[:, 1:])
        elif windows.size:
            begins[windows, 1:] = self.tokens[windows, :-1] == ends[windows].astype(kind)[:, None]
        begins[pieces.rows, pieces.places] = True
        padding = np.zeros_like(begins)
        if used is not None:
            for row, count in enumerate(used[self._at].tolist()):
                padding[row, count:] = True
                begins[row, count : count + 1] = True
        return Segments(begins=begins, padding=padding)
