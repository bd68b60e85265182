"""Who may write: one session at a time, told apart by a block that its holder beats.

The block is claimed, beaten and read on both log copies. Time is only ever the reader's own monotonic clock: a session
is taken for dead when its beat has not changed over a number of its own intervals, every look having been answered
promptly.

This is courtesy: it says who holds, and whether that one lives. What keeps a writer out that was taken over from is the
fence (`fence.py`). Where there is none, the block is all: a writer that wakes up looks at it before and after every
commit, and its log is no longer the one in force; but nothing keeps it from writing to the space that it was given.

The heart is a native thread that writes blocks made beforehand (`NativeHeart`), so that a process that holds the GIL
for minutes does not seem dead. Devices that are not the native engine's are beaten by a thread of Python's.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import numpy as np

from headrace.device import Beat, BlockDevice, start_beat
from headrace.errors import DeviceError, DeviceTimeout, ReservationConflict, SessionLost, WriterActive
from headrace.volume.data.durable import write_through
from headrace.volume.layout import ACTIVE, ALIGN, CLOSED, LOG_COPIES, SETTLED, Heartbeat, Superblock
from headrace.volume.space.worker import Worker
from headrace.volume.writing.fence import lost as fenced_off
from headrace.volume.writing.fence import lost_if_fenced

#: A beat every so often, by default, and how many missed ones mean death.
INTERVAL_S = 1.0
MISSED_BEATS = 5
#: A claim is looked at again after this time: of two that claimed at once the later writer stays.
SETTLE_S = 0.05
#: How often, at most, a target is asked whether the reservation of this node still holds.
ASK_S = 1.0
#: An interval that a heartbeat block asks others to respect is bounded, so that no bad block makes anybody wait for
#: ever.
_MAX_INTERVAL_S = 60.0
#: Beats that are made beforehand: how long the GIL may be held, in intervals.
AHEAD = 512
#: Looks for each missed beat that is wanted, before it is given up to tell.
_MAX_LOOKS = 10


class HeartbeatBlock:
    """The block on the log copies that count."""

    def __init__(
        self, superblock: Superblock, devices: Sequence[BlockDevice], copies: Sequence[int] | None = None
    ) -> None:
        """`copies`: those that count and are there; by default as the superblock says it."""
        self._superblock = superblock
        #: Of all members.
        self.devices = devices
        if copies is None:
            copies = [copy for copy in range(LOG_COPIES) if superblock.epoch.counts(copy)]
        #: Device and offset of each copy.
        self.places = [(devices[superblock.log_member[copy]], superblock.log_offset[copy]) for copy in copies]

    def read(self) -> Heartbeat | None:
        """The newest valid copy, or None. DeviceError where no copy can be read."""
        found: list[Heartbeat] = []
        errors = []
        for device, offset in self.places:
            buffer = np.empty(ALIGN, np.uint8)
            try:
                device.read_into(offset, buffer)
            except DeviceError as error:
                errors.append(error)
                continue
            heartbeat = Heartbeat.decode(buffer.tobytes(), self._superblock.volume_id)
            if heartbeat is not None:
                found.append(heartbeat)
        if len(errors) == len(self.places):
            raise errors[0]
        return max(found, key=lambda h: (h.session, h.beat), default=None)

    def encode(self, heartbeat: Heartbeat) -> bytes:
        return heartbeat.encode(self._superblock.volume_id)

    def write(self, heartbeat: Heartbeat) -> None:
        data = self.encode(heartbeat)
        for device, offset in self.places:
            write_through(device, offset, data)


def new_heartbeat(
    session: int, run_id: str, interval_s: float, *, nonce: bytes | None = None, key: int = 0
) -> Heartbeat:
    now = time.time_ns()
    return Heartbeat(
        state=ACTIVE,
        session=session,
        nonce=nonce or secrets.token_bytes(16),
        beat=1,
        interval_ns=int(interval_s * 1e9),
        started_ns=now,
        pid=os.getpid(),
        run_id=run_id,
        host=socket.gethostname(),
        key=key,
        due_ns=now,
    )


def same_session(found: Heartbeat | None, mine: Heartbeat) -> bool:
    """Does the block still name us? A block that is older than ours lost our claim in a crash: it is ours to write
    again.
    """
    if found is None or found.session < mine.session:
        return True
    return found.session == mine.session and found.nonce == mine.nonce


def describe(heartbeat: Heartbeat) -> str:
    since = _when(heartbeat.started_ns)
    return f"run {heartbeat.run_id!r} on host {heartbeat.host}, process {heartbeat.pid}, since {since}"


def _when(time_ns: int) -> str:
    try:
        return datetime.fromtimestamp(time_ns / 1e9, timezone.utc).astimezone().isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{time_ns / 1e9:.0f} s after 1970"


def wait_for_silence(block: HeartbeatBlock, seen: Heartbeat, missed_beats: int) -> bool:
    """Watch `seen` for `missed_beats` of its intervals; True when it never beat, False as soon as it does.

    A look that took longer than an interval proves nothing about its owner, who may have waited for the same device:
    the count starts again.
    """
    interval_s = min(max(seen.interval_ns / 1e9, 0.01), _MAX_INTERVAL_S)
    missed = looks = 0
    while missed < missed_beats:
        looks += 1
        if looks > _MAX_LOOKS * missed_beats:
            raise DeviceTimeout(
                "the volume answers too slowly to tell whether its writer lives",
                expected=f"answers within {interval_s:g} s",
                found=describe(seen),
                next_step="try again when the target is less busy",
            )
        started = time.monotonic()
        time.sleep(interval_s)
        asked = time.monotonic()
        now = block.read()
        answered = time.monotonic()
        if now is not None and (now.session, now.nonce, now.beat, now.state) != (
            seen.session,
            seen.nonce,
            seen.beat,
            seen.state,
        ):
            return False
        missed = missed + 1 if answered - asked < interval_s and asked - started < 2 * interval_s + 0.5 else 0
    return True


@dataclass(frozen=True)
class Verdict:
    """What became of the last session, as the heartbeat block tells."""

    last: Heartbeat | None
    #: It ended, and left nothing under way.
    clean: bool

    @property
    def number(self) -> int:
        """Of the session that was judged; 0: there is none."""
        return 0 if self.last is None else self.last.session


def judge(
    block: HeartbeatBlock,
    *,
    run_id: str,
    takeover: str,
    missed_beats: int,
    where: str,
    last_session: int,
    holder: int | None = None,
) -> Verdict:
    """May a new session follow the last one? WriterActive.

    `last_session`: the last one that the log knows; 0: none has ever been. `holder`: under which key the target said,
    before this was called, that the volume is held.
    """
    held = block.read()
    if (held is None and last_session) or (held is not None and held.session < last_session):
        # Both copies are damaged, or a late beat of an older session stands there (the log knows a newer one). A living
        # holder writes them again at its next beat.
        time.sleep(2 * INTERVAL_S)
        held = block.read()
    if takeover == "now":
        pass  # By hand: whoever asks for it has looked.
    elif held is not None and held.state == ACTIVE:
        may_take = takeover == "if-dead" or held.run_id == run_id
        began = time.monotonic()
        silent = wait_for_silence(block, held, missed_beats if may_take else min(2, missed_beats))
        watched = f"{time.monotonic() - began:.1f} s"
        if not silent or not may_take:
            raise WriterActive(
                "another session holds the volume for writing" + (", and its heart beats" if not silent else ""),
                where=where,
                found=describe(held)
                + (
                    f"; a beat within {watched}"
                    if not silent
                    else f"; no beat in {watched}, the last one due at {_when(held.due_ns)}"
                ),
                next_step="wait until it ends, or end it"
                if not silent
                else 'it seems to be dead: open the session with takeover="if-dead", or give the command --takeover',
            )
    elif holder is not None and (held is None or holder != held.key):
        # Somebody holds the volume who never said so here: a session that is just beginning says it in a moment.
        seen = held or new_heartbeat(0, "", INTERVAL_S)._replace(beat=0)
        if not wait_for_silence(block, seen, missed_beats):
            raise taken_meanwhile(where, block.read())
    return Verdict(held, last_session == 0 if held is None else held.state == CLOSED and held.session >= last_session)


def taken_meanwhile(where: str, by: Heartbeat | None) -> WriterActive:
    return WriterActive(
        "another session took the volume at the same moment",
        where=where,
        found=describe(by) if by is not None else None,
        next_step="try again when it has ended",
    )


def claim(block: HeartbeatBlock, mine: Heartbeat, *, where: str, fenced: bool, judged: int) -> Heartbeat:
    """Say who holds from now on; the number is above all that were seen. `fenced`: nobody else can write here.

    Else, who was stopped since it judged session `judged` finds one that has come since, which nobody has judged; and
    of several that claim at once the last writer stays. The others raise WriterActive.
    """
    held = block.read()
    if not fenced and held is not None and held.session > judged:
        raise taken_meanwhile(where, held)
    number = max(mine.session, held.session + 1 if held is not None else 0)
    if number != judged + 1:
        # One has come and gone that nobody judged.
        mine = mine._replace(flags=mine.flags & ~SETTLED)
    mine = mine._replace(session=number)
    block.write(mine)
    if fenced:
        return mine
    time.sleep(SETTLE_S)
    now = block.read()
    if now is None or now.nonce != mine.nonce:
        raise taken_meanwhile(where, now)
    return mine


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What a heart looks out for."""

    on_lost: Callable[[SessionLost], None]
    #: Look at the block before it is written, since no target refuses what a lost session writes.
    confirm: bool
    #: Asked every so often, where that is not done elsewhere: does the reservation still hold? SessionLost.
    ask: Callable[[], None] | None = None


