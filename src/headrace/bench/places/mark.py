"""Whose scratch a device is: a mark in the first block that is written, which its owner renews while it lives.

       0          8         24       32        36        40
    +----------+---------+--------+---------+---------+-----------------------+
    | HRBENCH1 | owner   | beat   | length  | CRC32   | JSON: who, since when |
    +----------+---------+--------+---------+---------+-----------------------+

Little-endian; the CRC is of the beat's bytes and of the JSON. Who finds another one's mark looks for some seconds
whether its beat goes on: then somebody measures there. Else its owner is gone, and the mark is taken over. Reservations
would not do: not every target has them, and two runs on one node are one host. Who was stopped for so long that its
mark was taken sees that when it looks next, and ends; its writers look before they go on (`DeviceWriter`).
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from headrace.bench.places.memory import ALIGN
from headrace.bench.places.protocol import U8
from headrace.device import NativeDevice
from headrace.errors import DeviceError, HeadraceError, UsageError

BEAT_S = 1.0
#: For so long it is looked whether a mark is renewed, and whether one that was written is not another's by then.
LOOK_S, SETTLE_S = 6.0, 0.2
_MAGIC = b"HRBENCH1"
_HEAD = struct.Struct("<8s16sQII")
_MOST = ALIGN - _HEAD.size
#: This process: paths that it compares may lead to one device.
_OWNER = secrets.token_bytes(16)


@dataclass(frozen=True)
class Seen:
    owner: bytes
    beat: int
    who: str


class Mark:
    """Of one device, in the block at `at`."""

    def __init__(self, device: NativeDevice, at: int, name: str) -> None:
        self._device, self._at, self._name = device, at, name
        self._owner, self._beat = _OWNER, 0
        self._dead: Seen | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._taken = ""
        self.written = False
        self._who = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"

    @property
    def kept(self) -> bool:
        """It was put, and is renewed."""
        return self._thread is not None

    def living(self) -> str:
        """Who measures there now, in words; "" where nobody does. Takes `LOOK_S` where there is a mark of somebody who
        is gone; longer where the device is slow, for its owner renews it more slowly, too."""
        asked = time.monotonic()
        first = self._read()
        slowest_s = time.monotonic() - asked
        # What an answer says was so when it was asked for, or later.
        begun = asked + slowest_s
        while first is not None and first.owner != self._owner and first != self._dead:
            asked = time.monotonic()
            found = self._read()
            if found is None:
                return ""
            if found != first:
                return found.who
            slowest_s = max(slowest_s, time.monotonic() - asked)
            if asked - begun >= LOOK_S + 3 * slowest_s:
                self._dead = first
                return ""
            time.sleep(min(0.2, LOOK_S))
        return ""

    def refuse(self) -> None:
        """UsageError where somebody measures there."""
        who = self.living()
        if who:
            raise UsageError(
                "another run of headrace bench writes there", where=self._name, found=who,
                next_step="wait for its end, or give another device",
            )  # fmt: skip

    def put(self) -> None:
        """Make it this run's, and keep it so. UsageError where it is another one's."""
        self.refuse()
        self.written = True
        asked = time.monotonic()
        self._write()
        # Another run may have looked at the same moment, and written after this one, no faster.
        time.sleep(SETTLE_S + 2 * (time.monotonic() - asked))
        self.refuse()
        self._look()
        self.check()
        # A daemon: one that waits for a target must not keep the process.
        self._thread = threading.Thread(target=self._renew, name="bench-mark", daemon=True)
        self._thread.start()

    @property
    def sign(self) -> tuple[int, str]:
        """For `check_mark`, in any process."""
        return self._at, self._owner.hex()

    def check(self) -> None:
        """DeviceError where another run took the device."""
        if self._taken:
            raise _taken(self._name, self._taken)

    def end(self) -> bool:
        """Renew it no more. False where it is not this run's any more: what is there is somebody else's."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(2 * BEAT_S)
        self._look()
        return not self._taken

    def erase(self) -> None:
        self._device.write(self._at, np.zeros(ALIGN, np.uint8))

    def _renew(self) -> None:
        while not self._over.wait(BEAT_S) and not self._taken:
            # What a path that is lost for a while did not take comes with the next one.
            with suppress(HeadraceError):
                self._look()
                if not self._taken and not self._over.is_set():
                    self._write()

    def _look(self) -> None:
        self._taken = _other(self._read(), self._owner) or self._taken

    def _read(self) -> Seen | None:
        return _at(self._device, self._at)

    def _write(self) -> None:
        self._beat += 1
        self._device.write(self._at, encode(Seen(self._owner, self._beat, self._who)))


def check_mark(device: NativeDevice, sign: tuple[int, str]) -> None:
    """DeviceError where it is not `Mark.sign`'s any more."""
    at, owner = sign
    if other := _other(_at(device, at), bytes.fromhex(owner)):
        raise _taken(device.uri, other)


def _at(device: NativeDevice, at: int) -> Seen | None:
    block = np.empty(ALIGN, np.uint8)
    device.read_into(at, block)
    return decode(block)


def _other(found: Seen | None, owner: bytes) -> str:
    """Whose it is, in words; "": the owner's."""
    if found is None:
        return "its mark is gone"
    return "" if found.owner == owner else found.who or "somebody"


def _taken(where: str, other: str) -> DeviceError:
    return DeviceError(
        "another run took this device while this one was measuring", where=where, found=other,
        next_step="run it again, one at a time",
    )  # fmt: skip


def encode(seen: Seen) -> U8:
    said = json.dumps({"who": seen.who}).encode()[:_MOST]
    block = np.zeros(ALIGN, np.uint8)
    head = _HEAD.pack(_MAGIC, seen.owner, seen.beat, len(said), _checksum(seen.beat, said))
    block[: _HEAD.size] = np.frombuffer(head, np.uint8)
    block[_HEAD.size : _HEAD.size + len(said)] = np.frombuffer(said, np.uint8)
    return block


def decode(block: U8) -> Seen | None:
    """None: there is none."""
    magic, owner, beat, length, checksum = _HEAD.unpack(block[: _HEAD.size].tobytes())
    said = block[_HEAD.size : _HEAD.size + length].tobytes() if length <= _MOST else b""
    if magic != _MAGIC or checksum != _checksum(beat, said):
        return None
    try:
        found = json.loads(said)
    except (ValueError, RecursionError):
        return None
    who = found.get("who") if isinstance(found, dict) else None
    # Words from media: one line that steers no terminal.
    text = "".join(c if c.isprintable() else "?" for c in str(who)[:200])
    return Seen(owner, beat, text)


def _checksum(beat: int, said: bytes) -> int:
    return zlib.crc32(said, zlib.crc32(struct.pack("<Q", beat)))
