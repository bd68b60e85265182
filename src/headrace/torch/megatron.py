"""megatron-core's datasets on tokens in a volume: its own `IndexedDataset`, with a reader of the `.bin` that is ours.

    low = indexed_dataset(volume, "corpus")                      # where Megatron opens a path prefix
    data = ReadAhead(GPTDataset(low, "corpus", indices, samples, Split.train, config))
    loader = DataLoader(data, batch_sampler=data.ahead_of(batch_sampler, batches=4))

The order, its index files and the counter of consumed samples stay Megatron's.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.utils.data

from headrace.dataset.tokens.stream import TokenStream
from headrace.errors import DatasetError, UsageError
from headrace.units import MIB
from headrace.volume import Volume, VolumeTransfer

#: The index goes to memory in pieces of this length.
_PIECE_BYTES = 16 * MIB
#: Batches that are kept while nobody takes them, for each that is to be read ahead.
_MOST_KEPT = 4


class _Range(NamedTuple):
    """What Megatron asks for."""

    offset: int
    length: int
    dtype: np.dtype[Any]


class VolumeBinReader:
    """What megatron-core calls a `_BinReader`: numpy arrays out of a `.bin`, here out of a volume, verified.

    Not for several threads at once where reads are `noted`.
    """

    def __init__(self, stream: TokenStream, *, verify: bool = True, stall_timeout_s: float = 300.0) -> None:
        self.stream = stream
        self.verify = verify
        self.stall_timeout_s = stall_timeout_s
        self._noted: list[_Range] | None = None
        self._here: dict[_Range, npt.NDArray[Any]] = {}

    def read(self, dtype: Any, count: int, offset: int) -> npt.NDArray[Any]:
        """`count` items from byte `offset` on: dtype[count]. `DatasetError` outside the `.bin`; `DeviceTimeout` where
        they do not come within `stall_timeout_s`."""
        wanted = _Range(int(offset), int(count), np.dtype(dtype))
        # Its numbers come from the index, and memory is taken for them.
        length, end = self.stream.bin_info.length_bytes, wanted.offset + wanted.length * wanted.dtype.itemsize
        if wanted.offset < 0 or wanted.length < 0 or end > length:
            raise DatasetError(
                "the index leads out of the tokens",
                where=self.stream.bin_info.name,
                expected=f"within {length} bytes",
                found=f"{wanted.length} of {wanted.dtype.name} from byte {wanted.offset} on",
                next_step=f"`headrace dataset verify {self.stream.name}`",
            )
        if self._noted is not None:
            self._noted.append(wanted)
            return np.zeros(wanted.length, wanted.dtype)
        if wanted in self._here:
            return self._here[wanted]
        return self.submit([wanted]).wait()[wanted]

    def submit(self, ranges: Sequence[_Range]) -> _Ranges:
        """Start to read all of them at once."""
        return _Ranges(self, list(dict.fromkeys(ranges)))


class _Ranges:
    """Ranges on their way, in one buffer."""

    def __init__(self, reader: VolumeBinReader, ranges: list[_Range]) -> None:
        self._timeout_s = reader.stall_timeout_s
        lengths = np.array([each.length * each.dtype.itemsize for each in ranges], np.int64)
        # Aligned for whatever is in them.
        places = np.cumsum(-(-lengths // 8) * 8) - -(-lengths // 8) * 8
        buffer = np.empty(int(places[-1] + lengths[-1]) if ranges else 0, np.uint8)
        self._arrays = {
            each: buffer[place : place + length].view(each.dtype)
            for each, place, length in zip(ranges, places.tolist(), lengths.tolist(), strict=True)
        }
        self._transfer: VolumeTransfer | None = None
        some = np.flatnonzero(lengths)
        if some.size:
            offsets = np.array([each.offset for each in ranges], np.int64)
            self._transfer = reader.stream.volume.submit_read(
                reader.stream.bin_info, offsets[some], lengths[some], [buffer], places[some], verify=reader.verify
            )

    def wait(self) -> dict[_Range, npt.NDArray[Any]]:
        if self._transfer is not None:
            self._transfer.wait(self._timeout_s)
        return self._arrays


def indexed_dataset(
    volume: Volume, name: str, *, multimodal: bool = False, verify: bool = True, stall_timeout_s: float = 300.0
) -> Any:
    """megatron-core's `IndexedDataset` of `name.bin` and `name.idx` in a volume.

    The index is kept in memory of this process, as long as it is in the volume; no file is written. It may be pickled
    and forked. `ObjectNotFound`, and `DatasetError` where the pair is none; `UsageError` without megatron-core.
    """
    return _dataset_class().opened(volume, name, multimodal, verify, stall_timeout_s)


@cache
def _dataset_class() -> Any:
    try:
        from megatron.core.datasets.indexed_dataset import IndexedDataset, _IndexReader
    except ImportError as error:
        raise UsageError("megatron-core cannot be imported", found=str(error)) from error

    class VolumeIndexedDataset(IndexedDataset):  # type: ignore[misc]
        """All of it but where the two files are."""

        @classmethod
        def opened(cls, volume: Volume, name: str, multimodal: bool, verify: bool, stall_timeout_s: float) -> Any:
            stream = TokenStream.open(volume, name)
            reader = VolumeBinReader(stream, verify=verify, stall_timeout_s=stall_timeout_s)
            file = os.memfd_create(f"{name}.idx"[-200:])
            try:
                _write_index(stream, file)
                index = _IndexReader(f"/proc/self/fd/{file}", multimodal)
            finally:
                os.close(file)
            made = cls.__new__(cls)
            torch.utils.data.Dataset.__init__(made)
            made.path_prefix, made.multimodal, made.mmap, made.object_storage_config = name, multimodal, False, None
            made.bin_reader, made.index = reader, index
            return made

        def __reduce__(self) -> Any:
            reader: VolumeBinReader = self.bin_reader
            arguments = (reader.stream.volume, self.path_prefix, self.multimodal, reader.verify, reader.stall_timeout_s)
            return _again, arguments

    return VolumeIndexedDataset


def _again(*arguments: Any) -> Any:
    return _dataset_class().opened(*arguments)


def _write_index(stream: TokenStream, file: int) -> None:
    length = stream.idx_info.length_bytes
    buffer = np.empty(min(length, _PIECE_BYTES), np.uint8)
    for begin in range(0, length, _PIECE_BYTES):
        piece = buffer[: min(_PIECE_BYTES, length - begin)]
        stream.volume.submit_read(stream.idx_info, [begin], [piece.nbytes], [piece], [0]).wait()
        view: memoryview = piece.data
        while view:
            view = view[os.write(file, view) :]


class ReadAhead(torch.utils.data.Dataset[Any]):
    """A `GPTDataset`, or a `BlendedDataset` of some, on `indexed_dataset`s: the samples of a batch are one read.

    Where their parts lie is asked of Megatron's own indexes. `ahead_of(batch_sampler)` reads whole batches ahead in the
    process that iterates (`num_workers=0`); worker processes do that by themselves, without it. `UsageError`: another
    kind of dataset, or one on files.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._readers = list(dict.fromkeys(_readers(dataset)))
        self._ahead: dict[tuple[int, ...], list[_Ranges]] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        key = tuple(int(index) for index in indices)
        reads = self._ahead.pop(key, None) or self._submit(key)
        try:
            for reader, read in zip(self._readers, reads, strict=True):
                reader._here = read.wait()
            return [self.dataset[index] for index in key]
        finally:
            for reader in self._readers:
                reader._here = {}

    def ahead_of(self, batch_sampler: Iterable[Sequence[int]], *, batches: int = 4) -> AheadSampler:
        """The same batches, each of them being read since `batches` before it is asked for."""
        return AheadSampler(self, batch_sampler, batches)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Start to read a batch that will be asked for, with these indices in this order."""
        key = tuple(int(index) for index in indices)
        if key not in self._ahead:
            self._ahead[key] = self._submit(key)

    def _submit(self, indices: Sequence[int]) -> list[_Ranges]:
        for reader in self._readers:
            reader._noted = []
        try:
            for index in indices:
                _parts(self.dataset, index)
            noted = [reader._noted or [] for reader in self._readers]
        finally:
            for reader in self._readers:
                reader._noted = None
        return [reader.submit(ranges) for reader, ranges in zip(self._readers, noted, strict=True)]


class AheadSampler(torch.utils.data.Sampler[list[int]]):
    """Made by `ReadAhead.ahead_of`."""

    def __init__(self, data: ReadAhead, batch_sampler: Iterable[Sequence[int]], batches: int) -> None:
        if batches < 1:
            raise UsageError("batches is out of range", expected="1 or more", found=str(batches))
        self._data = data
        self._batches = batch_sampler
        self._depth = batches

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[int]]:
        # What an iteration that was broken off has asked for.
        self._data._ahead.clear()
        waiting: deque[list[int]] = deque()
        for batch in self._batches:
            waiting.append(list(batch))
            self._data.prefetch(batch)
            # What nobody asks for here (worker processes read by themselves) is not kept for ever.
            while len(self._data._ahead) > _MOST_KEPT * (self._depth + 1):
                del self._data._ahead[next(iter(self._data._ahead))]
            if len(waiting) > self._depth:
                yield waiting.popleft()
        yield from waiting


def _readers(dataset: Any) -> Iterator[VolumeBinReader]:
    if hasattr(dataset, "dataset_sample_index"):
        for each in dataset.datasets:
            yield from _readers(each)
        return
    reader = getattr(getattr(dataset, "dataset", None), "bin_reader", None)
    if not isinstance(reader, VolumeBinReader) or not hasattr(dataset, "_query_document_sample_shuffle_indices"):
        raise UsageError(
            "cannot be read ahead",
            expected="a GPTDataset of megatron-core, or a blend of them, on headrace.torch.megatron.indexed_dataset",
            found=f"{type(dataset).__name__} on {type(getattr(dataset, 'dataset', None)).__name__}",
        )
    yield reader


def _parts(dataset: Any, index: int) -> None:
    """Let Megatron ask for the parts of a sample, without making one of them: that it may keep parts of (masks)."""
    if hasattr(dataset, "dataset_sample_index"):
        _parts(dataset.datasets[dataset.dataset_index[index]], dataset.dataset_sample_index[index])
    else:
        dataset._query_document_sample_shuffle_indices(index)