def sign_off(block: HeartbeatBlock, last: Heartbeat, state: int, *, confirm: bool) -> None:
    """The last beat of all. `confirm`: only where the block is still ours; else SessionLost."""
    if confirm:
        check(block, last)
    with lost_if_fenced():
        block.write(last._replace(state=state, beat=last.beat + 1, due_ns=time.time_ns()))


def check(block: HeartbeatBlock, mine: Heartbeat) -> None:
    """SessionLost where the block names another session; DeviceError where it cannot be read."""
    found = block.read()
    if not same_session(found, mine):
        assert found is not None
        raise fenced_off(describe(found))


class Heart(ABC):
    """Beats until it is stopped, or finds that the volume is another's: then `on_lost` is called, once."""

    _thread: Worker

    def __init__(self, block: HeartbeatBlock, mine: Heartbeat, watch: Watch) -> None:
        self._block = block
        self._mine = mine
        self._on_lost = watch.on_lost
        self._confirm = watch.confirm
        self._ask = watch.ask

    def check(self) -> None:
        """Raises SessionLost where the block names another session; DeviceError where it cannot be read."""
        check(self._block, self._mine)

    def _live(self, work: Callable[[], None]) -> None:
        """HeadraceError, MemoryError: it never lived, and never will."""
        self._thread = Worker(work, name="headrace-heartbeat")
        try:
            self._thread.start_living()
        except BaseException:
            self.abandon()
            raise

    @property
    def died(self) -> bool:
        """It stands still, and nobody stopped it."""
        return self._thread.died

    def stop(self, state: int | None) -> None:
        """Beat no more; `state` (CLOSED...) is written where the block is still ours. None: write nothing."""
        self.halt()
        if state is not None:
            sign_off(self._block, self.last(), state, confirm=self._confirm)

    def last(self) -> Heartbeat:
        """The last beat that may have been written."""
        return self._mine

    @abstractmethod
    def halt(self) -> None:
        """Wait for the beat under way, and begin no other."""

    @abstractmethod
    def abandon(self) -> None:
        """Begin no other beat; wait for nothing."""


