"""Who a session is to the targets: a host that holds the members, its heart, and how it learns that it was shut out."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from headrace.device import BlockDevice, lanes
from headrace.errors import DeviceError, SessionLost, UsageError, WriterActive
from headrace.volume import layout
from headrace.volume.catalog.log import LogReader
from headrace.volume.writing import fence, heartbeat
from headrace.volume.writing.fence import Ticket
from headrace.volume.writing.heartbeat import HeartbeatBlock
from headrace.volume.writing.renewal import Renewal

if TYPE_CHECKING:
    from headrace.volume.volume import Volume


class Tenure:
    """The lower part of a session: nobody else writes meanwhile, or it knows that it is lost."""

    _fence: fence.Fence
    _beat: heartbeat.Heart
    _log: LogReader
    #: What data are written with: beside the structures of the log, which go through the devices themselves, so that
    #: neither holds up a heartbeat or a commit. Reads have the volume's own associations.
    writing: list[BlockDevice]
    number: int

    def __init__(self, volume: Volume, run_id: str) -> None:
        self.volume = volume
        self.run_id = run_id
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._lost: SessionLost | None = None
        self._closed = False
        #: The heart was halted, to beat differently, and does not yet.
        self._silent = False
        #: Ends the heart where nobody holds the session any more.
        self._orphaned: weakref.finalize[Any, Any] | None = None
        #: A renewal that has begun, and could not be ended yet.
        self._renewal: Renewal | None = None
        #: A command of a host that this session once was may still land, and no target confirmed its end; whoever takes
        #: over from this session cannot rule it out either.
        self._undrained = False
        #: When it began nothing could land any more of the sessions before it.
        self._settled = False

    @property
    def fence(self) -> str:
        """What keeps out a writer that was taken over from, on the worst member: "persistent", "until-restart", "node",
        "machine", "process" or "none" (`headrace.volume.writing.fence`)."""
        return self._fence.strength

    @property
    def devices(self) -> list[BlockDevice]:
        """All members, as the host that this session is now."""
        return [*self._fence.devices]

    @property
    def ticket(self) -> Ticket | None:
        """For other processes of this job: `Volume.open(..., ticket=...)`, so that they write as this session does.
        Each grant carries it, too. None where no member keeps reservations."""
        return self._fence.ticket(self.volume.superblock.volume_id, self.number)

    @contextmanager
    def lost_if_fenced(self) -> Iterator[None]:
        """A write that the target refuses is the end of this session."""
        try:
            with fence.lost_if_fenced():
                yield
        except SessionLost as lost:
            self._lost = self._lost or lost
            raise

    def _become(self, renewal: Renewal, restless: bool) -> bool:
        """Another host, on every member; on some of them where it raises, and then it may go on later. True where the
        targets confirm that nothing of the old one can land. `restless`: something may."""

        def changed(index: int) -> None:
            self.writing[index : index + 1] = lanes(self._fence.devices[index : index + 1], "checkpoint")

        try:
            self._halt()
            with self.lost_if_fenced():
                renewal.go_on(changed)
            drained = renewal.after.drained(renewal.before.key)
            # Nor can a later renewal tell: the host that it would have to ask about is gone.
            self._undrained |= not drained and (restless or bool(renewal.lost))
            self._fence, self._renewal = renewal.end(), None
        except (WriterActive, SessionLost) as late:
            # Whoever took the volume meanwhile did not see the new key: it must not stay.
            renewal.after.step_back()
            self._lost = self._lost or fence.lost(str(late))
            raise self._lost from late
        finally:
            # Where it cannot be started, whoever asks for the session next tries again (`check`).
            if self._lost is None:
                self._beat_on()
        return drained

    @property
    def _half_way(self) -> Renewal | None:
        """A renewal that has to end before anything but a beat is written."""
        return self._renewal if self._renewal is not None and self._renewal.begun else None

    def _look_whole(self) -> None:
        """`look`, for what is written outside of transactions. DeviceError within a renewal that could not end yet."""
        self.look()
        if self._half_way is not None:
            raise DeviceError(
                "the session is on its way to be another host",
                where=self.volume.uris[0],
                next_step="try again: the next transaction goes on with that first",
            )

    def _halt(self) -> None:
        """The heart stands still until `_beat_on`."""
        self._silent = True
        self._beat.halt()

    def _revive(self) -> None:
        """Beat again where that could not be begun, or ended by itself. SessionLost; HeadraceError, MemoryError: the
        next one tries again."""
        with self._lock:
            if self._closed or self._lost is not None or not (self._silent or self._beat.died):
                return
            self._halt()
            # Others may have taken a session without a heart for dead.
            self._ask_block()
            self._beat_on()

    def _beat_on(self) -> None:
        """The heart again, after it was halted, through the associations that the session has now."""
        half = self._half_way
        named = self._fence if half is None else half.after
        last = self._beat.last()
        mine = last._replace(
            nonce=named.hostid.bytes,
            key=named.key,
            beat=last.beat + 1,
            due_ns=time.time_ns(),
            flags=(layout.UNDRAINED if self._undrained or half is not None else 0)
            | (layout.SETTLED if self._settled else 0),
        )
        block = HeartbeatBlock(self._log.superblock, self._fence.devices, self._log.copies)
        # Also where a target is away just now: a session whose heart stands still gets taken over.
        with suppress(DeviceError), self.lost_if_fenced():
            block.write(mine)
        self._start_heart(block, mine)

    def _start_heart(self, block: HeartbeatBlock, mine: layout.Heartbeat) -> None:
        on_lost = weakref.WeakMethod(self._on_lost)
        watch = heartbeat.Watch(
            on_lost=lambda lost: None if (told := on_lost()) is None else told(lost),
            confirm=not self._fence.reserved,
            ask=self._fence.ask if self._fence.has_to_ask else None,
        )
        beat = heartbeat.start_heart(block, mine, watch)
        if self._orphaned is not None:
            self._orphaned.detach()
        # A session that nobody holds any more must not look alive.
        self._orphaned = weakref.finalize(self, beat.abandon)
        self._beat, self._silent = beat, False

    def _on_lost(self, lost: SessionLost) -> None:
        self._lost = lost

    def check(self) -> None:
        """Raises SessionLost where this session is known to be lost, UsageError where it was closed. Reads nothing; but
        where its heart stands still it beats on first."""
        if self._pid != os.getpid():
            raise UsageError(
                "a session belongs to the process that opened it", next_step="pass grants to other processes"
            )
        if self._closed:
            raise UsageError("the session is closed")
        if self._lost is None and (self._silent or self._beat.died):
            self._revive()
        if self._lost is not None:
            raise self._lost

    def look(self) -> None:
        """`check`, and see in the heartbeat block that nobody took the volume over: before every write to the log.
        Where the targets keep others out there is nothing to look at: they refuse the write. Those behind the
        kernel's block devices are asked whether they still do."""
        self.check()
        self._ask_block()

    def _ask_block(self) -> None:
        if self._fence.reserved:
            return
        try:
            self._beat.check()
            self._fence.ask()
        except SessionLost as lost:
            self._lost = lost
            raise

    @property
    def lock(self) -> threading.RLock:
        """Guards the session's state, which its transactions look at."""
        return self._lock

    def after_fork(self) -> None:
        """In the child, to which nothing of this session belongs."""
        self._fence.after_fork()
