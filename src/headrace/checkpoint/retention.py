"""Which checkpoints of a run stay: the last ones, every Nth step, and those that are pinned.

The last ones are those that were committed last (`headrace.checkpoint.order`). Where a job went back, and too many are
there, those that it left behind go before any that it goes on from.

A pin is an object of the checkpoint, `RUN/step-N/pin`, that is put and deleted like any other: in a commit, by the
session that holds the volume. Its bytes are JSON for people (since when, and a note); that it is there is what counts.
A pinned step is deleted neither by retention nor by name, and never replaced.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from headrace.checkpoint.names import CheckpointId
from headrace.checkpoint.order import Found, find, line
from headrace.errors import CheckpointFailed, ObjectNotFound, UsageError, VolumeFull
from headrace.units import format_bytes
from headrace.volume import ObjectInfo, Session, Transaction, Volume
from headrace.volume.writing.reserve import Reservation

#: What is reserved for a manifest; most are much smaller.
MANIFEST_ROOM_BYTES = 64 << 10
PIN_LIMIT = 4096
_BESIDE_NOTE_BYTES = 96

#: What is deleted and what is pinned is decided and committed by one thread at a time.
deciding = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What stays of a run: its last `keep_last` steps; beside them every step that is a multiple of `keep_every`, and
    every one that is pinned."""

    keep_last: int
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(name, expected="at least 1", found=str(value))

    def older(self, found: Found, newest: CheckpointId | None = None) -> list[CheckpointId]:
        """All but the last ones; `newest`, which may not be committed yet, is the last of those."""
        ids = [id for id in found.ids if id != newest] + ([] if newest is None else [newest])
        # One that cannot be read leaves nothing behind, and goes before what can be.
        unplaced = [id for id in ids if id in found.unplaced and id != newest]
        placed = [id for id in ids if id not in found.unplaced or id == newest]
        last = line(placed)
        on_line = set(last)
        left_behind = [id for id in placed if id not in on_line]
        return (left_behind + unplaced + last)[: max(0, len(ids) - self.keep_last)]

    def stays(self, found: Found, id: CheckpointId) -> bool:
        """Though it is older than the last ones."""
        return id in found.pinned or (self.keep_every is not None and id.step % self.keep_every == 0)

    def going(
        self, found: Found, newest: CheckpointId | None = None, keep: Collection[CheckpointId] = ()
    ) -> list[CheckpointId]:
        """What is to be deleted; `keep`: what is about to be pinned."""
        return [id for id in self.older(found, newest) if not self.stays(found, id) and id not in keep]


def objects_of(volume: Volume, id: CheckpointId) -> list[str]:
    """Names of all committed objects of a checkpoint."""
    return [entry.name for entry in volume.list(f"{id}/")]


def not_there(volume: Volume, id: CheckpointId) -> ObjectNotFound:
    near = [str(other) for other in find(volume, id.run).ids]
    return ObjectNotFound(
        f"there is no committed checkpoint {id}",
        found=f"{len(near)} of this run, the last {near[-1]}" if near else "none of this run",
    )


def check_deletable(volume: Volume, id: CheckpointId) -> Sequence[ObjectInfo]:
    """Its objects; ObjectNotFound where it does not exist, UsageError where it is pinned."""
    found = volume.list(f"{id}/")
    names = {entry.name for entry in found}
    if id.manifest not in names:
        raise not_there(volume, id)
    if id.pin in names:
        raise UsageError(f"checkpoint {id} is pinned", next_step="`headrace checkpoint unpin` it first, if it is to go")
    return found


def delete_checkpoints(session: Session, ids: Iterable[CheckpointId]) -> int | None:
    """Delete these checkpoints in one commit, all or none; its sequence number, None where there was nothing to do.

    Before anything is deleted: ObjectNotFound where one does not exist, UsageError where one is pinned.
    """
    with deciding:
        names = [entry.name for id in dict.fromkeys(ids) for entry in check_deletable(session.volume, id)]
        if not names:
            return None
        with session.transaction() as tx:
            for name in names:
                tx.delete(name)
        return tx.sequence


def keep_last(session: Session, run: str, count: int, *, keep_every: int | None = None) -> list[CheckpointId]:
    """Delete checkpoints of a run, in one commit, until `count` remain, beside multiples of `keep_every` and pinned
    ones; those that went."""
    retention = Retention(keep_last=count, keep_every=keep_every)
    with deciding:
        gone = retention.going(find(session.volume, run))
        delete_checkpoints(session, gone)
    return gone


