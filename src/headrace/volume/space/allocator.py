"""Space: which bytes of the members are free, and in which order they are handed out.

Three kinds of space that nobody's object lies in:

* **free**: next-fit, so that a place is used again as late as possible;
* **freed** by this session's deletions: used only when nothing free is left, which is what gives readers their grace;
* **quarantined**: a command of unknown fate may still write there (aborted grants, a dead predecessor's windows). Never
  handed out by this session.

Space goes from free into the **pool** in windows, each logged durably before its first use, so that a successor knows
where late writes of this session may land. Objects are cut from the pool. What is logged is all space that commands may
be on their way to by then: the pool, what was handed out and is neither committed nor given back, and the new window.
A long session goes round its members many times, and a successor must not wait for all of that. Where space is in many
pieces, what is logged covers them and what is between: a record of the log has its bound, and a successor can wait for
more than it has to.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from headrace.errors import VolumeDamaged, VolumeFull
from headrace.units import format_bytes
from headrace.volume.catalog.catalog import cover, merge
from headrace.volume.catalog.usage import Ranges
from headrace.volume.data.extents import I64, column_bytes, make_runs
from headrace.volume.data.objects import Range
from headrace.volume.layout import ALIGN, Rows, Superblock, align_up


class FreeSpace:
    """The free ranges of one member, sorted and merged; taken next-fit from a cursor that goes round."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total = 0
        self.cursor = 0
        for start, end in ranges:
            self.add(start, end)

    @classmethod
    def without(cls, start: int, end: int, used: I64, lengths: I64) -> FreeSpace:
        """[start, end) but for what is used."""
        order = np.argsort(used, kind="stable")
        low, high = used[order], np.maximum.accumulate(used[order] + lengths[order]) if len(order) else used
        # Free is what lies between the end of all before and the beginning of the next.
        free_from = np.concatenate(([start], np.clip(high, start, end)))
        free_to = np.concatenate((np.clip(low, start, end), [end]))
        there = free_to > free_from
        space = cls()
        space._starts, space._ends = free_from[there].tolist(), free_to[there].tolist()
        space.total = int((free_to - free_from)[there].sum())
        return space

    def add(self, start: int, end: int) -> None:
        """Make [start, end) free; it must not be."""
        if start >= end:
            return
        self.total += end - start
        i = bisect.bisect_left(self._starts, start)
        if i > 0 and self._ends[i - 1] == start:
            start = self._starts[i - 1]
            i -= 1
            del self._starts[i], self._ends[i]
        if i < len(self._starts) and self._starts[i] == end:
            end = self._ends[i]
            del self._starts[i], self._ends[i]
        self._starts.insert(i, start)
        self._ends.insert(i, end)

    def remove(self, start: int, end: int) -> None:
        """Make [start, end) not free, whatever it was."""
        if start >= end:
            return
        i = max(0, bisect.bisect_right(self._starts, start) - 1)
        while i < len(self._starts) and self._starts[i] < end:
            low, high = self._starts[i], self._ends[i]
            if high <= start:
                i += 1
                continue
            del self._starts[i], self._ends[i]
            self.total -= high - low
            if low < start:
                self.add(low, start)
            if end < high:
                self.add(end, high)
            i = max(0, bisect.bisect_right(self._starts, start) - 1)

    def front(self, minimum: int = 1) -> tuple[int, int] | None:
        """The next free range (offset, bytes) at or behind the cursor, going round, of at least `minimum` bytes."""
        count = len(self._starts)
        first = bisect.bisect_right(self._starts, self.cursor) - 1
        for step in range(count + 1):
            i = (first + step) % count if first >= 0 else step
            if i >= count:
                break
            start, end = self._starts[i], self._ends[i]
            if step == 0 and first >= 0:
                start = max(start, self.cursor)
            if end - start >= minimum:
                return start, end - start
        return None

    def take(self, start: int, length: int) -> None:
        """Take a range that `front` named."""
        self.remove(start, start + length)
        self.cursor = start + length

    def ranges(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._ends, strict=True))


