"""Keeping the tables few: neighbours of one size become one, a little with every commit.

Each commit adds some bytes, and every merge under way may then do a few times as many. So a merge ends before as much
again was added as it has in it, no commit waits for a whole one, and nothing runs beside the commits. Merges of small
tables go on while a large one is under way, because each is of other tables.

A merge that a crash, or the end of the session, cuts short leaves nothing: its table is referred to by no record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.errors import DeviceError, VolumeDamaged, VolumeFull
from headrace.volume.catalog.tables import Builder, Merge, Table

#: So many neighbours become one, or more.
FAN_IN = 4
#: Bytes of work that each merge may do for every byte that a commit adds.
PACE = 4
#: A commit adds at least this: a small one still moves things along.
LEAST_BYTES = 256
#: Work is done in pieces of about a leaf, at most so many in one commit; what is left is done by later ones.
STEP_BYTES = 8 << 10
MAX_STEPS = 4
#: With more tables than this, neighbours of any size become one, and a commit does as much as it has to.
MANY_TABLES = 28
#: Memory of replaced tables that is given back with a commit.
FORGET_BYTES = 2 << 20


def choose(sizes: Sequence[int], busy: Sequence[bool]) -> tuple[int, int] | None:
    """Which neighbours to merge, [first, end), out of the `sizes` of all tables, newest first.

    The smallest run of at least FAN_IN tables of which none is larger than the others together: so a byte is written
    again only when its table has grown by as much. With too many tables, whatever saves most for its size.
    """
    best: tuple[float, int, int] | None = None
    for first in range(len(sizes)):
        total = largest = 0
        for end in range(first + 1, len(sizes) + 1):
            if busy[end - 1]:
                break
            total += sizes[end - 1]
            largest = max(largest, sizes[end - 1])
            count = end - first
            if count >= FAN_IN and largest <= total - largest:
                cost = float(total)
            elif count >= 2 and len(sizes) > MANY_TABLES:
                cost = total * 1e6 / (count - 1)
            else:
                continue
            if best is None or cost < best[0]:
                best = cost, first, end
    return None if best is None else best[1:]


class Compaction:
    """The merges of one session."""

    def __init__(self, builder: Callable[[int], Builder], replace: Callable[[Merge], None]) -> None:
        """`builder`: of a table of at most so many bytes; `replace`: what was merged takes the place of its tables."""
        self._builder = builder
        self._replace = replace
        self._merges: list[Merge] = []
        #: Replaced tables whose memory is given back bit by bit.
        self._dead: list[Table] = []
        #: Nothing new is begun until so many bytes were added: there was no space.
        self._pause = 0

    @property
    def space_bytes(self) -> int:
        """Space of what is being written."""
        return sum(length for merge in self._merges for _, _, length in merge.builder.space())

    def work(self, tables: Callable[[], Sequence[Table]], added_bytes: int) -> None:
        """After a commit of so many bytes, which is a fact: so what fails is given up. Where the log cannot be written
        any more, the next commit says so."""
        added = max(added_bytes, LEAST_BYTES)
        self._pause = max(0, self._pause - added)
        self._begin(tables())
        many = len(tables()) > MANY_TABLES
        steps = 0
        # Small ones first: they are many.
        for merge in sorted(self._merges, key=lambda merge: merge.input_bytes):
            merge.credit += PACE * added
            while merge.credit >= STEP_BYTES and (steps < MAX_STEPS or many):
                merge.credit -= STEP_BYTES
                steps += 1
                if self._step(merge):
                    break
        self._forget()

    def finish(self, tables: Callable[[], Sequence[Table]], most: int) -> None:
        """Merge until there are at most so many tables, or nothing to merge."""
        while len(tables()) > most and not self._pause:
            self._begin(tables())
            if not self._merges:
                return
            merge = min(self._merges, key=lambda merge: merge.input_bytes)
            while not self._step(merge):
                pass

    def gather(self, tables: Callable[[], Sequence[Table]]) -> bool:
        """Merge all tables into one, now; False where there is no space for it."""
        self.stop()
        merge = Merge(tables(), self._builder, last=True)
        self._merges.append(merge)
        while not self._step(merge):
            pass
        return merge.tables[0] not in tables()

    def _begin(self, tables: Sequence[Table]) -> None:
        while not self._pause:
            merging = {table.birth for merge in self._merges for table in merge.tables}
            chosen = choose([table.root.blocks for table in tables], [table.birth in merging for table in tables])
            if chosen is None:
                return
            first, end = chosen
            self._merges.append(Merge(tables[first:end], self._builder, last=end == len(tables)))

    def _step(self, merge: Merge) -> bool:
        """One step; True where the merge ended, one way or the other."""
        try:
            if not merge.step():
                return False
            merge.root = merge.builder.finish()
            self._replace(merge)
        except VolumeFull:
            self._give_up(merge, failed=False)
            return True
        except DeviceError:
            self._give_up(merge, failed=True)
            return True
        except VolumeDamaged:
            # No copy of what it reads is good: a look-up will say so, to whom it matters.
            self._give_up(merge, failed=False)
            return True
        except BaseException:
            self._give_up(merge, failed=True)
            raise
        self._merges.remove(merge)
        self._dead.extend(merge.tables)
        return True

    def _give_up(self, merge: Merge, *, failed: bool) -> None:
        self._merges.remove(merge)
        merge.builder.abandon(failed=failed)
        self._pause = merge.input_bytes

    def _forget(self) -> None:
        while self._dead:
            image = self._dead[-1].image
            if image is not None and not image.forget_some(FORGET_BYTES):
                return
            self._dead.pop()
            if image is not None:
                return

    def stop(self) -> None:
        """The session ends: what is not whole is nothing."""
        for merge in self._merges:
            merge.builder.abandon(failed=False)
        self._merges.clear()
