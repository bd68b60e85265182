"""A namespace that several hosts share, in memory: reservations, caches that get lost, and commands that land late.

    namespace = SharedNamespace(16 * MIB)
    old, new = namespace.connect(), namespace.connect()      two hosts, each with a controller of its own
    namespace.observer = lambda device, command: ...         before each command: look, stop, or have an `Accident`
    namespace.restart()                                      the target comes back without what was not durable
    namespace.land(namespace.ghosts[0])                      a command that nobody knows the fate of arrives

It is as bad as the specification lets a target be, and worse than any one target is:

* Each controller caches what it completed, and its Flush makes durable that and nothing else. When the controller is
  lost, so is its cache; a Flush through another one succeeds all the same.
* The host sends a command again whose association was lost, and succeeds; the first copy of it may live on as a
  **ghost**, and land at any later moment. A ghost that was *admitted* has passed the target's check of reservations and
  is on its way to the medium: only a preempt and abort stops it. Any other is checked when it lands.
* `Quirks` are what targets do: to forget reservations, not to drain, not to know preempt and abort.

What must never happen is watched here: a place is given other bytes while an older command to it may still land
(`overwrites`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import numpy as np

from headrace.errors import UsageError
from headrace.testing.reservations import ReservationState

if TYPE_CHECKING:
    from headrace.testing.hosts import HostDevice

_numbers = itertools.count()

#: Of what a block may hold after a power cut, oldest first and the durable bytes at 0, chooses one.
Choice = Callable[[int], int]


@dataclass(frozen=True, kw_only=True)
class Quirks:
    """What a target may do short of the promise."""

    #: RESCAP is 0, and every reservation verb is refused.
    no_reservations: bool = False
    #: Persistence through power loss cannot be switched on: a restart forgets reservations. Linux nvmet.
    forgets: bool = False
    #: Preempt and abort shuts out, and answers Command Interrupted before the victim's commands are through. SPDK.
    fences_without_draining: bool = False
    #: Preempt and abort is refused. Old SPDK.
    refuses_abort: bool = False


@dataclass(frozen=True, kw_only=True)
class Accident:
    """A command's association is lost before its answer comes."""

    #: It was carried out before that.
    landed: bool = False
    #: A copy of it lives on: None, "admitted" or "unchecked". Of writes and deallocations only.
    ghost: str | None = None
    #: The caller is told that it is lost; else the host sends it again, and succeeds.
    given_up: bool = False
    #: What the controller had cached is lost with it.
    cache_lost: bool = True


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a device is about to do. `verb`: "read", "write", "flush", "deallocate", or that of a reservation."""

    verb: str
    offset: int = 0
    length: int = 0
    data: bytes = b""
    fua: bool = False


@dataclass(eq=False, kw_only=True)
class Ghost:
    """A copy of a write that may land later."""

    host: UUID
    device: HostDevice
    offset: int
    data: bytes
    admitted: bool


@dataclass(frozen=True, kw_only=True)
class Overwrite:
    """Other bytes went to a place that an older command may still reach."""

    offset: int
    by: UUID
    ghost: Ghost


class Controller:
    """One host's association."""

    def __init__(self, host: UUID) -> None:
        self.host = host
        self.alive = True


