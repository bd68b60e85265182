"""What must hold for a batch before it moves: for the reference engine, as the native one checks by itself.

Both raise `UsageError` for the same batches, with the same words (`tests/device/test_batches.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from headrace.device.batch import Batch
from headrace.device.protocol import U32, U64, BlockDevice, Buffer
from headrace.errors import UsageError

#: The native engine's bound, so that what works with a fake works with a device.
MAX_CHECKSUM_BLOCK_BYTES = 16 << 20


def check_checksums(batch: Batch, checksums: U32 | None, *, writable: bool) -> None:
    """The checksum array fits the batch."""
    if checksums is None:
        return
    if not batch.checksum_block_bytes:
        raise UsageError("checksums need a block size", where="checksum_block_bytes", expected="more than 0", found="0")
    if (
        not isinstance(checksums, np.ndarray)
        or checksums.dtype != np.uint32
        or checksums.ndim != 1
        or not checksums.flags.c_contiguous
        or (writable and not checksums.flags.writeable)
    ):
        kind = "writable contiguous uint32 array" if writable else "contiguous uint32 array"
        found = (
            f"{checksums.dtype}{list(checksums.shape)}" if isinstance(checksums, np.ndarray) else repr(type(checksums))
        )
        raise UsageError("the checksum array cannot be used", where="checksums", expected=kind, found=found)


def check_batch(
    devices: Sequence[BlockDevice], batch: Batch, buffers: Sequence[Buffer], checksums: U32 | None, *, write: bool
) -> None:
    """Every segment lies inside of its device and buffer."""
    if batch.checksum_block_bytes > MAX_CHECKSUM_BLOCK_BYTES:
        raise UsageError(
            "the checksum block is too long",
            where="checksum_block_bytes",
            expected=f"at most {MAX_CHECKSUM_BLOCK_BYTES}",
            found=str(batch.checksum_block_bytes),
        )
    views = [_view(buffer, writable=not write) for buffer in buffers]
    _first(
        batch.member >= len(devices), "no such member", lambda i: (f"less than {len(devices)}", str(batch.member[i]))
    )
    _first(
        batch.buffer >= len(buffers), "no such buffer", lambda i: (f"less than {len(buffers)}", str(batch.buffer[i]))
    )
    block = np.array([device.block_bytes for device in devices], np.uint64)[batch.member]
    size = np.array([device.size_bytes for device in devices], np.uint64)[batch.member]
    room = np.array([view.nbytes for view in views], np.uint64)[batch.buffer]
    length = batch.length
    skip = np.zeros_like(length) if write else batch.skip
    take = length if write else batch.take
    _first(
        batch.offset % block != 0,
        "the offset is not aligned",
        lambda i: (f"a multiple of {block[i]}", str(batch.offset[i])),
    )
    _inside("the range leaves the device", batch.offset, length, size, "an end of at most")
    _inside("the wanted part leaves the segment", skip, take, length, "skip + take of at most")
    _inside("the segment leaves its buffer", batch.buffer_offset, take, room, "an end of at most")
    if checksums is not None:
        if len(checksums) != batch.checksum_count:
            raise UsageError(
                "the checksum array has the wrong length",
                where="checksums",
                expected=str(batch.checksum_count),
                found=str(len(checksums)),
            )
        unit = np.uint64(batch.checksum_block_bytes)
        _first(
            (unit % block != 0) & (block % unit != 0),
            "checksum blocks and logical blocks do not fit together",
            lambda i: (f"a multiple or a divisor of {block[i]}", str(unit)),
        )


def _view(buffer: Buffer, *, writable: bool) -> memoryview:
    try:
        view = memoryview(cast(bytes, buffer))
    except TypeError as error:
        raise UsageError("this object cannot be used as a buffer", found=str(error)) from error
    if not view.c_contiguous or (writable and view.readonly):
        kind = "writable, C-contiguous memory" if writable else "C-contiguous memory"
        raise UsageError("this object cannot be used as a buffer", expected=kind, found=repr(type(buffer)))
    return view


def _inside(what: str, start: U64, count: U64, bound: U64, words: str) -> None:
    # start + count > bound, without an overflow.
    wrong = (start > bound) | (count > bound - np.minimum(start, bound))
    _first(wrong, what, lambda i: (f"{words} {bound[i]}", f"{start[i]} + {count[i]}"))


def _first(wrong: npt.NDArray[np.bool_], what: str, say: Callable[[int], tuple[str, str]]) -> None:
    """Raise for the first row where `wrong`; `say` gives what was expected and found there."""
    rows = np.flatnonzero(wrong)
    if len(rows):
        index = int(rows[0])
        expected, found = say(index)
        raise UsageError(what, where=f"segment {index}", expected=expected, found=found)
