"""Who may write, in the target's eyes: each writing session is a host of its own, and keeps every other one out.

    register a fresh key            under a fresh host identifier, with a fresh association
    report                          who is registered, who holds
    preempt and abort               every foreign key, the holder's last: whoever holds has been judged dead or ended
    report again                    only our key, and we hold (write exclusive, registrants only)

on member 0 first, where one of several takers wins, then on the others, and all of that before the log is read. Nothing
is ever released: a volume stays held by the key of its last session, so at no moment is a late write of an older one
accepted, and readers never write. The next session preempts it.

Why one of several takers wins. Each says, before it judges the last session, which key holds member 0 (`holder`). To
become the holder is a compare-and-swap: preempting that very key succeeds once. Who finds another key in its place, or
its own one gone, was not the first, and steps back.

Where a member cannot do that, something weaker stands in its place (`Strength`), is told to whoever asks, and has to be
asked for where it protects nobody.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast
from uuid import UUID, uuid4

from headrace.device import (
    BlockDevice,
    FileLock,
    KernelReservations,
    Reservations,
    ReservationType,
    UnsettledRange,
    lock_file,
    new_key,
)
from headrace.errors import (
    CommandFailed,
    DeviceGone,
    DeviceTimeout,
    HeadraceError,
    NotFenced,
    OutcomeUnknown,
    ReservationConflict,
    SessionLost,
    WriterActive,
)
from headrace.volume.media.members import close_all
from headrace.volume.writing.grant import Message

#: Reservations and registrations survive the loss of the target's power.
PERSISTENT = "persistent"
#: A target that restarts forgets them; its hosts find that out before they write again.
UNTIL_RESTART = "until-restart"
#: They belong to the node, not to the job: processes of one node do not keep each other out.
NODE = "node"
#: A lock on a file or block device, which keeps out the other processes of this machine.
MACHINE = "machine"
#: Bytes in the memory of this process, which no other one reaches.
PROCESS = "process"
#: Nothing keeps a writer out that was taken over from.
NONE = "none"
#: A member that is missing: nobody writes there, and whoever does one day fences it first.
ABSENT = "absent"
#: Weakest first. A volume is fenced as well as the worst of its members.
STRENGTHS = (NONE, PROCESS, MACHINE, NODE, UNTIL_RESTART, PERSISTENT, ABSENT)

#: What `kind_of` says of a device with reservations: of a host, which a session is, or of the whole node.
_RESERVED = (NODE, UNTIL_RESTART)

TYPE = ReservationType.WRITE_EXCLUSIVE_REGISTRANTS
_HELD_BY_ALL = (ReservationType.WRITE_EXCLUSIVE_ALL, ReservationType.EXCLUSIVE_ACCESS_ALL)
#: Addresses of devices that lose associations, and tell what that leaves open.
_FABRIC = ("nvme+tcp:", "shared-namespace:")
#: Reports on one member; each further one means that somebody came in between.
_ROUNDS = 16
#: How long a block device of the kernel that has lost its target is asked again, and how often.
NODE_PATIENCE_S = 60.0
_RETRY_S = 0.2


class Fenceable(BlockDevice, Protocol):
    """A device whose target keeps reservations: `headrace.device.NativeDevice` over NVMe."""

    @property
    def reservations(self) -> Reservations: ...

    def as_host(self, hostid: UUID, *, hostnqn: str | None = None, wait: bool = True) -> Fenceable: ...

    def guard_writes(self, key: int, type: ReservationType) -> None: ...

    def unsettled(self) -> list[UnsettledRange]: ...

    def settle(self, generation: int) -> int: ...


class Node(Fenceable, Protocol):
    """A block device of the kernel, which has to be asked."""

    def check_guard(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Ticket(Message):
    """With what other processes write for a session: the host that it is. No secret, but not for everybody either."""

    volume_id: bytes
    session: int
    hostnqn: str
    hostid: bytes
    key: int
    type: int


def kind_of(device: BlockDevice) -> str:
    """What could keep other writers away from this device: a strength (UNTIL_RESTART for all of a host)."""
    said: dict[str, Any] = device.describe()
    if "rescap" in said:
        return UNTIL_RESTART if TYPE in cast(Fenceable, device).reservations.capabilities.types else NONE
    if said.get("transport") == "block":
        if not said["reservations"]["problem"] and TYPE in cast(Fenceable, device).reservations.capabilities.types:
            return NODE
        # A file of this machine is behind a loop device; behind others there may be a network.
        return MACHINE if str(said["kernel"].get("name", "")).startswith("loop") else NONE
    return {"memory": PROCESS, "file": MACHINE, "absent": ABSENT}.get(said.get("transport", ""), NONE)


def in_force(device: BlockDevice) -> str:
    """What does keep other writers away from this device now. DeviceError."""
    kind = kind_of(device)
    if kind not in _RESERVED:
        return kind
    report = cast(Fenceable, device).reservations.report()
    if report.type is not TYPE or not report.holders:
        return NONE
    if kind == NODE:
        return NODE
    return PERSISTENT if report.persistent else UNTIL_RESTART


def weakest(strengths: Sequence[str]) -> str:
    return min(strengths, key=STRENGTHS.index)


def holder(device: BlockDevice) -> int | None:
    """The key under which the device is held; None: nobody holds it, or it keeps no reservations."""
    if kind_of(device) not in _RESERVED:
        return None
    report = cast(Fenceable, device).reservations.report()
    return report.holders[0].key if report.type is not None and report.holders else None


def first(devices: Sequence[BlockDevice], last: Sequence[int] = ()) -> BlockDevice:
    """Where takers meet: the first member, of those that are there, and were not away (`last`) before the others."""
    there = [index for index, device in enumerate(devices) if kind_of(device) != ABSENT]
    return devices[min(there, key=lambda index: (index in last, index))]


def check(devices: Sequence[BlockDevice], *, unfenced: bool) -> None:
    """NotFenced where a device keeps nobody out, unless that was asked for."""
    for device in devices:
        if kind_of(device) == NONE and not unfenced:
            raise NotFenced(
                "this device cannot keep out a writer that was taken over from",
                where=device.uri,
                expected="a target with reservations (write exclusive, registrants only)",
                next_step="serve it from such a target, or accept the risk with unfenced=True (--unfenced)",
            )


@contextmanager
def lost_if_fenced() -> Iterator[None]:
    """What a target refuses to a session, or to a rank of it, means its end."""
    try:
        yield
    except ReservationConflict as conflict:
        raise lost(str(conflict)) from conflict


def lost(found: str) -> SessionLost:
    return SessionLost(
        "another session took the volume over",
        found=found,
        next_step="nothing more can be written here; end this run",
    )


def forgotten(found: str) -> SessionLost:
    return SessionLost(
        "the reservation of this session is gone",
        found=found,
        next_step="another session took the volume over, or the target forgot: nothing more can be written here; "
        "end this run",
    )


def _stepped_back(device: BlockDevice, found: str) -> WriterActive:
    return WriterActive(
        "another session took the volume at the same moment",
        where=device.uri,
        found=found,
        next_step="try again when it has ended",
    )


class Fence:
    """The associations of one session with all members, in order, and what keeps others out of each."""

    def __init__(self, hostid: UUID, key: int) -> None:
        self.hostid = hostid
        self.key = key
        self.devices: list[BlockDevice] = []
        self.strengths: list[str] = []
        self._own: list[BlockDevice] = []
        self._locks: list[FileLock] = []
        self._hostnqn = ""
        #: For each member with reservations: keys that a preempt and abort of ours succeeded for, and for which one
        #: did not.
        self._aborted: dict[int, tuple[set[int], set[int]]] = {}
        #: Members on which this node itself was registered before: what it has under way there nobody aborted.
        self._own_node: set[int] = set()

    @property
    def strength(self) -> str:
        return weakest(self.strengths)

    @property
    def reserved(self) -> bool:
        """Does the target itself refuse the writes of whoever is not this session, on every member?

        Not where it refuses those of other nodes only: an older session on this one may still write."""
        return all(strength in (UNTIL_RESTART, PERSISTENT, ABSENT) for strength in self.strengths)

    def drained(self, key: int) -> bool:
        """Can no command of the session with this key reach any member any more?"""
        return bool(key) and all(self.drained_on(index, key) for index in range(len(self.strengths)))

    def drained_on(self, index: int, key: int) -> bool:
        """`drained`, of one member, that was taken."""
        done, failed = self._aborted.get(index, (set(), set()))
        return key in done - failed and index not in self._own_node

    @property
    def unsettled(self) -> bool:
        """May a command of this process whose association was lost still land, though it was sent again?"""
        return any(cast(Fenceable, device).unsettled() for device in self._own)

    def ticket(self, volume_id: bytes, session: int) -> Ticket | None:
        """None where no member keeps reservations: then every process writes as itself."""
        if not self._own:
            return None
        return Ticket(
            volume_id=volume_id,
            session=session,
            hostnqn=self._hostnqn,
            hostid=self.hostid.bytes,
            key=self.key,
            type=TYPE.value,
        )

    def close(self) -> None:
        """End the associations. The reservations stay."""
        own, self._own = self._own, []
        locks, self._locks = self._locks, []
        for lock in locks:
            lock.release()
        close_all(own)

    def after_fork(self) -> None:
        """In the child: the lock is the parent's, and must not outlive it here."""
        for lock in self._locks:
            lock.release()

    # ---- taking ----

    def open(self, device: BlockDevice, *, wait: bool = True) -> None:
        """An association of the session with the next member. Changes nothing there. `wait`: for a target that is
        away just now."""
        kind = kind_of(device)
        if kind in (MACHINE, NODE):
            # Reservations of a node do not keep its own processes apart.
            lock = lock_file(device.uri)
            if lock is None:
                raise WriterActive(
                    "a process of this machine has the file open for writing, and lives",
                    where=device.uri,
                    next_step="end it, also where it is only stopped",
                )
            self._locks.append(lock)
        if kind in _RESERVED:
            device = cast(Fenceable, device).as_host(self.hostid, wait=wait)
            self._own.append(device)
            self._hostnqn = getattr(device, "hostnqn", "")
        self.devices.append(device)
        self.strengths.append(kind)

    def register(self, index: int) -> None:
        """Be one of those who may write there. Takes nothing from whoever holds."""
        reservations = cast(Fenceable, self.devices[index]).reservations
        try:
            reservations.register(self.key, persist=True if reservations.capabilities.persist else None)
        except CommandFailed:
            if not reservations.capabilities.persist:
                raise
            # What it offers it may not be able to do now (no file to keep it in): `strength` tells.
            reservations.register(self.key)

    def win(self, index: int, judged: int | None, *, first: bool) -> None:
        """Become the holder of one member, where this session is registered. `judged`: the key that must hold it until
        then, where it is the `first`. Where this fails, it may be called again."""
        device = cast(Fenceable, self.devices[index])
        reservations = device.reservations
        drained, failed = self._aborted.setdefault(index, (set(), set()))
        for _ in range(_ROUNDS):
            report = reservations.report()
            keys = {found.key for found in report.registrants}
            if self.key not in keys:
                raise _stepped_back(device, "the registration of this session is gone")
            holders = {found.key for found in report.holders} if report.type is not None else set()
            if first and holders and self.key not in holders and judged not in holders:
                raise _stepped_back(device, "it is held by another session than a moment before")
            foreign = sorted(keys - {self.key}, key=lambda key: key in holders)
            if not foreign and report.type is TYPE and self.key in holders:
                if self.strengths[index] != NODE:
                    self.strengths[index] = PERSISTENT if report.persistent else UNTIL_RESTART
                return
            if not holders:
                with suppress(ReservationConflict):
                    reservations.acquire(self.key, TYPE)
            elif report.type in _HELD_BY_ALL:
                self._preempt(reservations, 0, drained, failed)
                (failed if 0 in failed else drained).update(foreign)
                continue
            for victim in foreign or holders:
                self._preempt(reservations, victim, drained, failed)
        raise NotFenced(
            "the members of the volume are fought over",
            where=device.uri,
            expected="one host that registers and holds",
            next_step="end the other jobs that write to it, or that reserve its namespaces",
        )

    def register_node(self, index: int, judged: int | None, *, first: bool) -> None:
        """This node may have the key of an older session of its own, and hold with it: to replace that very key is a
        compare-and-swap, too."""
        device = cast(Fenceable, self.devices[index])
        kept = cast(KernelReservations, device.reservations)
        report = kept.report()
        own = report.of(kept.hostid) if kept.hostid is not None else None
        if own is not None and first and own.holds and own.key != judged:
            raise _stepped_back(device, "it is held by another session of this node than a moment before")
        try:
            if own is None:
                kept.register(self.key)
            else:
                self._own_node.add(index)
                kept.register(self.key, replace=own.key)
        except ReservationConflict:
            if own is not None or kept.hostid is not None:
                raise _stepped_back(device, "this node was registered by another session") from None
            # A disk that tells no names: what this node had is replaced, whatever it was.
            self._own_node.add(index)
            kept.register(self.key, ignore_existing=True)

    def _preempt(self, reservations: Reservations, victim: int, drained: set[int], failed: set[int]) -> None:
        """The answer is not trusted: the next report says what became of it. But only success means drained."""
        try:
            reservations.preempt(self.key, victim, TYPE, abort=victim not in failed)
            drained.add(victim)
        except ReservationConflict:
            # Gone already, or we are.
            failed.add(victim)
        except (CommandFailed, OutcomeUnknown):
            # Shut out without being drained, or a target that knows preempt only: the next round tries that.
            failed.add(victim)

    # ---- what was taken ----

    def still_held(self, index: int) -> None:
        """WriterActive where somebody else holds the member."""
        if holder(self.devices[index]) != self.key:
            raise _stepped_back(self.devices[index], "it is held by another session")

    def guard(self, index: int) -> None:
        """Each association with the member asks before it writes, from now on."""
        with lost_if_fenced():
            cast(Fenceable, self.devices[index]).guard_writes(self.key, TYPE)

    @property
    def has_to_ask(self) -> bool:
        """On some member nobody asks by himself whether the reservation holds: the kernel hides its associations."""
        return NODE in self.strengths

    def ask(self) -> None:
        """SessionLost where the reservation of this node does not hold any more; DeviceError where nobody answers."""
        for device, strength in zip(self.devices, self.strengths, strict=True):
            if strength == NODE:
                try:
                    cast(Node, device).check_guard()
                except ReservationConflict as conflict:
                    raise forgotten(str(conflict)) from conflict

    def step_back(self) -> None:
        """Leave no registration behind but where it holds: to give that up would let everybody write."""
        for device in self._own:
            with suppress(HeadraceError):
                if holder(device) != self.key:
                    cast(Fenceable, device).reservations.unregister(self.key)
        with suppress(HeadraceError):
            self.close()


