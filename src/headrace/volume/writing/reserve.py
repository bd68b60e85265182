"""Space that is kept for objects to come: a job learns that the volume is too small when it starts, not on the way.

A reservation is for objects whose names begin with a prefix: so many bytes for all of them together, those that are
there already counted. What they do not take yet, nobody else gets. It lives as long as its session: no other writer
exists meanwhile, and the next one reserves again, with what was saved until then counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from headrace.errors import UsageError, VolumeFull
from headrace.units import format_bytes
from headrace.volume import layout
from headrace.volume.data.names import check_length
from headrace.volume.data.objects import Values, objects_of

if TYPE_CHECKING:
    from headrace.volume.writing.holdings import Holdings

#: Prefix, and bytes of an allocation -> how many of them are for names that begin so.
Share: TypeAlias = Callable[[str, int], int]


def space_taken(value: bytes) -> int:
    """What an object counts for: the space of its own blob, or the length of its slices of shared ones."""
    head = layout.ObjectHead.decode(value, "")
    return layout.peek_blob(value)[2] if head.flags & layout.INLINE else layout.align_up(head.length_bytes)


class Reservation:
    """Made by `Session.reserve`. Use it with `with`, or let it last as long as the session."""

    def __init__(self, owner: Reservations, session: Holdings, prefix: str) -> None:
        self._owner, self._session = owner, session
        self.prefix = prefix
        self.length_bytes = 0
        #: Of committed objects, and of those that transactions are writing.
        self.committed = 0
        self.under_way = 0

    @property
    def held_bytes(self) -> int:
        """What is kept free for it now."""
        with self._session.lock:
            return self.held()

    def held(self) -> int:
        """`held_bytes`; the caller has the session's lock."""
        return max(0, self.length_bytes - self.committed - self.under_way)

    def release(self) -> None:
        """What it does not use is everybody's again. A second time: nothing."""
        with self._session.lock:
            self._owner.by_prefix.pop(self.prefix, None)
            self.length_bytes = 0

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class Reservations:
    """All of a session. Not thread-safe: the session's lock guards it."""

    def __init__(self) -> None:
        self.by_prefix: dict[str, Reservation] = {}

    def held(self) -> int:
        """Bytes kept, for whom they are."""
        return sum(reservation.held() for reservation in self.by_prefix.values())

    def kept(self, share: Share, wanted: int) -> int:
        """Bytes that are not for an allocation of `wanted` bytes."""
        kept = 0
        for prefix, reservation in self.by_prefix.items():
            part = share(prefix, wanted)
            if part < wanted:
                # Of objects with other names, too: what it takes for those is not out of this.
                kept += max(0, reservation.held() - part)
        return kept

    def reserve(
        self, session: Holdings, catalog: Values, prefix: str, length_bytes: int, available: int
    ) -> Reservation:
        """See `Session.reserve`. `available`: what could be handed out, reservations not counted."""
        if not prefix:
            raise UsageError("a reservation is for objects whose names begin alike", next_step="give a prefix")
        for other in self.by_prefix:
            if other != prefix and (other.startswith(prefix) or prefix.startswith(other)):
                raise UsageError("there is a reservation for some of these names", where=repr(prefix), found=other)
        wanted = check_length(length_bytes)
        reservation = self.by_prefix.get(prefix)
        if reservation is None:
            reservation = Reservation(self, session, prefix)
            reservation.committed = sum(space_taken(value) for _, value in objects_of(catalog, prefix))
            for transaction in session.open_transactions:
                # Its threads take more meanwhile, without the session's lock.
                for allocation in [*transaction.allocations.values()]:
                    taken = sum(length for _, _, length in allocation.space)
                    reservation.under_way += allocation.share(prefix, taken)
        need = max(0, wanted - reservation.committed - reservation.under_way)
        room = available - self.held() + reservation.held()
        if need > room:
            raise VolumeFull(
                "the volume has too little space to reserve",
                where=f"objects {prefix}...",
                expected=f"{format_bytes(need)}, beside {format_bytes(wanted - need)} that they take already",
                found=f"{format_bytes(max(0, room))} free, {format_bytes(need - max(0, room))} are missing",
                next_step="delete objects that are not needed, or use a larger volume",
            )
        reservation.length_bytes = wanted
        self.by_prefix[prefix] = reservation
        return reservation

    def under_way(self, share: Share, taken: int) -> None:
        """So many bytes were handed out for an allocation, or (less than 0) are no longer under way."""
        for prefix, reservation in self.by_prefix.items():
            part = share(prefix, abs(taken))
            reservation.under_way = max(0, reservation.under_way + (part if taken > 0 else -part))

    def changes(self, catalog: Values, changes: Mapping[bytes, bytes | None]) -> dict[str, int]:
        """Prefix -> what the committed objects below it will take more after these; asked before they are applied."""
        result: dict[str, int] = {}
        keys = [(prefix, layout.object_key(prefix)) for prefix in self.by_prefix]
        for changed, value in changes.items() if keys else ():
            for prefix, key in keys:
                if changed.startswith(key):
                    before = catalog.get(changed)
                    more = 0 if value is None else space_taken(value)
                    less = 0 if before is None else space_taken(before)
                    result[prefix] = result.get(prefix, 0) + more - less
        return result

    def committed(self, changes: dict[str, int]) -> None:
        """They are applied."""
        for prefix, more in changes.items():
            if prefix in self.by_prefix:
                self.by_prefix[prefix].committed = max(0, self.by_prefix[prefix].committed + more)
