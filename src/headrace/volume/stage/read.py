"""Reads that go to a stage where that has the bytes, verified, and else to the volume.

A range is read from the stage where every chunk that it touches is there. What does not verify, or cannot be read, is
read from the volume in the same call: the caller waits a little longer and has the same bytes. Whatever is wrong with a
stage is said once, by Python's `logging`, and in `describe()`; a chunk that did not verify is not asked for again, and
a medium that fails is not asked again at all.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.device import ChecksumPages, Source, Transfer, make_source, submit_ranges
from headrace.device.protocol import Buffer
from headrace.errors import ChecksumMismatch, DeviceTimeout, HeadraceError, VolumeError
from headrace.volume.data.extents import I64, U32
from headrace.volume.data.objects import Cut, ObjectInfo, StoredBlob
from headrace.volume.stage.layout import Facts
from headrace.volume.stage.store import Stage, address_of
from headrace.volume.transfer import VolumeTransfer, let_end

if TYPE_CHECKING:
    from headrace.device import NativeDevice
    from headrace.volume.volume import Volume

_log = logging.getLogger("headrace")

#: Seconds between two looks at what a stage has by now.
LOOK_S = 1.0
#: Chunks that did not verify, after which a stage is not asked any more.
MOST_BAD = 16
_PAGES_BYTES = 64 << 20

Bools = npt.NDArray[np.bool_]


class Sources:
    """Blobs as they lie in a stage, for the native engine: with the checksums that the volume's catalogue has."""

    def __init__(self, volume: Volume, device: NativeDevice, facts: Facts) -> None:
        self.device = device
        self.facts = facts
        self._volume_id = volume.superblock.volume_id
        self._rows = {int(birth): row for row, birth in enumerate(facts.blobs["birth"].tolist())}
        self._made: dict[int, tuple[Source, int] | None] = {}
        self._pages = ChecksumPages(_PAGES_BYTES)

    def of(self, blob: StoredBlob) -> tuple[Source, int] | None:
        """The blob's source and first chunk; None where the stage has nothing of it."""
        birth = blob.entry.birth
        if birth not in self._made:
            self._made[birth] = self._make(blob)
        return self._made[birth]

    def _make(self, blob: StoredBlob) -> tuple[Source, int] | None:
        index, entry = self._rows.get(blob.entry.birth), blob.entry
        if index is None:
            return None
        row, base = self.facts.blobs[index], self.facts.base
        table = None
        table_bytes = blob.block_count * 4 if blob.tables else 0
        if (int(row["length"]), int(row["table_bytes"])) != (entry.length_bytes, table_bytes):
            return None
        if blob.tables:
            table = (entry.table_page_bytes, _one_run(table_bytes, base + int(row["table_at"])))
        source = make_source(
            birth=entry.birth,
            length_bytes=entry.length_bytes,
            block_bytes=entry.checksum_block_bytes,
            # In one piece: no unit of it is on another device.
            stripe_bytes=max(entry.checksum_block_bytes, entry.table_page_bytes),
            rows=_one_run(entry.length_bytes, base + int(row["data_at"])),
            sums=np.ascontiguousarray(entry.roots, np.uint32),
            table=table,
        )
        return source, int(row["first_chunk"])

    def submit(
        self, sources: Sequence[Source], which: U32 | None, start: I64, length: I64, buffers: Sequence[Buffer],
        index: U32 | None, places: I64,
    ) -> Transfer:  # fmt: skip
        """Start to read; every block is verified, whoever asks."""
        transfer = submit_ranges(
            [self.device], self._volume_id, sources, which, start, length, buffers, index, places, self._pages
        )
        assert transfer is not None
        return transfer

    def read(self, blob: StoredBlob, start: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Bytes of a blob from `start` on. ChecksumMismatch, DeviceError; VolumeError where they are not here."""
        found = self.of(blob)
        if found is None:
            raise VolumeError("the stage has nothing of this blob", where=self.device.uri)
        one = np.zeros(1, np.int64)
        self.submit([found[0]], None, one + start, one + len(buffer), [buffer], None, one).wait()


def _one_run(length: int, at: int) -> tuple[npt.NDArray[np.uint64], U32, U32, npt.NDArray[np.uint64]]:
    return (
        np.array([length], np.uint64), np.ones(1, np.uint32), np.zeros(1, np.uint32), np.array([at], np.uint64)
    )  # fmt: skip


class _Look:
    """A stage, and what of it was there when it was looked at. Immutable, but for `bad`."""

    def __init__(self, stage: Stage, sources: Sources, there: Bools, bad: set[int]) -> None:
        self.stage, self.sources, self.there, self.bad = stage, sources, there, bad
        self.complete = int(there.sum()) >= stage.facts.wanted_chunks
        #: Of the dataset; a stage may be made of a part of it.
        self.of_all = int(there.sum()) >= stage.facts.dataset_chunks
        #: Nothing can come any more.
        self.whole = bool(there.all())
        usable = there.copy()
        usable[list(bad)] = False
        #: Chunks before each that can be read: a range is there where as many are as it touches.
        self.before = np.concatenate([np.zeros(1, np.int64), np.cumsum(usable, dtype=np.int64)])

    def has(self, cut: Cut) -> tuple[list[Source] | None, Bools]:
        """Sources of the cut's blobs, and which of its ranges are there whole."""
        found = [self.sources.of(blob) for blob in cut.blobs]
        first = np.array([-1 if one is None else one[1] for one in found], np.int64)
        if cut.which is not None:
            first = first[cut.which]
        size, last = self.stage.facts.chunk_bytes, len(self.before) - 2
        low = first + cut.start // size
        high = first + (cut.start + cut.length - 1) // size
        there = (first >= 0) & (cut.length > 0) & (high <= last)
        low, high = np.clip(low, 0, last), np.clip(high, 0, last)
        there &= self.before[high + 1] - self.before[low] == high - low + 1
        some = next((one[0] for one in found if one is not None), None)
        # Those that are not here are never asked for; any source stands for them.
        return (None if some is None else [some if one is None else one[0] for one in found]), there

    def chunk_at(self, offset: int) -> int | None:
        """The chunk that a place of the stage belongs to."""
        blobs, facts = self.stage.facts.blobs, self.stage.facts
        index = int(np.searchsorted(blobs["data_at"], offset - facts.base, side="right")) - 1
        within = offset - facts.base - int(blobs["data_at"][index]) if index >= 0 else -1
        if not 0 <= within < int(blobs["length"][index]):
            return None
        return int(blobs["first_chunk"][index]) + within // facts.chunk_bytes


class Near:
    """The reads of one dataset. Thread-safe; pickles by address."""

    def __init__(self, volume: Volume, where: str | os.PathLike[str], dataset: str) -> None:
        """`where`: as `headrace dataset stage` takes it. That nothing is there yet is no error: it is looked for
        again, now and then. UsageError where no stage can be."""
        self._volume, self._where, self.dataset = volume, os.fspath(where), dataset
        self.uri = address_of(where, volume.id, dataset).uri
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._next_look_s = 0.0
        self._look: _Look | None = None
        #: What is wrong, as it was said; a stage of which this is true is not asked any more.
        self._trouble: str | None = None
        self._given_up = False
        self._near_bytes = self._volume_bytes = self._again_bytes = 0
        #: That came from the stage and verified. Only grows.
        self.served_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return (Near, (self._volume, self._where, self.dataset))

    def submit_read(
        self,
        what: str | ObjectInfo,
        offsets: npt.ArrayLike,
        lengths: npt.ArrayLike,
        buffers: Sequence[Buffer],
        buffer_offsets: npt.ArrayLike,
        buffer_index: npt.ArrayLike | None = None,
        *,
        verify: bool = True,
        room_bytes: int = 0,
    ) -> VolumeTransfer:
        """`Volume.submit_read`. What comes from the stage is verified also where `verify` is not set: without that
        nobody could say what it is."""
        starts, counts = np.atleast_1d(np.asarray(offsets)), np.atleast_1d(np.asarray(lengths))
        look = self._now()
        if look is None or not _plain(starts, counts):
            self._count(0, _total(counts))
            return self._volume.submit_read(
                what, offsets, lengths, buffers, buffer_offsets, buffer_index, verify=verify, room_bytes=room_bytes
            )
        starts, counts = starts.astype(np.int64), counts.astype(np.int64)
        places = np.atleast_1d(np.asarray(buffer_offsets)).astype(np.int64)
        index = None if buffer_index is None else np.ascontiguousarray(buffer_index, np.uint32)
        stored = self._volume.stored(what)
        here = np.ones(len(starts), np.bool_)
        cuts: list[tuple[Cut, list[Source] | None, I64]] = []
        if bool(((starts < 0) | (starts > stored.length_bytes) | (counts > stored.length_bytes - starts)).any()):
            here[:] = False  # The volume says what is wrong with them.
        else:
            for cut in stored.cut(starts, counts):
                try:
                    sources, there = look.has(cut)
                except HeadraceError as error:
                    # Places that cannot be.
                    with self._locked():
                        self._give_up(error)
                    here[:] = False
                    break
                rows = np.arange(len(starts)) if cut.source is None else cut.source
                here[rows[~there]] = False
                cuts.append((cut, sources, rows))

        def from_volume(mask: Bools) -> VolumeTransfer:
            return self._volume.submit_read(
                what, starts[mask], counts[mask], buffers, places[mask], None if index is None else index[mask],
                verify=verify, room_bytes=room_bytes,
            )  # fmt: skip

        near_bytes = int(counts[here].sum())
        self._count(near_bytes, int(counts.sum()) - near_bytes)
        if not here.any():
            return from_volume(~here)
        far = None if here.all() else from_volume(~here)
        moves: list[Transfer] = []
        fars = [] if far is None else [far]
        try:
            for cut, sources, rows in cuts:
                mine = here[rows]
                if sources is None or not mine.any():
                    continue
                buffer = cut.buffers(index)
                moves.append(
                    look.sources.submit(
                        sources, None if cut.which is None else cut.which[mine], cut.start[mine], cut.length[mine],
                        buffers, None if buffer is None else buffer[mine], cut.places(places)[mine],
                    )
                )  # fmt: skip
        except BaseException as error:
            let_end(moves)
            moves = []
            try:
                if not isinstance(error, HeadraceError):
                    raise
                # Where the volume refuses it as well, the stage is not to blame.
                fars.append(from_volume(here))
            except BaseException:
                for each in fars:
                    with suppress(HeadraceError):
                        each.wait()
                raise
            self.failed(look, error, None, near_bytes)
        return NearTransfer(self, look, moves, fars, near_bytes, lambda: from_volume(here))

    def describe(self) -> dict[str, Any]:
        """Where the stage is, how much of it is there, and how many bytes came from where."""
        look = self._now()
        facts = None if look is None else look.stage.facts
        total = self._near_bytes + self._volume_bytes
        return {
            "where": self.uri,
            "state": "given up" if self._given_up else "none yet" if look is None
            else "growing" if not look.complete else "complete" if look.of_all else "a part",
            "wanted_chunks": 0 if facts is None else facts.wanted_chunks,
            "there_chunks": 0 if look is None else int(look.there.sum()),
            "bad_chunks": 0 if look is None else len(look.bad),
            "stage_bytes": self._near_bytes,
            "volume_bytes": self._volume_bytes,
            "read_again_bytes": self._again_bytes,
            "stage_share": self._near_bytes / total if total else 0.0,
            "trouble": self._trouble,
        }  # fmt: skip

    def close(self) -> None:
        """Let go of the medium. Reads go to the volume from now on."""
        with self._locked():
            look, self._look, self._given_up = self._look, None, True
        if look is not None:
            look.stage.close()

    # ---- what is there ----

    def _locked(self) -> threading.Lock:
        if self._process != os.getpid():
            # It may have been held by a thread that the fork did not copy.
            self._lock, self._process = threading.Lock(), os.getpid()
        return self._lock

    def _now(self) -> _Look | None:
        if self._given_up:
            return None
        now = time.monotonic()
        look = self._look
        if now < self._next_look_s or (look is not None and look.whole):
            return look
        with self._locked():
            if now < self._next_look_s:
                return self._look
            self._next_look_s = now + LOOK_S
            try:
                self._look_again()
            except HeadraceError as error:
                self._give_up(error)
            return self._look

    def _look_again(self) -> None:
        look = self._look
        if look is not None:
            there = look.stage.there()
            if there is not None:
                self._look = _Look(look.stage, look.sources, there, look.bad)
                return
            # It is the stage of something else by now. Reads of the old one that are under way keep it open.
            self._look = None
        stage = Stage.open(self.uri)
        if stage is None:
            return
        facts = stage.facts
        there = stage.there() if facts.volume_id == self._volume.id else None
        if there is None:
            stage.close()
            return
        self._look = _Look(stage, Sources(self._volume, stage.device, facts), there, set())

    def served(self, count: int) -> None:
        """A read of the stage came to a good end."""
        with self._locked():
            self.served_bytes += count

    def failed(self, look: _Look, error: HeadraceError, move: Transfer | None, count: int) -> None:
        """A read of the stage did not come to its end: from now on it is avoided, all or the chunk."""
        with self._locked():
            self._near_bytes -= count
            self._volume_bytes += count
            self._again_bytes += count
            where = None if move is None else move.failed_range
            chunk = None if where is None else look.chunk_at(where[4])
            if not isinstance(error, ChecksumMismatch) or chunk is None:
                self._give_up(error)
                return
            look.bad.add(chunk)
            now = self._look
            if now is None or now.sources is not look.sources:
                return
            if len(look.bad) > MOST_BAD:
                self._give_up(error)
                return
            self._look = _Look(now.stage, now.sources, now.there, look.bad)
            self._say(error, "those bytes are read from the volume")

    def _give_up(self, error: HeadraceError) -> None:
        if not self._given_up:
            self._given_up, self._look = True, None
            self._say(error, "all is read from the volume from now on", again=True)

    def _say(self, error: HeadraceError, so: str, *, again: bool = False) -> None:
        if self._trouble is None or again:
            self._trouble = f"the stage of {self.dataset} at {self.uri} is not good, and {so}: {error}"
            _log.warning("%s", self._trouble)

    def _count(self, near_bytes: int, volume_bytes: int) -> None:
        with self._locked():
            self._near_bytes += near_bytes
            self._volume_bytes += volume_bytes


class NearTransfer(VolumeTransfer):
    """A read of which some bytes come from a stage."""

    def __init__(
        self,
        near: Near,
        look: _Look,
        moves: Sequence[Transfer],
        fars: Sequence[VolumeTransfer],
        near_bytes: int,
        again: Callable[[], VolumeTransfer],
    ) -> None:
        """`moves`: from the stage; `fars`: from the volume; `again`: reads from the volume what the stage was to
        give."""
        self._near, self._seen, self._near_bytes = near, look, near_bytes
        self._moves_near = list(moves)
        self._fars = list(fars)
        self._go_on: Callable[[], VolumeTransfer] | None = again
        self._wrong: HeadraceError | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """As of `VolumeTransfer`. Where the stage failed, what it was to give is asked of the volume now."""
        if not all(move.done() for move in self._moves_near):
            return False
        self._settle()
        return all(far.done() for far in self._fars)

    def waiting(self) -> str | None:
        """As of `VolumeTransfer`."""
        if any(not move.done() for move in self._moves_near):
            return f"the stage of {self._near.dataset} at {self._near.uri}"
        return next((said for far in list(self._fars) if (said := far.waiting())), None)

    def wait(self, timeout_s: float | None = None) -> None:
        """As of `VolumeTransfer`; what is wrong with the stage is no error here."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for move in self._moves_near:
            try:
                move.wait(_left(end))
            except HeadraceError as error:
                if isinstance(error, DeviceTimeout) and not move.done():
                    raise DeviceTimeout(
                        error.what, where=self._near.uri, expected=error.expected, next_step=error.next_step
                    ) from error
        self._settle()
        wrong = self._wrong
        for far in self._fars:
            try:
                far.wait(_left(end))
            except HeadraceError as error:
                if isinstance(error, DeviceTimeout) and not far.done():
                    raise
                # The others still move: the buffers are the caller's again only when they have ended, too.
                wrong = wrong or error
        if wrong is not None:
            raise wrong

    def _settle(self) -> None:
        """The stage has given what it gives; once."""
        with self._lock:
            again, self._go_on = self._go_on, None
            if again is None:
                return
            failed: HeadraceError | None = None
            where: Transfer | None = None
            for move in self._moves_near:
                try:
                    move.wait(0)
                except HeadraceError as error:
                    failed, where = error, move
            if failed is None:
                self._near.served(self._near_bytes if self._moves_near else 0)
            else:
                self._near.failed(self._seen, failed, where, self._near_bytes)
                try:
                    self._fars.append(again())
                except HeadraceError as error:
                    self._wrong = error


def _left(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())


def _plain(*columns: npt.NDArray[Any]) -> bool:
    """Columns that this can reckon with; what is wrong with others, the volume says."""
    for each in columns:
        if each.ndim != 1 or each.dtype.kind not in "iu" or len(each) != len(columns[0]):
            return False
        if each.size and not (int(each.min()) >= 0 and int(each.max()) < 1 << 62):
            return False
    return True


def _total(counts: npt.NDArray[Any]) -> int:
    return int(counts.sum()) if counts.dtype.kind in "iu" else 0
