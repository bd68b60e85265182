"""What a sample is: where in a stream its tokens lie, and where in its row they go.

    windows   sample s is tokens [s * sequence_length, (s + 1) * sequence_length], whatever documents they are of
    packed    whole documents, several in a sample, as a stored packing says (`headrace.dataset.tokens.packs`)
    padded    a document each, and padding; stored as well

A sample fills a row of `sequence_length + 1` tokens. To find out where a packed one lies takes a read, so it is asked
for (`plan`) some time before its tokens are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headrace.dataset.tokens.packs import Packing, PackRead
from headrace.dataset.tokens.stream import TokenStream
from headrace.volume import VolumeTransfer

I64 = npt.NDArray[np.int64]

WINDOWS = "windows"
#: What `open_samples` knows.
KINDS = (WINDOWS, "packed", "padded")


class Places(NamedTuple):
    """Ranges of tokens of some samples: int64[n] each, which nobody changes."""

    #: First token in the stream, tokens.
    starts: I64
    lengths: I64
    #: Row of the sample, 0 for the first, and place in that row.
    rows: I64
    places: I64


class Plan(Protocol):
    """Places of some samples, perhaps still on their way."""

    @property
    def transfer(self) -> VolumeTransfer | None:
        """What has to come first; None: nothing."""

    def places(self) -> Places:
        """Once the transfer is done; its error where it failed."""


class Samples(Protocol):
    """The samples of one stream."""

    @property
    def stream(self) -> TokenStream: ...

    @property
    def sequence_length(self) -> int: ...

    @property
    def sample_count(self) -> int: ...

    @property
    def kind(self) -> str:
        """One of `KINDS`."""

    @property
    def packing(self) -> str:
        """SHA-256 of the packing that says what the samples are; "" where arithmetic does."""

    def plan(self, samples: I64) -> Plan:
        """Find out where these samples lie."""


class WindowPlan:
    """Arithmetic: there is nothing to wait for."""

    transfer = None

    def __init__(self, places: Places) -> None:
        self._places = places

    def places(self) -> Places:
        return self._places


class WindowSamples:
    """Contiguous windows."""

    kind = WINDOWS
    packing = ""

    def __init__(self, stream: TokenStream, sequence_length: int) -> None:
        self.stream = stream
        self.sequence_length = sequence_length
        self.sample_count = stream.sample_count(sequence_length)
        #: All but `starts`, the same for each batch of so many samples.
        self._alike = self._places(0)

    def plan(self, samples: I64) -> WindowPlan:
        alike = self._alike
        if len(alike.lengths) != len(samples):
            # Replaced as one: threads share it.
            alike = self._alike = self._places(len(samples))
        _, lengths, rows, places = alike
        return WindowPlan(Places(samples * self.sequence_length, lengths, rows, places))

    def _places(self, count: int) -> Places:
        zeros, lengths = np.zeros(count, np.int64), np.full(count, self.sequence_length + 1, np.int64)
        return Places(zeros, lengths, np.arange(count, dtype=np.int64), zeros)


@dataclass(frozen=True)
class PackPlan:
    read: PackRead

    @property
    def transfer(self) -> VolumeTransfer:
        return self.read.transfer

    def places(self) -> Places:
        return Places(*self.read.pieces())


class PackSamples:
    """Documents, packed or padded."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self.stream = packing.stream
        self.sequence_length = packing.manifest.sequence_length
        self.sample_count = packing.manifest.samples
        self.kind = packing.manifest.layout
        self.packing = packing.manifest.sha256

    def plan(self, samples: I64) -> PackPlan:
        return PackPlan(self._packing.submit(samples))


def open_samples(stream: TokenStream, kind: str, sequence_length: int) -> Samples:
    """`UsageError` for an unknown kind; `ObjectNotFound` where the stream was not packed so; `DatasetError`."""
    if kind == WINDOWS:
        return WindowSamples(stream, sequence_length)
    return PackSamples(Packing.open(stream, kind, sequence_length))


def end_of(samples: Samples) -> int:
    """The token that ends a document; -1 where it is not known."""
    manifest = samples.stream.manifest
    return manifest.end_of_document_id if manifest is not None else -1


def ends_of(samples: Sequence[Samples]) -> I64:
    """Of each: the token that ends a document, where rows are windows that have one; else -1."""
    return np.array([end_of(each) if each.kind == WINDOWS else -1 for each in samples], np.int64)
