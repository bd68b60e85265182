"""Who may write: one session at a time, told apart by a block that its holder beats.

The block is claimed, beaten and read on both log copies. Time is only ever the reader's own monotonic clock: a session
is taken for dead when its beat has not changed over a number of its own intervals, every look having been answered
promptly.

This is courtesy, not a fence (`volume info` says "unfenced"): a writer that was stopped and wakes up is kept from
committing (it looks at the block before every commit, and its log is no longer the one in force), but not from writing
to the space that it was given. That is why its windows stay quarantined.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone

import numpy as np

from headrace.device import BlockDevice
from headrace.errors import DeviceError, DeviceTimeout, SessionLost, WriterActive
from headrace.volume.durable import write_through
from headrace.volume.layout import ACTIVE, ALIGN, CLOSED, Heartbeat, Superblock

#: A beat every so often, by default, and how many missed ones mean death.
INTERVAL_S = 1.0
MISSED_BEATS = 5
#: A claim is looked at again after this time: of two that claimed at once the later writer stays.
SETTLE_S = 0.05
#: An interval that a heartbeat block asks others to respect is bounded, so that no bad block makes anybody wait for
#: ever.
_MAX_INTERVAL_S = 60.0
#: Looks for each missed beat that is wanted, before it is given up to tell.
_MAX_LOOKS = 10


class HeartbeatBlock:
    """The block on both log copies."""

    def __init__(self, superblock: Superblock, devices: Sequence[BlockDevice]) -> None:
        self._superblock = superblock
        self._places = [
            (devices[member], offset)
            for member, offset in zip(superblock.log_member, superblock.log_offset, strict=True)
        ]

    def read(self) -> Heartbeat | None:
        """The newest valid copy, or None. DeviceError where no copy can be read."""
        found: list[Heartbeat] = []
        errors = []
        for device, offset in self._places:
            buffer = np.empty(ALIGN, np.uint8)
            try:
                device.read_into(offset, buffer)
            except DeviceError as error:
                errors.append(error)
                continue
            heartbeat = Heartbeat.decode(buffer.tobytes(), self._superblock.volume_id)
            if heartbeat is not None:
                found.append(heartbeat)
        if len(errors) == len(self._places):
            raise errors[0]
        return max(found, key=lambda h: (h.session, h.beat), default=None)

    def write(self, heartbeat: Heartbeat) -> None:
        data = heartbeat.encode(self._superblock.volume_id)
        for device, offset in self._places:
            write_through(device, offset, data)


def new_heartbeat(session: int, run_id: str, interval_s: float) -> Heartbeat:
    return Heartbeat(
        state=ACTIVE,
        session=session,
        nonce=secrets.token_bytes(16),
        beat=1,
        interval_ns=int(interval_s * 1e9),
        started_ns=time.time_ns(),
        pid=os.getpid(),
        run_id=run_id,
        host=socket.gethostname(),
    )


def same_session(found: Heartbeat | None, mine: Heartbeat) -> bool:
    """Does the block still name us? A block that is older than ours lost our claim in a crash: it is ours to write
    again.
    """
    if found is None or found.session < mine.session:
        return True
    return found.session == mine.session and found.nonce == mine.nonce


def describe(heartbeat: Heartbeat) -> str:
    since = datetime.fromtimestamp(heartbeat.started_ns / 1e9, timezone.utc).astimezone()
    return (
        f"run {heartbeat.run_id!r} on host {heartbeat.host}, process {heartbeat.pid}, "
        f"since {since.isoformat(sep=' ', timespec='seconds')}"
    )


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


def claim(
    block: HeartbeatBlock, mine: Heartbeat, *, takeover: str, missed_beats: int, where: str, first: bool
) -> tuple[Heartbeat, bool]:
    """Become the holder. Returns the claim (its session number is above all seen) and whether the predecessor ended
    cleanly.

    `first`: no session has ever been. Raises WriterActive.
    """
    held = block.read()
    last = mine.session - 1
    if (held is None and not first) or (held is not None and held.session < last):
        # Both copies are damaged, or a late beat of an older session stands there (the log knows a newer one). A living
        # holder writes them again at its next beat.
        time.sleep(2 * INTERVAL_S)
        held = block.read()
    clean = first if held is None else held.state == CLOSED and held.session >= last
    if held is not None and held.state == ACTIVE:
        may_take = takeover == "if-dead" or held.run_id == mine.run_id
        silent = wait_for_silence(block, held, missed_beats if may_take else min(2, missed_beats))
        if not silent or not may_take:
            raise WriterActive(
                "another session holds the volume for writing" + (", and its heart beats" if not silent else ""),
                where=where,
                found=describe(held),
                next_step="wait until it ends, or end it"
                if not silent
                else 'it seems to be dead: open the session with takeover="if-dead", or give the command --takeover',
            )
    mine = mine._replace(session=max(mine.session, held.session + 1 if held is not None else 0))
    block.write(mine)
    time.sleep(SETTLE_S)
    now = block.read()
    if now is None or now.nonce != mine.nonce:
        raise WriterActive(
            "another session took the volume at the same moment",
            where=where,
            found=describe(now) if now is not None else None,
            next_step="try again when it has ended",
        )
    return mine, clean


class HeartbeatThread:
    """Beats until it is stopped, or finds that the block names somebody else."""

    def __init__(self, block: HeartbeatBlock, mine: Heartbeat, *, on_lost: Callable[[SessionLost], None]) -> None:
        self._block = block
        self._mine = mine
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._lock = threading.Lock()
        #: The last failure to beat; cleared by the next success.
        self.trouble: DeviceError | None = None
        self._thread = threading.Thread(target=self._run, name="headrace-heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises SessionLost where the block names another session; DeviceError where it cannot be read."""
        found = self._block.read()
        if not same_session(found, self._mine):
            assert found is not None
            raise SessionLost(
                "another session took the volume over",
                found=describe(found),
                next_step="nothing more can be committed here; end this run",
            )

    def _run(self) -> None:
        interval_s = self._mine.interval_ns / 1e9
        while not self._stop.wait(interval_s):
            try:
                with self._lock:
                    if self._stop.is_set():
                        return
                    self.check()
                    self._mine = self._mine._replace(beat=self._mine.beat + 1)
                    self._block.write(self._mine)
                self.trouble = None
            except DeviceError as error:
                # The device may come back; whoever watches us waits for the same device.
                self.trouble = error
            except SessionLost as lost:
                self._on_lost(lost)
                return

    def stop(self, state: int | None) -> None:
        """Beat no more; `state` (CLOSED...) is written where the block is still ours. None: write nothing."""
        self._stop.set()
        self._thread.join()
        if state is not None:
            with self._lock:
                self.check()
                self._block.write(self._mine._replace(state=state, beat=self._mine.beat + 1))