class HeartbeatThread(Heart):
    """The heart in Python, for devices that are not the native engine's."""

    def __init__(self, block: HeartbeatBlock, mine: Heartbeat, watch: Watch) -> None:
        super().__init__(block, mine, watch)
        self._stop = threading.Event()
        self._live(self._run)

    def _run(self) -> None:
        interval_s = self._mine.interval_ns / 1e9
        while not self._stop.wait(interval_s):
            try:
                if self._confirm:
                    self.check()
                if self._ask is not None:
                    self._ask()
                self._mine = self._mine._replace(beat=self._mine.beat + 1, due_ns=time.time_ns())
                self._block.write(self._mine)
            except ReservationConflict as conflict:
                self._on_lost(fenced_off(str(conflict)))
                return
            except (DeviceError, MemoryError):
                # The device may come back, and memory; whoever watches us waits for the same device.
                continue
            except SessionLost as lost:
                self._on_lost(lost)
                return

    def abandon(self) -> None:
        self._stop.set()

    def halt(self) -> None:
        self._stop.set()
        if not self._thread.current:
            self._thread.join()


class NativeHeart(Heart):
    """The heart as a native thread, which this one feeds and listens to."""

    def __init__(self, block: HeartbeatBlock, mine: Heartbeat, watch: Watch, beat: Beat) -> None:
        super().__init__(block, mine, watch)
        self._beat = beat
        self._fed = mine.beat
        self._feed()
        self._live(self._tend)

    def _feed(self) -> None:
        begun = self._mine.beat + self._beat.written()
        now, last = time.time_ns(), self._fed + AHEAD
        blocks = [
            self._block.encode(self._mine._replace(beat=beat, due_ns=now + (beat - begun) * self._mine.interval_ns))
            for beat in range(self._fed + 1, last + 1)
        ]
        self._beat.feed(blocks)
        self._fed = last

    def _tend(self) -> None:
        patience_s = 60.0 if self._ask is None else max(self._mine.interval_ns / 1e9, ASK_S)
        while True:
            try:
                news = self._beat.news(patience_s)
                if news == "ended":
                    return
                if news == "low":
                    self._feed()
                elif news == "changed":
                    self.check()
                    # Damaged, or older than our claim: ours to write again.
                    self._beat.resume()
                elif self._ask is not None:
                    self._ask()
            except ReservationConflict as conflict:
                self._on_lost(fenced_off(str(conflict)))
                return
            except SessionLost as lost:
                self.abandon()
                self._on_lost(lost)
                return
            except (DeviceError, MemoryError):
                # It may come back, and memory, too. The heart waits.
                time.sleep(min(self._mine.interval_ns / 1e9, 1.0))

    def last(self) -> Heartbeat:
        return self._mine._replace(beat=self._mine.beat + self._beat.written())

    @property
    def trouble(self) -> str | None:
        """The last failure to beat; None where the last beat succeeded."""
        return self._beat.trouble()

    def abandon(self) -> None:
        self._beat.stop(0.0)

    def halt(self) -> None:
        # The device has a deadline, so the beat under way ends.
        while not self._beat.stop(60.0):
            pass
        if not self._thread.current:
            self._thread.join()


def start_heart(block: HeartbeatBlock, mine: Heartbeat, watch: Watch) -> Heart:
    """Beat `mine`, which the block holds."""
    beat = start_beat(block.places, block.encode(mine), interval_s=mine.interval_ns / 1e9, confirm=watch.confirm)
    return HeartbeatThread(block, mine, watch) if beat is None else NativeHeart(block, mine, watch, beat)
