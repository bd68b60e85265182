"""Where documents begin inside the samples of a batch, and what a model needs to know of it.

A row is `sequence_length + 1` tokens: inputs `row[:-1]`, targets `row[1:]`. Documents in a row must not see each other,
and nothing may be learnt from the first token of one as the target of the last token of another:

    tokens        a a a a # b b # . .      # end of document, . padding
    begins        x         x     x
    padding                       x x
    position_ids  0 1 2 3 4 0 1 2 0        of the inputs; padding counts, too
    labels        a a a # - b # - -        - is not learnt from
    cu_seqlens    0         5     8 9      of the inputs; the padding of a row is a segment of its own
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

#: What PyTorch's cross entropy, and everything on it, leaves out.
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Of a batch."""

    #: bool[rows, sequence_length + 1]: a document, or a part of one, or the padding begins with this token. The first
    #: of each row is set.
    begins: Bools
    #: bool[rows, sequence_length + 1].
    padding: Bools

    def position_ids(self, out: I64 | None = None) -> I64:
        """Of the inputs, from 0 in every segment: int64[rows, sequence_length], into `out` where that is given."""
        begins = self.begins[:, :-1]
        ids = np.empty(begins.shape, np.int64) if out is None else out
        # A row begins with a segment, so that none is of two.
        starts = np.flatnonzero(begins)
        before = np.repeat(starts, np.diff(starts, append=begins.size)).reshape(begins.shape)
        return np.subtract(np.arange(begins.size).reshape(begins.shape), before, out=ids)

    def cu_seqlens(self) -> I32:
        """Where each segment of the inputs begins, all rows one after another, and the end: int32[segments + 1]."""
        inputs = self.begins[:, :-1]
        return np.append(np.flatnonzero(inputs), inputs.size).astype(np.int32)

    def ignored(self) -> Bools:
        """Targets that nothing may be learnt from: bool[rows, sequence_length]."""
        return np.asarray(self.begins[:, 1:] | self.padding[:, 1:])

    def labels(self, tokens: npt.NDArray[Any], out: I64 | None = None) -> I64:
        """Targets, `IGNORED` where nothing may be learnt: int64[rows, sequence_length], into `out` where that is
        given."""
        ignored = self.ignored()
        labels = np.empty(ignored.shape, np.int64) if out is None else out
        np.copyto(labels, tokens[:, 1:])
        np.putmask(labels, ignored, IGNORED)
        return labels