class SharedNamespace:
    """The medium, the target before it, and the commands on their way. Thread-safe."""

    def __init__(
        self, size_bytes: int, *, block_bytes: int = 4096, volatile_cache: bool = True, quirks: Quirks | None = None
    ) -> None:
        if block_bytes not in (512, 4096) or size_bytes <= 0 or size_bytes % block_bytes:
            raise UsageError("SharedNamespace", expected="blocks of 512 or 4096 bytes", found=f"{size_bytes} bytes")
        self.uri = f"shared-namespace:{next(_numbers)}"
        self.size_bytes = size_bytes
        self.block_bytes = block_bytes
        self.volatile_cache = volatile_cache
        self.quirks = quirks or Quirks()
        self.state = ReservationState()
        self.ghosts: list[Ghost] = []
        self.overwrites: list[Overwrite] = []
        #: Commands that reservations refused.
        self.conflicts = 0
        #: Called before every command, without a lock. What it raises is what the command raises, undone.
        self.observer: Callable[[HostDevice, Command], Accident | None] | None = None
        #: Told of every write that was let to the medium, and whose it was.
        self.on_write: Callable[[UUID], None] | None = None
        self.lock = threading.RLock()
        #: Places whose bytes change while older commands may live, by design, and that `overwrites` leaves out.
        self.volatile_places: list[tuple[int, int]] = []
        self._durable = bytearray(size_bytes)
        self._seen = bytearray(size_bytes)
        #: Block offset -> what controllers hold over the durable bytes, oldest first.
        self._cached: dict[int, list[tuple[Controller, bytes]]] = {}
        self._controllers: list[Controller] = []

    def connect(self, hostid: UUID | None = None, *, read_only: bool = False) -> HostDevice:
        """A handle of one host; handles with one `hostid` share a registration, and each has its own controller."""
        from headrace.testing.hosts import HostDevice

        return HostDevice(self, hostid or uuid4(), read_only=read_only)

    # ---- controllers ----

    def attach(self, host: UUID) -> Controller:
        controller = Controller(host)
        self._controllers.append(controller)
        return controller

    def lose(self, controller: Controller, *, cache_lost: bool = True) -> None:
        """The association ends. Without `cache_lost` what it cached becomes durable in time: now."""
        with self.lock:
            if not controller.alive:
                return
            controller.alive = False
            self._controllers.remove(controller)
            if cache_lost:
                self._drop(lambda owner: owner is controller)
            else:
                self.flush(controller)

    def restart(self, *, caches_lost: bool = True, ghosts_lost: bool = True) -> None:
        """The target's process ends and comes back. `ghosts_lost=False`: admitted ghosts were beyond it already."""
        with self.lock:
            for controller in list(self._controllers):
                self.lose(controller, cache_lost=caches_lost)
            self.state = self.state.copy() if self.state.persist else ReservationState()
            self.state.generation = 0
            self.ghosts = [] if ghosts_lost else [ghost for ghost in self.ghosts if ghost.admitted]

    def _drop(self, lost: Callable[[Controller], bool]) -> None:
        block = self.block_bytes
        for offset, pieces in list(self._cached.items()):
            left = [(owner, data) for owner, data in pieces if not lost(owner)]
            if len(left) != len(pieces):
                self._seen[offset : offset + block] = left[-1][1] if left else self._durable[offset : offset + block]
                self._set(offset, left)

    def _set(self, offset: int, pieces: list[tuple[Controller, bytes]]) -> None:
        if pieces:
            self._cached[offset] = pieces
        else:
            self._cached.pop(offset, None)

    # ---- the medium ----

    def read(self, offset: int, length: int) -> bytes:
        with self.lock:
            return bytes(self._seen[offset : offset + length])

    def write(self, controller: Controller, offset: int, data: bytes, *, fua: bool) -> None:
        """A command of a living association is carried out."""
        with self.lock:
            self._watch(controller.host, offset, data)
            if self.on_write is not None:
                self.on_write(controller.host)
            self._put(controller, offset, data, durable=fua or not self.volatile_cache)

    def _put(self, controller: Controller | None, offset: int, data: bytes, *, durable: bool) -> None:
        block = self.block_bytes
        self._seen[offset : offset + len(data)] = data
        for at in range(0, len(data), block):
            piece = data[at : at + block]
            if durable or controller is None:
                self._durable[offset + at : offset + at + block] = piece
                self._cached.pop(offset + at, None)
            else:
                self._cached.setdefault(offset + at, []).append((controller, piece))

    def flush(self, controller: Controller) -> None:
        """What this controller cached is durable, and what others had cached before it in the same places is past."""
        with self.lock:
            for offset, pieces in list(self._cached.items()):
                last = max((i for i, (owner, _) in enumerate(pieces) if owner is controller), default=None)
                if last is not None:
                    self._durable[offset : offset + self.block_bytes] = pieces[last][1]
                    self._set(offset, pieces[last + 1 :])

    def power_cut(self, choose: Choice, *, in_flight: tuple[int, bytes] | None = None) -> SharedNamespace:
        """What the power's end leaves, as a new namespace: of each block that was in a cache, any of its states.

        `in_flight`: a write that was under way, and may have done any part of its work.
        """
        with self.lock:
            left = SharedNamespace(
                self.size_bytes, block_bytes=self.block_bytes, volatile_cache=self.volatile_cache, quirks=self.quirks
            )
            left.volatile_places = list(self.volatile_places)
            left._durable[:] = self._durable
            candidates = {offset: [data for _, data in pieces] for offset, pieces in self._cached.items()}
            if in_flight is not None:
                offset, data = in_flight
                for at in range(0, len(data), self.block_bytes):
                    candidates.setdefault(offset + at, []).append(data[at : at + self.block_bytes])
            for offset, states in sorted(candidates.items()):
                chosen = choose(len(states) + 1)
                if chosen:
                    left._durable[offset : offset + self.block_bytes] = states[chosen - 1]
            left._seen[:] = left._durable
            if self.state.persist:
                left.state = self.state.copy()
            return left

    def rot(self, offset: int, flip: int) -> bool:
        """Bits of one byte change on the medium. False where a cache stands over it: then nobody would see it."""
        with self.lock:
            if offset // self.block_bytes * self.block_bytes in self._cached:
                return False
            self._durable[offset] ^= flip
            self._seen[offset] ^= flip
            return True

    # ---- ghosts ----

    def may_land(self, ghost: Ghost) -> bool:
        return ghost.admitted or self.state.permits(ghost.host, write=True)

    def land(self, ghost: Ghost) -> bool:
        """The ghost arrives; False where it is refused. It is gone in either case."""
        with self.lock:
            self.ghosts.remove(ghost)
            if not self.may_land(ghost):
                self.conflicts += 1
                return False
            self._put(None, ghost.offset, ghost.data, durable=True)
            return True

    def drain(self, hosts: list[UUID]) -> None:
        """What preempt and abort promises: nothing of these hosts will land any more."""
        with self.lock:
            self.ghosts = [ghost for ghost in self.ghosts if ghost.host not in hosts]

    def _watch(self, host: UUID, offset: int, data: bytes) -> None:
        for ghost in self.ghosts:
            start = max(offset, ghost.offset)
            end = min(offset + len(data), ghost.offset + len(ghost.data))
            if start >= end or not self.may_land(ghost):
                continue
            if any(low <= start and end <= high for low, high in self.volatile_places):
                continue
            new = np.frombuffer(data, np.uint8)[start - offset : end - offset]
            old = np.frombuffer(ghost.data, np.uint8)[start - ghost.offset : end - ghost.offset]
            if not np.array_equal(new, old):
                self.overwrites.append(Overwrite(offset=start, by=host, ghost=ghost))


__all__ = ["Accident", "Choice", "Command", "Controller", "Ghost", "Overwrite", "Quirks", "SharedNamespace"]
