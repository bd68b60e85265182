"""Memory that the loader shares with one process that decodes: bytes of records go in, arrays come out.

It is a file without a name (memfd), which both map whole. It is as long as it may ever be, and sparse: what is never
written takes no memory, so nothing has to grow and nobody maps it anew. Whoever dies, it is gone with the last of the
two. `multiprocessing.shared_memory` has names under /dev/shm, which containers cut off at 64 MiB, which stay behind
after a kill, and which a process of its own tracks; over a pipe every byte would be copied twice more, by the kernel, a
page or so at a time. So a byte is copied once on its way in, and once on its way out, to memory of the caller's own:
the next records overwrite what is here, whatever the caller keeps.

    0         which of its records the process is at, int64
    64        a request: the bytes of fields, and what they are; behind it the answer
              a message is a pickle, its buffers out of band (protocol 5), and at the end where these are

What goes over the socket between them is `PLACE`, a message of so many bytes, whole or not at all (SOCK_SEQPACKET).
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import DatasetError
from headrace.units import GIB, MIB, format_bytes

U8 = npt.NDArray[np.uint8]

#: Of a request and its answer together. A batch of records is no longer (`Records.submit_places`).
MOST_BYTES = 4 * GIB
#: What is kept between two requests; more is given back to the system.
_KEPT_BYTES = 64 * MIB
#: What it is (`DONE`, `RAISED`, ...), where the message begins, its bytes, and those of its end.
PLACE = struct.Struct("<BQQQ")
#: Kinds of answers. READY: the process has loaded the function.
READY, DONE, RAISED = range(3)
BEGIN = 64
_LINE = 64


class Shared:
    """One side of it. `descriptor`: of the file, which becomes its own."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, MOST_BYTES)
        self._bytes: U8 = np.frombuffer(self._map, np.uint8)
        self._at: npt.NDArray[np.int64] = self._bytes[:8].view(np.int64)

    @classmethod
    def make(cls) -> Shared:
        descriptor = os.memfd_create("headrace-decode", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, MOST_BYTES)
            return cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def at(self) -> int:
        """Which record the process is at."""
        return int(self._at[0])

    @at.setter
    def at(self, record: int) -> None:
        self._at[0] = record

    @property
    def held_bytes(self) -> int:
        try:
            return os.fstat(self.descriptor).st_blocks * 512
        except OSError:
            # It was closed meanwhile.
            return 0

    def put(self, value: Any, begin: int) -> tuple[int, int, int]:
        """Write a message: where it begins, and its length and that of its end. DatasetError: it is too long."""
        found: list[pickle.PickleBuffer] = []
        data = pickle.dumps(value, 5, buffer_callback=found.append)
        parts = [np.frombuffer(data, np.uint8), *(np.frombuffer(each.raw(), np.uint8) for each in found)]
        places, at = [], 0
        for part in parts:
            places.append((at, len(part)))
            at = _up(at + len(part))
        end = pickle.dumps(places)
        if begin + at + len(end) > MOST_BYTES:
            raise DatasetError(
                "what becomes of records is too long", expected=f"at most {format_bytes(MOST_BYTES - begin)}",
                found=format_bytes(at + len(end)), next_step="give fewer rows a batch, or decode to less",
            )  # fmt: skip
        for part, (place, length) in zip(parts, places, strict=True):
            self._bytes[begin + place : begin + place + length] = part
        self._bytes[begin + at : begin + at + len(end)] = np.frombuffer(end, np.uint8)
        return begin, at + len(end), len(end)

    def take(self, place: tuple[int, int, int], *, own: bool) -> Any:
        """Read a message; `own`: in memory of its own, else its buffers are views of this one."""
        begin, length, end = place
        if not BEGIN <= begin <= begin + length <= MOST_BYTES or end > length:
            raise DatasetError("a process that decodes says what cannot be", found=f"{length} bytes at {begin}")
        message = self._bytes[begin : begin + length]
        if own:
            message = message.copy()
        data, *buffers = [message[at : at + size] for at, size in pickle.loads(message[length - end :].data)]
        return pickle.loads(data.data, buffers=buffers)

    def behind(self, place: tuple[int, int, int]) -> int:
        """Where there is room behind a message."""
        return _up(place[0] + place[1])

    def shrink(self, used: int) -> None:
        """Give back what is more than a little, of `used` bytes."""
        if used > _KEPT_BYTES:
            self._map.madvise(mmap.MADV_REMOVE, _KEPT_BYTES, -(-(used - _KEPT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _up(at: int) -> int:
    return -(-at // _LINE) * _LINE


def fields_of(records: Sequence[dict[str, memoryview]]) -> list[dict[str, U8]]:
    """Records as a message has them: their bytes stay out of the pickle."""
    return [{kind: np.frombuffer(data, np.uint8) for kind, data in record.items()} for record in records]