def take(
    devices: Sequence[BlockDevice], *, judged: int | None, anybody: bool = False, last: Sequence[int] = ()
) -> Fence:
    """Open an association of a new session with each member, and shut everybody else out.

    `judged`: the key that held the first member when its session was judged dead or ended; `anybody`: whoever holds.
    `last`: members whose turn comes last, since they were away: who holds them now is not who held the volume.
    WriterActive where another taker was first; NotFenced, DeviceError.
    """
    fence = Fence(uuid4(), new_key())
    try:
        for device in devices:
            fence.open(device)
        reserved = [index for index, kind in enumerate(fence.strengths) if kind in _RESERVED]
        reserved.sort(key=lambda index: index in last)
        for index in reserved:
            first = index == reserved[0]
            if not first:
                # Who was stopped between two members finds out before it disturbs its successor there.
                fence.still_held(reserved[0])
            if fence.strengths[index] == NODE:
                fence.register_node(index, judged, first=first and not anybody)
            else:
                fence.register(index)
            fence.win(index, judged, first=first and not anybody)
        for index in reserved:
            fence.still_held(index)
            fence.guard(index)
    except BaseException:
        fence.step_back()
        raise
    return fence


def unsettled(devices: Sequence[BlockDevice]) -> list[tuple[int, int, int]]:
    """(member, offset, bytes) where a command that was given up may still land, of associations with a target."""
    return [
        (member, one.offset, one.length)
        for member, device in enumerate(devices)
        if device.uri.startswith(_FABRIC)
        for one in cast(Fenceable, device).unsettled()
    ]


