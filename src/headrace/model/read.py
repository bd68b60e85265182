"""Reading a model: its header first, then everything that is wanted in one verified read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from headrace.device.protocol import Buffer
from headrace.errors import ChecksumMismatch, ModelError, ObjectNotFound, UsageError
from headrace.model.dtypes import numpy_dtype
from headrace.model.header import PREFIX_BYTES, Header, TensorInfo, parse, parse_prefix
from headrace.volume import ObjectInfo, Volume

#: The first read: most headers fit, so a model costs two round trips and not three.
FIRST_READ = 65536


class ModelFile:
    """An open safetensors object. Holds its header, no data.

    >>> model = open_safetensors(volume, "models/gpt.safetensors")      # doctest: +SKIP
    >>> weights = model.read_all()                                      # doctest: +SKIP
    """

    def __init__(self, volume: Volume, object_info: ObjectInfo, header: Header) -> None:
        self._volume = volume
        #: This very object: the header says nothing about another one that has its name by now.
        self._object = object_info
        self.name = object_info.name
        self.header = header
        self._tensors = {info.name: info for info in header.tensors}

    def keys(self) -> list[str]:
        """Names of the tensors, in the order of their data."""
        return [info.name for info in self.header.tensors]

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.header.metadata

    def info(self, key: str) -> TensorInfo:
        """dtype, shape and place of one tensor; ModelError where there is none of this name."""
        found = self._tensors.get(key)
        if found is None:
            raise ModelError(f"there is no tensor {key!r}", where=self.name, found=f"{len(self._tensors)} others")
        return found

    def read_into(self, buffers: Mapping[str, Buffer], timeout_s: float | None = 600.0) -> None:
        """Read whole tensors into the caller's buffers, all in one submission, every byte verified.

        Args:
            buffers: writable, contiguous, of exactly the tensor's length in bytes, by name of the tensor.

        ChecksumMismatch names the tensor; ModelError for a name that is not there; UsageError for a buffer that does
        not fit; ObjectNotFound where the model was replaced since it was opened.
        """
        wanted = [(self.info(key), memoryview(cast(bytes, buffer))) for key, buffer in buffers.items()]
        for info, view in wanted:
            if view.nbytes != info.length_bytes or view.readonly or not view.c_contiguous:
                raise UsageError(
                    f"the buffer for tensor {info.name!r}",
                    expected=f"{info.length_bytes} writable contiguous bytes",
                    found=f"{view.nbytes} bytes{', read-only' if view.readonly else ''}",
                )
        wanted = sorted((pair for pair in wanted if pair[0].length_bytes), key=lambda pair: pair[0].begin)
        if not wanted:
            return
        try:
            self._read(wanted, timeout_s)
        except ChecksumMismatch as error:
            # The batch says which object and where; people think in tensors. So read one by one and see which fails.
            for pair in wanted:
                try:
                    self._read([pair], timeout_s)
                except ChecksumMismatch as again:
                    raise ChecksumMismatch(
                        f"tensor {pair[0].name!r} of a model is damaged: {again.what}",
                        where=again.where or self.name,
                        expected=again.expected,
                        found=again.found,
                        next_step="publish the model again",
                    ) from error
            raise

    def _read(self, wanted: list[tuple[TensorInfo, memoryview]], timeout_s: float | None) -> None:
        count = len(wanted)
        self._volume.submit_read(
            self._object,
            np.array([self.header.data_offset + info.begin for info, _ in wanted], np.uint64),
            np.array([info.length_bytes for info, _ in wanted], np.uint64),
            [view.cast("B") for _, view in wanted],
            np.zeros(count, np.uint64),
            np.arange(count, dtype=np.uint32),
        ).wait(timeout_s)

    def read_all(self, keys: Iterable[str] | None = None) -> dict[str, npt.NDArray[Any]]:
        """All tensors (or `keys`) as numpy arrays, one allocation each.

        ModelError for a tensor whose dtype numpy lacks (BF16, F8_*): use `headrace.torch.load_model`, or `read_into`
        and `info`.
        """
        arrays: dict[str, npt.NDArray[Any]] = {}
        for key in self.keys() if keys is None else keys:
            info = self.info(key)
            dtype = numpy_dtype(info.dtype)
            if dtype is None:
                raise ModelError(
                    f"numpy has no dtype for tensor {key!r}",
                    where=self.name,
                    found=info.dtype,
                    next_step="use headrace.torch.load_model, or read_into for the bytes",
                )
            arrays[key] = np.empty(info.shape, dtype)
        # A 0-d array has no byte view of its own.
        self.read_into({key: array.reshape(-1).view(np.uint8).data for key, array in arrays.items()})
        return arrays


def open_safetensors(volume: Volume, name: str) -> ModelFile:
    """Read and check the header of object `name`. ObjectNotFound, or ModelError where it is no safetensors file."""
    if name not in volume:
        volume.refresh()
    info = volume.stat(name)
    length = info.length_bytes
    first = volume.read(name, 0, min(length, FIRST_READ))
    try:
        header_bytes = parse_prefix(first[:PREFIX_BYTES], length)
        header = first[PREFIX_BYTES : PREFIX_BYTES + header_bytes]
        if len(header) < header_bytes:
            rest = volume.read(name, len(first), PREFIX_BYTES + header_bytes - len(first))
            header += rest
        if volume.stat(name).sequence != info.sequence:
            raise ObjectNotFound("the model was replaced while it was opened", where=name, next_step="open it again")
        return ModelFile(volume, info, parse(header, length))
    except ModelError as error:
        error.where = error.where or name
        raise