def reserve(
    session: Session,
    run: str,
    checkpoint_bytes: int,
    retention: Retention | None,
    newest: CheckpointId | None = None,
) -> Reservation:
    """Keep space for the last `keep_last` checkpoints of `checkpoint_bytes` and one in the making, beside what stays
    anyway, for as long as the session lasts. Without a retention everything stays, and one more comes.

    VolumeFull, before anything is written, says how much is missing. Multiples of `keep_every` that are yet to come
    are not counted: nobody knows how many there will be.
    """
    found = find(session.volume, run)
    staying = [id for id in found.ids if id != newest]
    count, text = 1, "one more checkpoint"
    if retention is not None:
        staying = [id for id in retention.older(found, newest) if retention.stays(found, id)]
        count, text = retention.keep_last + 1, f"keep_last={retention.keep_last} checkpoints and one in the making"
    beside = sum(entry.stored_bytes for id in staying for entry in session.volume.list(f"{id}/"))
    one = checkpoint_bytes + MANIFEST_ROOM_BYTES
    try:
        return session.reserve(beside + count * one, f"{run}/step-")
    except VolumeFull as error:
        others = f", beside {len(staying)} older ones that stay, {format_bytes(beside)}" if staying else ""
        raise VolumeFull(
            f"the volume is too small for {text}, {format_bytes(one)} each{others}",
            where=f"run {run!r}",
            expected=error.expected,
            found=error.found,
            next_step="delete what is not needed, unpin, keep fewer, or use a larger volume",
        ) from None


# ---- pins -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pin:
    """What stands in a pin. Nothing where its bytes are not ours: it holds all the same."""

    pinned_unix: float | None
    note: str


def pin(session: Session, id: CheckpointId, note: str = "") -> bool:
    """From this commit on the checkpoint stays until it is unpinned; False where it was pinned already.

    ObjectNotFound where there is no such checkpoint. UsageError for a note that is too long.
    """
    check_note(note)
    with deciding:
        found = objects_of(session.volume, id)
        if id.manifest not in found:
            raise not_there(session.volume, id)
        if id.pin in found:
            return False
        with session.transaction() as tx:
            put_pin(tx, id, note)
    return True


def check_note(note: str) -> None:
    """UsageError for one that is too long: of a pin so much is read as it may have."""
    limit, found = PIN_LIMIT - _BESIDE_NOTE_BYTES, len(json.dumps(note))
    if found > limit:
        raise UsageError("the note of a pin is too long", expected=f"{limit} bytes", found=f"{found} bytes")


def put_pin(tx: Transaction, id: CheckpointId, note: str) -> None:
    """With whatever else is committed. `check_note` comes first."""
    data = json.dumps({"pinned_unix": time.time(), "note": note}).encode()
    tx.put(id.pin, data, checksum_block_bytes=4096)


def unpin(session: Session, id: CheckpointId) -> bool:
    """Retention and people may delete it again; False where it was not pinned. ObjectNotFound as `pin`."""
    with deciding:
        found = objects_of(session.volume, id)
        if id.manifest not in found:
            raise not_there(session.volume, id)
        if id.pin not in found:
            return False
        with session.transaction() as tx:
            tx.delete(id.pin)
    return True


def pin_alone(session: Session, id: CheckpointId, note: str) -> None:
    """Pin this one, and unpin those of its run that have the same note. ObjectNotFound where it does not exist."""
    with deciding:
        pin(session, id, note)
        for other in _pinned_with(session.volume, id.run, note) - {id}:
            unpin(session, other)


def unpin_above(session: Session, id: CheckpointId, note: str) -> None:
    """Those of its run with higher steps that have this note."""
    with deciding:
        for other in _pinned_with(session.volume, id.run, note):
            if other.step > id.step:
                unpin(session, other)


def _pinned_with(volume: Volume, run: str, note: str) -> set[CheckpointId]:
    pins = {id: read_pin(volume, id) for id in find(volume, run).pinned}
    return {id for id, there in pins.items() if there is not None and there.note == note}


def read_pin(volume: Volume, id: CheckpointId) -> Pin | None:
    """None where it is not pinned."""
    if id.pin not in volume:
        return None
    try:
        raw = json.loads(volume.read(id.pin, 0, min(PIN_LIMIT, volume.stat(id.pin).length_bytes)))
        return Pin(pinned_unix=float(raw["pinned_unix"]), note=str(raw["note"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return Pin(pinned_unix=None, note="")


def refuse_pinned(id: CheckpointId, committed: Iterable[str]) -> None:
    """CheckpointFailed where this step is pinned: it is not replaced."""
    if id.pin in committed:
        raise CheckpointFailed(
            f"checkpoint {id} is pinned, and not replaced", next_step="save another step, or unpin this one first"
        )
