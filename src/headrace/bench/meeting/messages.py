"""The bytes of a message between ranks, and how many there may be.

    0       4        8                      length + 8
    +-------+--------+----------------------+
    | HRM1  | length | JSON, UTF-8          |
    +-------+--------+----------------------+

`length`: big-endian, of the JSON. Nothing that a peer says is believed before it was looked at: a length beyond the
bound, other magic or no object of JSON ends the connection, and no more is taken into memory than has come.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

MAGIC = b"HRM1"
HEADER = struct.Struct(">4sI")
#: Of a message by which a rank says who it is.
HELLO_BYTES = 4 << 10
#: Of what one rank found.
RESULT_BYTES = 16 << 20
#: Of what all ranks found: rank 0 keeps it.
ALL_BYTES = 1 << 30


class Garbage(ValueError):
    """What came is no message of ours."""


def encode(message: Mapping[str, Any], most_bytes: int = RESULT_BYTES) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > most_bytes:
        raise Garbage(f"a message of {len(body)} bytes, more than the {most_bytes} that there may be")
    return HEADER.pack(MAGIC, len(body)) + body


def decode(body: bytes | bytearray) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise Garbage("no JSON") from None
    if not isinstance(message, dict):
        raise Garbage("JSON, but no object")
    return message


class Inbox:
    """Cuts what comes on a connection into messages. `most_bytes` may be raised once it is known who speaks."""

    def __init__(self, most_bytes: int = HELLO_BYTES) -> None:
        self.most_bytes = most_bytes
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """`Garbage`: it cannot become a message."""
        self._bytes += data
        self._length()

    def next(self) -> dict[str, Any] | None:
        length = self._length()
        if length is None or len(self._bytes) < HEADER.size + length:
            return None
        body = self._bytes[HEADER.size : HEADER.size + length]
        del self._bytes[: HEADER.size + length]
        return decode(body)

    def _length(self) -> int | None:
        if not MAGIC.startswith(bytes(self._bytes[:4])[: len(MAGIC)]):
            raise Garbage("it does not begin as a message does")
        if len(self._bytes) < HEADER.size:
            return None
        _, length = HEADER.unpack_from(self._bytes)
        if length > self.most_bytes:
            raise Garbage(f"a message of {length} bytes, more than the {self.most_bytes} that there may be")
        return int(length)
