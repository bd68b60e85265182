"""The messages of a load on their way: each is read by one rank, verified there, and sent to the others that want it.

A few are under way at a time, in the order that all ranks have in common; the oldest is waited for. Since the first
message that is not yet everywhere is the oldest one of all its ranks, there is no circle of ranks that wait. A rank
whose read fails still sends what it owes, marked as void, and takes what it is owed: nobody waits for its deadline, and
the error is told where the load ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.checkpoint.shares import Share
from headrace.device import crc32c
from headrace.errors import ChecksumMismatch
from headrace.torch.load.together import NO_TAG, Together
from headrace.torch.ranks.coordination import PeerFailed
from headrace.units import MIB

#: Of buffers under way on a rank.
WINDOW_BYTES = 128 * MIB
#: Behind the bytes of a message: whether they are good, and their CRC32C, taken by who read and verified them.
_TRAILER = 8
_GOOD, _VOID = 0, 1
_STATUS = np.dtype([("void", "<u4"), ("sum", "<u4")])

U64 = npt.NDArray[np.uint64]
U8 = npt.NDArray[np.uint8]
#: Starts to read these rows, one after another, into the buffer of this message; it has `wait` and `done`.
Read = Callable[[U64, U8, int], Any]
#: Message number and its bytes, which are good.
Arrived = Callable[[int, U8], None]


@dataclass
class _Message:
    number: int
    reader: int
    others: list[int]
    #: Bytes and trailer.
    data: torch.Tensor
    reading: Any = None
    works: list[tuple[int, Any]] = field(default_factory=list)

    @property
    def bytes(self) -> U8:
        found: U8 = self.data.numpy()[:-_TRAILER]
        return found

    @property
    def status(self) -> npt.NDArray[np.void]:
        found: npt.NDArray[np.void] = self.data.numpy()[-_TRAILER:].view(_STATUS)
        return found


class Exchange:
    """One load's messages, seen from one rank."""

    def __init__(self, ranks: Together, share: Share, read: Read, arrived: Arrived) -> None:
        self._ranks = ranks
        self._share = share
        self._read = read
        self._arrived = arrived
        self._under_way: deque[_Message] = deque()
        self._failure: Exception | None = None
        #: Bytes read here, sent to each of the others, and got from others.
        self.read_bytes = self.sent_bytes = self.received_bytes = 0

    def run(self) -> None:
        """All messages. Raises what failed here when every message has been sent or taken; PeerFailed where another
        rank does not answer, or could not read: then at once, or at the end."""
        under_way = 0
        try:
            for number in range(len(self._share)):
                size = self._size(number)
                while self._under_way and under_way + size > WINDOW_BYTES:
                    under_way -= self._finish()
                self._begin(number, size)
                under_way += size
                self._send_what_is_read()
            while self._under_way:
                self._finish()
        except PeerFailed as error:
            # What happened here tells more.
            if self._failure is not None:
                raise self._failure from error
            raise
        finally:
            # Only after an error: what is still read must have ended, since it is read into buffers of ours.
            for message in self._under_way:
                if message.reading is not None:
                    self._try(message.reading.wait)
        if self._failure is not None:
            raise self._failure

    def _rows(self, number: int) -> U64:
        rows: U64 = self._share.rows[self._share.bounds[number] : self._share.bounds[number + 1]]
        return rows

    def _tag(self, number: int) -> int:
        # A rank may send a later message first: gloo tells them apart by this.
        return int(self._share.number[number]) % NO_TAG

    def _size(self, number: int) -> int:
        rows = self._rows(number)
        return int((rows[:, 2] - rows[:, 1]).sum())

    def _begin(self, number: int, size: int) -> None:
        reader, ranks = int(self._share.reader[number]), self._share.ranks(number)
        message = _Message(
            number=number,
            reader=reader,
            others=[rank for rank in ranks if rank != self._ranks.rank],
            data=torch.empty(size + _TRAILER, dtype=torch.uint8),
        )
        if reader != self._ranks.rank:
            message.works.append((reader, self._ranks.receive(message.data, reader, self._tag(number))))
            self.received_bytes += size
        elif self._failure is None:
            self.read_bytes += size
            self.sent_bytes += size * len(message.others)
            message.reading = self._try(lambda: self._read(self._rows(number), message.bytes, number))
        self._under_way.append(message)

    def _try(self, what: Callable[[], Any]) -> Any:
        try:
            return what()
        except Exception as error:
            self._failure = self._failure or error
            return None

    def _send_what_is_read(self) -> None:
        for message in self._under_way:
            if message.reading is not None and message.reading.done():
                self._send(message)

    def _send(self, message: _Message) -> None:
        reading, message.reading = message.reading, None
        if reading is not None:
            self._try(reading.wait)
        message.status[0] = (_GOOD, crc32c(message.bytes)) if self._failure is None else (_VOID, 0)
        message.works = [
            (rank, self._ranks.send(message.data, rank, self._tag(message.number))) for rank in message.others
        ]

    def _finish(self) -> int:
        message = self._under_way[0]
        mine = message.reader == self._ranks.rank
        if mine and not message.works:
            self._send(message)
        if mine and self._failure is None:
            self._try(lambda: self._arrived(message.number, message.bytes))
        for rank, work in message.works:
            self._ranks.wait(work, rank)
        if not mine:
            self._take(message)
        self._under_way.popleft()
        return int(message.data.numel()) - _TRAILER

    def _take(self, message: _Message) -> None:
        void, expected = message.status[0].tolist()
        reader = self._ranks.ranks[message.reader]
        if void:
            self._failure = self._failure or PeerFailed(
                f"rank {reader} could not read its part of the load", next_step="it says why itself"
            )
        elif (found := crc32c(message.bytes)) != expected:
            self._failure = self._failure or ChecksumMismatch(
                f"bytes of a checkpoint were damaged on their way from rank {reader}",
                where=f"message {message.number} of the load",
                expected=f"CRC32C {expected:#010x}, as they were read",
                found=f"{found:#010x}",
                next_step="try again; if it stays, look at the network and the memory of the two nodes",
            )
        elif self._failure is None:
            self._try(lambda: self._arrived(message.number, message.bytes))


__all__ = ["Exchange"]