class Allocator:
    """Hands out space of all members in runs. Not thread-safe: the session's lock guards it.

    `log_window(ranges)` makes durable, before any of a new window is used, where writes may land from then on.
    `make_room(count)` comes before: it sees to it that so many ranges can be logged, and may take space itself.
    """

    #: What ends the waiting for late writes.
    until = "go on in a new session"

    def __init__(
        self,
        members: Sequence[FreeSpace],
        *,
        stripe_bytes: int,
        log_window: Callable[[list[Range]], None],
        make_room: Callable[[int], None] = lambda ranges: None,
        ghosts: Callable[[], list[Range]] = list,
        absent: Iterable[int] = (),
        carried: Iterable[Range] = (),
        most_ranges: int = 1 << 20,
    ) -> None:
        """`absent`: members that are missing, of which nothing is handed out. `carried`: space there that late writes
        may still hit when they are back; it stays in what is logged. `most_ranges`: of one call of `log_window`, unless
        there are more members."""
        self._absent = frozenset(absent)
        self._free = [FreeSpace() if index in self._absent else space for index, space in enumerate(members)]
        #: What nobody uses there.
        self.absent_bytes = sum(members[index].total for index in self._absent)
        self._pool = [FreeSpace() for _ in members]
        #: Handed out, and neither committed nor known to be quiet: where a write may be on its way to.
        self._out = [FreeSpace() for _ in members]
        for member, start, length in merge([*carried]):
            self._out[member].add(start, start + length)
        self._freed: list[Range] = []
        self._log_window = log_window
        self._make_room = make_room
        #: Where, within the members' data, a command that was given up, and sent again, may still land.
        self._ghosts = ghosts
        #: What `quarantine` was told.
        self._quarantined: list[Range] = []
        self._most_ranges = max(most_ranges, len(self._free))
        self.stripe_bytes = stripe_bytes
        self.quarantined_bytes = 0
        #: Of what is available, kept for the catalogue: it must be able to grow by deletions, and to be merged.
        self.reserve_bytes = 0
        #: Of what `take_freed` took: not answered yet.
        self.deallocating_bytes = 0
        #: Of what is quarantined, because of the session before.
        self.predecessor_bytes = 0
        self._turn = 0
        capacity = sum(space.total for space in members)
        self._window_bytes = min(max(align_up(capacity // 64 // len(members), 1 << 20), 1 << 20), 1 << 30)

    @property
    def available(self) -> int:
        """Bytes that can still be handed out."""
        return (
            sum(space.total for space in self._free)
            + sum(space.total for space in self._pool)
            + sum(length for _, _, length in self._freed)
        )

    def members_with(self, length: int) -> int:
        """How many members have so much space."""
        return sum(free.total + pool.total >= length for free, pool in zip(self._free, self._pool, strict=True))

    @property
    def _pool_bytes(self) -> int:
        return sum(space.total for space in self._pool)

    def allocate(self, length: int, block_bytes: int, *, kept: int = 0) -> tuple[Rows, Rows]:
        """Runs and columns for `length` bytes, cut at multiples of `block_bytes`. VolumeFull: nothing was taken.

        `kept`: of what is available, bytes that are not for this.
        """
        self.check(length, kept)
        before = self._pool_bytes
        try:
            return self._allocate(length, block_bytes, kept)
        except VolumeFull:
            if self._pool_bytes == before:
                raise
            # What came into the pool on the way lay in pieces between what had just been taken out of it.
            return self._allocate(length, block_bytes, kept)

    def _allocate(self, length: int, block_bytes: int, kept: int) -> tuple[Rows, Rows]:
        rows: list[tuple[int, list[tuple[int, int]]]] = []
        left = length
        while left:
            row = self._run(left, block_bytes)
            if row is None:
                try:
                    if self._extend(left):
                        continue
                    raise self._full(length, kept, cut=block_bytes)
                except BaseException:
                    # A window that could not be logged, too: nothing was taken.
                    self.give_back(_space_of(rows, self.stripe_bytes))
                    raise
            rows.append(row)
            for member, start, taken in _space_of([row], self.stripe_bytes):
                self._out[member].add(start, start + taken)
            left -= row[0]
        return make_runs(rows)

    def allocate_pair(
        self, length: int, block_bytes: int, *, kept: int = 0
    ) -> tuple[tuple[Rows, Rows], tuple[Rows, Rows]]:
        """Runs and columns of two copies of `length` bytes, cut alike at multiples of `block_bytes`, each piece on two
        members where two have room. VolumeFull: nothing was taken.
        """
        self.check(2 * align_up(length), kept)
        rows: tuple[list[tuple[int, list[tuple[int, int]]]], ...] = ([], [])
        left = length
        while left:
            size = align_up(left)
            try:
                pair = self.take_pair(size, min(size, block_bytes))
            except BaseException:
                self.give_back(_space_of([*rows[0], *rows[1]], self.stripe_bytes))
                raise
            run = left if pair[0][2] >= size else pair[0][2] // block_bytes * block_bytes
            for copy, (member, start, taken) in zip(rows, pair, strict=True):
                copy.append((run, [(member, start)]))
                self.give_back([(member, start + align_up(run), taken - align_up(run))])
            left -= run
        return make_runs(rows[0]), make_runs(rows[1])

    def check(self, length: int, kept: int = 0) -> None:
        """VolumeFull where so much is not to be had."""
        if align_up(length) > self.available - self.reserve_bytes - kept:
            raise self._full(length, kept)

    def _full(self, length: int, kept: int = 0, *, cut: int = 0) -> VolumeFull:
        """`cut`: space that is there is in pieces smaller than this."""
        haunted = self.haunted_bytes
        detail = f"{format_bytes(max(0, self.available - haunted - kept))} free"
        if kept:
            detail += f" and {format_bytes(kept)} reserved for others"
        if self.reserve_bytes:
            detail += f", of which the catalogue keeps {format_bytes(self.reserve_bytes)} for itself"
        waiting = haunted + self.quarantined_bytes - self.predecessor_bytes
        if waiting:
            detail += f"; {format_bytes(waiting)} waiting until late writes can be ruled out"
        if self.predecessor_bytes:
            detail += (
                f"; {format_bytes(self.predecessor_bytes)} that late writes of sessions before this one may still "
                "hit: free in a later one"
            )
        if self.deallocating_bytes:
            detail += f"; {format_bytes(self.deallocating_bytes)} being given back to the target, free in a moment"
        next_step = (f"{self.until}, or delete" if waiting else "delete") + " objects that are not needed"
        if cut and align_up(length) <= self.available - haunted - self.reserve_bytes - kept:
            detail += f", in pieces too small for checksum blocks of {format_bytes(cut)}"
            next_step = f"choose smaller checksum blocks; or {next_step}"
        return VolumeFull(
            "the volume is full",
            expected=f"{format_bytes(length)} of free space",
            found=detail,
            next_step=next_step,
        )

    @property
    def haunted_bytes(self) -> int:
        """Of what is available: where a command that was given up may still land. Not handed out."""
        ghosts = [FreeSpace() for _ in self._free]
        for member, start, length in merge(self._ghosts()):
            ghosts[member].add(start, start + length)
        together = 0
        for member, start, length in self._freed:
            for low, high in ghosts[member].ranges():
                together += max(0, min(high, start + length) - max(low, start))
        return together

    def _run(self, length: int, block_bytes: int) -> tuple[int, list[tuple[int, int]]] | None:
        """One run of at most `length` bytes out of the pool; None when the pool has no room for it."""
        stripe, count = self.stripe_bytes, len(self._pool)
        order = [(self._turn + i) % count for i in range(count)]
        units = -(-length // stripe)
        if units > 1 and count > 1:
            fronts = [(member, front) for member in order if (front := self._pool[member].front(stripe))]
            fronts = fronts[:units]
            if len(fronts) > 1:
                rows = min(min(room for _, (_, room) in fronts) // stripe, -(-units // len(fronts)))
                run = min(length, rows * len(fronts) * stripe)
                columns = []
                for i, (member, (offset, _)) in enumerate(fronts):
                    self._pool[member].take(offset, column_bytes(run, len(fronts), stripe, i))
                    columns.append((member, offset))
                self._turn = (self._turn + min(len(fronts), -(-run // stripe))) % count
                return run, columns
            if len(self._with_free(stripe)) > 1:
                return None
        # One contiguous piece: small objects, volumes of one member, and what is left when others are full.
        whole = align_up(length)
        least = min(whole, stripe)
        for minimum in (whole, least) if units == 1 or count == 1 else (least,):
            for member in order:
                front = self._pool[member].front(minimum)
                if front is not None:
                    return self._piece(member, front, length, block_bytes)
        if any(space.front(least) for space in self._free) or self._freed:
            return None
        # Nothing of a decent size is left anywhere: fragments.
        for member in order:
            front = self._pool[member].front(align_up(block_bytes))
            if front is not None:
                return self._piece(member, front, length, block_bytes)
        return None

    def take_pair(self, size: int, least: int) -> tuple[Range, Range]:
        """Two ranges of one length, `least` to `size` bytes, on two members where two have it. VolumeFull."""
        size, least = align_up(size), align_up(least)
        while True:
            order = [(self._turn + i) % len(self._pool) for i in range(len(self._pool))]
            fronts = [(member, *front) for member in order if (front := self._pool[member].front(least))][:2]
            if len(fronts) == 2:
                taken = min(size, fronts[0][2], fronts[1][2])
                pair = [(member, start, taken) for member, start, _ in fronts]
                self._turn = (fronts[1][0] + 1) % len(self._pool)
            elif len(self._pool) == 1 and self._pool[0].front(size) and (split := self._halves(0, size, size)):
                # There is no other member to wait for; a window would only use up what readers may still look at.
                pair = split
            elif self._extend(2 * size):
                continue
            elif len(fronts) == 1 and (split := self._halves(fronts[0][0], size, least)):
                pair = split
            else:
                raise self._full(2 * least)
            for member, start, length in pair:
                self._pool[member].take(start, length)
                self._out[member].add(start, start + length)
            return pair[0], pair[1]

    def _halves(self, member: int, size: int, least: int) -> list[Range] | None:
        """Both on one member: as far apart as its pool has them."""
        ranges = [(start, end) for start, end in self._pool[member].ranges() if end - start >= least]
        first, last = ranges[0], ranges[-1]
        if len(ranges) == 1:
            size = min(size, (first[1] - first[0]) // 2 // ALIGN * ALIGN)
        size = min(size, first[1] - first[0], last[1] - last[0])
        if size < least:
            return None
        return [(member, first[0], size), (member, last[1] - size, size)]

    def _piece(
        self, member: int, front: tuple[int, int], length: int, block_bytes: int
    ) -> tuple[int, list[tuple[int, int]]]:
        offset, room = front
        run = length if align_up(length) <= room else room // block_bytes * block_bytes
        self._pool[member].take(offset, align_up(run))
        self._turn = (member + 1) % len(self._pool)
        return run, [(member, offset)]

    def _with_free(self, minimum: int) -> list[int]:
        return [
            member
            for member in range(len(self._free))
            if self._free[member].front(minimum) or self._pool[member].front(minimum)
        ]

    def _extend(self, length: int) -> bool:
        """Move a window from free (or, at last, from freed) into the pool; False when there is nothing left."""
        pieces = len(self._reach())
        self._make_room(min(pieces + 2 * len(self._free), self._most_ranges))
        # Where the record is long, it is worth more.
        least = self._window_bytes * (4 if pieces > self._most_ranges // 2 else 1)
        share = align_up(align_up(length, self.stripe_bytes) // len(self._free), self.stripe_bytes)
        window: list[Range] = []
        for member, space in enumerate(self._free):
            wanted = max(least, share) - self._pool[member].total
            if wanted <= 0 and self._pool[member].front(self.stripe_bytes):
                continue
            wanted = max(wanted, least)
            while wanted > 0:
                front = space.front()
                if front is None:
                    break
                start, room = front
                taken = min(room, align_up(wanted))
                space.take(start, taken)
                window.append((member, start, taken))
                wanted -= taken
        if not window:
            if not self._freed:
                return False
            return self._use_freed() and self._extend(length)
        try:
            self._log_window(cover([*self._reach(), *window], self._most_ranges))
        except BaseException:
            for member, start, taken in window:
                self._free[member].add(start, start + taken)
            raise
        for member, start, taken in window:
            self._pool[member].add(start, start + taken)
        return True

    def _use_freed(self) -> bool:
        """Make free what was freed, but for what a late command may still hit; False where nothing is left."""
        quiet, self._freed = self.parted(self._freed)
        for member, start, length in quiet:
            self._free[member].add(start, start + length)
        return bool(quiet)

    def parted(self, ranges: Iterable[Range]) -> tuple[list[Range], list[Range]]:
        """Of these, what no late command can hit, and what one may."""
        haunted = [FreeSpace() for _ in self._free]
        for member, start, length in merge(self._ghosts()):
            haunted[member].add(start, start + length)
        quiet: list[Range] = []
        hit: list[Range] = []
        for member, start, length in ranges:
            space, rest = FreeSpace([(start, start + length)]), FreeSpace([(start, start + length)])
            for low, high in haunted[member].ranges():
                space.remove(low, high)
            for low, high in space.ranges():
                rest.remove(low, high)
            quiet += [(member, low, high - low) for low, high in space.ranges()]
            hit += [(member, low, high - low) for low, high in rest.ranges()]
        return quiet, hit

    def _reach(self) -> list[Range]:
        """Where writes may land without another window: also late ones, in what is committed or free by now."""
        return self._ghosts() + [
            (member, start, end - start)
            for spaces in (self._pool, self._out)
            for member, space in enumerate(spaces)
            for start, end in space.ranges()
        ]

    def commit(self, ranges: Iterable[Range]) -> None:
        """Space that belongs to a committed object from now on: everything there is durable, nothing is on its way."""
        for member, start, length in ranges:
            self._out[member].remove(start, start + length)

    def give_back(self, ranges: Iterable[Range]) -> None:
        """Space that was allocated and certainly has no command under way."""
        for member, start, length in ranges:
            self._out[member].remove(start, start + length)
            self._pool[member].add(start, start + length)

    def free(self, ranges: Iterable[Range]) -> None:
        """Space of objects whose deletion is durable, and of aborted ones that are quiet: used last."""
        for member, start, length in ranges:
            if member in self._absent:
                self.absent_bytes += length
            elif length:
                self._out[member].remove(start, start + length)
                self._freed.append((member, start, length))

    def take_freed(self, ranges: Iterable[Range]) -> list[Range]:
        """What is still unused of ranges that were freed, and that no late command may hit, to be deallocated: it is
        logged as space that commands go to. `renew` gives it back.
        """
        taken = []
        for one in ranges:
            if one in self._freed and not self.parted([one])[1]:
                self._freed.remove(one)
                taken.append(one)
                self._out[one[0]].add(one[1], one[1] + one[2])
        if taken:
            try:
                self.log_reach()
            except BaseException:
                self.free(taken)
                raise
        self.deallocating_bytes += sum(length for _, _, length in taken)
        return taken

    def renew(self, ranges: Iterable[Range]) -> None:
        """Space that no reader of old bytes can be looking at any more: as free as any, but for what a deallocation may
        still hit that was sent again."""
        quiet, hit = self.parted(ranges)
        for member, start, length in quiet:
            self._out[member].remove(start, start + length)
            self._free[member].add(start, start + length)
        self.free(hit)

    def log_reach(self) -> None:
        """Say in the log where writes may land, as it is now."""
        self._make_room(min(len(self._reach()), self._most_ranges))
        self._log_window(cover(self._reach(), self._most_ranges))

    def quarantine(self, ranges: Iterable[Range]) -> None:
        """Space that a late write may still hit: not used again before `settle`, and it stays in what is logged."""
        held = list(ranges)
        self._quarantined += held
        self.quarantined_bytes += sum(length for _, _, length in held)

    def settle(self) -> None:
        """Nothing that this session ever sent can land any more: what it quarantined is free, to be used last."""
        held, self._quarantined = self._quarantined, []
        self.quarantined_bytes -= sum(length for _, _, length in held)
        self.free(held)


class TableSpace:
    """Space for tables of the catalogue, out of a session's."""

    def __init__(self, allocator: Allocator, on_loss: Callable[[], None]) -> None:
        """`on_loss`: some of it may be written to by a command that nobody will ever answer for."""
        self._allocator = allocator
        self._on_loss = on_loss
        self.take = allocator.take_pair
        self.commit = allocator.commit
        self.free = allocator.free

    def give_back(self, ranges: Iterable[Range]) -> None:
        """Nodes may stand there already, of which a write was sent again: the first one may still land."""
        quiet, hit = self._allocator.parted(ranges)
        self._allocator.give_back(quiet)
        self._allocator.free(hit)

    def quarantine(self, ranges: Iterable[Range]) -> None:
        self._allocator.quarantine(ranges)
        self._on_loss()


def count_space(
    superblock: Superblock, used: Ranges, windows: Iterable[Range], tables: Iterable[Range] = ()
) -> tuple[list[FreeSpace], int]:
    """The free space of each member, and the bytes that only `windows` keep from being free. VolumeDamaged.

    `used`: by blobs; `tables`: by the catalogue itself.
    """
    member, offset, length = used
    _check_member(superblock, int(member.max(initial=0)), "a blob")
    if np.any(length < 0):
        raise VolumeDamaged("a blob makes no sense", found=f"{int(length.min()) % (1 << 64)} bytes of space")
    spaces = []
    for index, one in enumerate(superblock.members):
        mine = np.flatnonzero((member == index) & (length > 0))
        starts, sizes = offset[mine], length[mine]
        room = one.data_end - one.data_offset
        inside = not np.any((sizes > room) | (starts < one.data_offset) | (starts > one.data_end - sizes))
        spaces.append(FreeSpace.without(one.data_offset, one.data_end, starts, sizes))
        if not inside or room - spaces[-1].total != sum(sizes.tolist()):
            raise _used_twice(index)
    for index, start, size in tables:
        _check_member(superblock, index, "a table")
        total = spaces[index].total
        spaces[index].remove(start, start + size)
        if total - spaces[index].total != size:
            raise _used_twice(index)
    before = sum(space.total for space in spaces)
    for index, start, size in windows:
        _check_member(superblock, index, "a window of a session")
        spaces[index].remove(start, start + size)
    return spaces, before - sum(space.total for space in spaces)


def _check_member(superblock: Superblock, index: int, whose: str) -> None:
    if index >= len(superblock.members):
        raise VolumeDamaged("no such member", where=whose, found=str(index))


def _used_twice(member: int) -> VolumeDamaged:
    """Deleting one owner would hand out the other's bytes, or the log's: nobody may write here."""
    return VolumeDamaged(
        "space has two owners, or lies outside of a member's data",
        where=f"member {member}",
        next_step="read what can be read into a new volume (`headrace volume salvage`)",
    )


def _space_of(rows: list[tuple[int, list[tuple[int, int]]]], stripe_bytes: int) -> list[Range]:
    result = []
    for length, columns in rows:
        unit = stripe_bytes if len(columns) > 1 else length
        for i, (member, offset) in enumerate(columns):
            result.append((member, offset, column_bytes(length, len(columns), unit, i)))
    return result


__all__ = ["ALIGN", "Allocator", "FreeSpace", "Range", "TableSpace", "count_space"]