def haunted(devices: Sequence[BlockDevice], space: Sequence[tuple[int, int, int]]) -> bool:
    """May a command that was given up still land in this space?"""
    return any(
        member == other and start < offset + length and offset < start + count
        for other, offset, length in unsettled(devices)
        for member, start, count in space
    )


def _when_it_answers(ask: Callable[[], None]) -> None:
    """While the kernel has lost the target, I/O waits for it; so does this. DeviceGone, DeviceTimeout, CommandFailed
    after that."""
    deadline = time.monotonic() + NODE_PATIENCE_S
    while True:
        try:
            return ask()
        except (DeviceGone, DeviceTimeout, CommandFailed) as error:
            # EIO is what a command on its way meets when its path is lost.
            cause = error.__cause__
            lost = not isinstance(error, CommandFailed) or (isinstance(cause, OSError) and cause.errno == errno.EIO)
            if not lost or time.monotonic() >= deadline:
                raise
        time.sleep(_RETRY_S)


def join(devices: Sequence[BlockDevice], ticket: Ticket) -> list[BlockDevice]:
    """Associations of the session that gave the ticket, opened by another process of its job, whose targets may be away
    just now. SessionLost."""
    hostid, kind = UUID(bytes=ticket.hostid), ReservationType(ticket.type)
    joined: list[BlockDevice] = []
    own: list[BlockDevice] = []
    try:
        for device in devices:
            found = kind_of(device)
            if found in _RESERVED:
                opened = cast(Fenceable, device).as_host(hostid, hostnqn=ticket.hostnqn or None)
                own.append(opened)
                with lost_if_fenced():
                    if found == NODE:
                        kept = cast(KernelReservations, opened.reservations)
                        _when_it_answers(partial(kept.join, ticket.key, kind))
                        _when_it_answers(partial(opened.guard_writes, ticket.key, kind))
                    else:
                        opened.guard_writes(ticket.key, kind)
                joined.append(opened)
            else:
                joined.append(device)
    except BaseException:
        for device in own:
            with suppress(HeadraceError):
                device.close()
        raise
    return joined


__all__ = [
    "ABSENT",
    "MACHINE",
    "NODE",
    "NONE",
    "PERSISTENT",
    "PROCESS",
    "STRENGTHS",
    "UNTIL_RESTART",
    "Fence",
    "Ticket",
    "check",
    "first",
    "haunted",
    "holder",
    "in_force",
    "join",
    "kind_of",
    "lost",
    "lost_if_fenced",
    "take",
    "unsettled",
    "weakest",
]
