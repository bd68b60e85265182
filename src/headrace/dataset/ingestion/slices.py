"""What one worker does at a time: slices of a corpus, and which of them is next.

A **slice** is a stated part of the input. Where slices begin depends on the files and their sizes alone, never on how
many workers there are; the tokens of all slices one after another are the dataset. So the work may be done in any
order, by anybody, and again.

Nobody can tell beforehand in which slice a limit (bytes of text) is reached. Slices are read up to what is left of the
limit as far as is known; the one in which it turns out to be reached is read again, up to exactly there, where it went
further.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from headrace.dataset.ingestion.readers import Portion, Source
from headrace.errors import DatasetError
from headrace.units import KIB, MIB

#: Bytes of files in a slice: some seconds of work, and what a worker that is killed has lost at most.
LEAST_BYTES, MOST_BYTES = 16 * MIB, 256 * MIB
#: As many slices as this, where they are between the two.
USUAL_COUNT = 4096
#: Whatever is the size of the corpus. Each is a part of one object, which may have 20,000.
MOST_COUNT = 12_000
#: A part may grow so far where a slice would have more parts than it may.
LARGEST_PART_BYTES = 1024 * MIB
#: When so many slices are read, their parts tell how many there will be.
_TELLING = 64
#: Opening a file costs as much as reading some more of one.
FILE_BYTES = 16 * KIB
#: What every job counts of a slice, by `CorpusCounts`' names.
COUNTED = ("documents", "tokens", "source_bytes", "replaced_documents", "empty_documents", "bad_records")


@dataclass(frozen=True, slots=True)
class Slice:
    """Part `index` of the input."""

    index: int
    portions: tuple[Portion, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A slice to be read, up to `limit_bytes` of text (None: all of it)."""

    index: int
    portions: tuple[Portion, ...]
    limit_bytes: int | None
    #: Parts that its bytes may lie in, as far as those have not the largest size.
    most_parts: int = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Done:
    """A slice that was read. What it gave lies in the volume."""

    #: Lengths of the objects that its bytes lie in, in order.
    parts: tuple[int, ...]
    #: Bytes of what belongs to them: lengths of documents.
    side_bytes: int
    #: Where the text was to end, and did.
    limit_bytes: int | None
    limited: bool
    text_bytes: int
    #: What was counted: all of `COUNTED`, and the first bad records in words as `bad_shown`.
    counts: dict[str, Any] = field(default_factory=dict)

    def plausible(self) -> bool:
        """Are all facts of their types? Where it was read from a volume they may be anything."""
        counts = self.counts if isinstance(self.counts, dict) else {}
        numbers = [*self.parts, self.side_bytes, self.text_bytes, *(counts.get(name) for name in COUNTED)]
        if self.limit_bytes is not None:
            numbers.append(self.limit_bytes)
        shown = counts.get("bad_shown")
        return (
            all(type(number) is int and number >= 0 for number in numbers)
            and isinstance(self.limited, bool)
            and isinstance(shown, list)
            and all(isinstance(each, str) for each in shown)
        )


def slice_bytes(total_bytes: int, files: int = 1) -> int:
    """Of a corpus of so many bytes in so many files."""
    usual = min(max(total_bytes // USUAL_COUNT, LEAST_BYTES), MOST_BYTES)
    return max(usual, -(-(total_bytes + files * FILE_BYTES) // MOST_COUNT))


def slices_of(sources: Sequence[Source], size: int) -> list[Slice]:
    """Slices of about `size` bytes: many small files, one large, or a part of one where that can be read by itself."""
    result: list[Slice] = []
    portions: list[Portion] = []
    weight = 0
    for portion in _portions(sources, size):
        portions.append(portion)
        weight += portion.size_bytes + FILE_BYTES
        if weight >= size:
            result.append(Slice(len(result), tuple(portions)))
            portions, weight = [], 0
    if portions:
        result.append(Slice(len(result), tuple(portions)))
    return result


def _portions(sources: Sequence[Source], size: int) -> Iterator[Portion]:
    for source in sources:
        count = -(-source.size_bytes // size) if source.divisible else 1
        if count <= 1:
            yield Portion(source)
            continue
        cuts = [source.size_bytes * place // count for place in range(count + 1)]
        for start, stop in pairwise(cuts):
            # The last one to the end, wherever that is by then.
            yield Portion(source, start, stop if stop < source.size_bytes else None)


def parts_of_a_slice(most: int, slices: int) -> int:
    """That each slice may have, so that all have no more than `most`: the last of them is larger than the others."""
    return max(1, most // max(1, slices))


def known_parts(slices: Sequence[Slice], part_bytes: int, of_a_slice: int) -> int:
    """Parts that there will be at the least, of what is kept byte for byte: of nothing else it is known beforehand."""
    kept = (
        sum(portion.size_bytes for portion in each.portions if portion.source.kind in ("raw", "file"))
        for each in slices
    )
    largest = max(part_bytes, LARGEST_PART_BYTES)
    return sum(
        min(-(-size // part_bytes), of_a_slice - 1 + max(1, -(-(size - (of_a_slice - 1) * part_bytes) // largest)))
        for size in kept
        if size
    )


def too_many_parts(most: int, found: str) -> DatasetError:
    """The same before the work and behind it."""
    return DatasetError(
        "the dataset has too many parts", expected=f"at most {most}", found=found,
        next_step="ingest the corpus as several datasets, or from Python with a larger part_bytes",
    )  # fmt: skip


class Order:
    """Which slice is next, and which of those that were read are the dataset. One thread's."""

    def __init__(self, slices: Sequence[Slice], limit_bytes: int | None, *, most_parts: int) -> None:
        self.slices = slices
        self.done: dict[int, Done] = {}
        #: The first so many are as they are to be.
        self.settled = 0
        #: Nothing behind them belongs to the dataset.
        self.complete = not slices
        self._limit = limit_bytes
        self._left = limit_bytes
        self._most_parts = most_parts
        self._parts = 0
        self._of_a_slice = parts_of_a_slice(most_parts, len(slices))
        self._next = 0
        self._again: list[int] = []

    def take(self) -> Task | None:
        """The next slice to be read; None where all that may be needed are under way."""
        if self.complete:
            return None
        if self._again:
            index = self._again.pop(0)
        else:
            while self._next in self.done:
                self._next += 1
            if self._next >= len(self.slices):
                return None
            index = self._next
            self._next += 1
        return Task(index, self.slices[index].portions, self._left, self._of_a_slice)

    def give_back(self, task: Task) -> None:
        """It was not read."""
        self._again.append(task.index)
        self._again.sort()

    def finish(self, index: int, done: Done) -> None:
        """It was read. DatasetError where the dataset would have too many parts."""
        self.done[index] = done
        while not self.complete and (first := self.done.get(self.settled)) is not None:
            if self._left is not None:
                whole = not first.limited and first.text_bytes < self._left
                if not whole and not (first.limited and first.limit_bytes == self._left):
                    del self.done[self.settled]
                    self._again.insert(0, self.settled)
                    # Where an earlier run has read it, none of this one has taken it yet.
                    self._next = max(self._next, self.settled + 1)
                    return
                self._left -= first.text_bytes
            self.settled += 1
            self.complete = self.settled == len(self.slices) or first.limited
            self._parts += len(first.parts)
            self._look_ahead()

    def _look_ahead(self) -> None:
        if self._parts > self._most_parts:
            raise too_many_parts(self._most_parts, f"{self._parts} or more")
        likely = self._parts * len(self.slices) // self.settled
        if self._limit is None and self.settled >= _TELLING and likely > 2 * self._most_parts:
            raise too_many_parts(
                self._most_parts, f"{self._parts} in the first {self.settled} of {len(self.slices)} slices"
            )
