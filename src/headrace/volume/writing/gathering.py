"""Objects that several processes write one by one, and that become visible together: the side that has the session.

    grant = gathering.allocate("run/step-10", "run/step-10/rank-1.pt", length_bytes)     for whoever writes it
    gathering.accept(receipt)                                                            its bytes are durable
    gathering.publish("run/step-10")                                                     one commit, or nothing

A group is one transaction, begun by its first object. For interfaces of files, which tell nobody beforehand how long a
file will be, nor that a save was given up: what is written again under a name takes the place of what was written
before, and a group that was begun before one beside it was published is given up then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headrace.errors import UsageError
from headrace.volume.writing.grant import Grant, Receipt
from headrace.volume.writing.session import Session
from headrace.volume.writing.transaction import Transaction


@dataclass
class _Group:
    transaction: Transaction
    #: By name.
    grants: dict[str, Grant] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    #: What its objects take the place of.
    replaced: set[str] = field(default_factory=set)


class Gathering:
    """See the module text. Thread-safe.

    Args:
        session: gives the open session; asked when a group begins.
    """

    def __init__(self, session: Callable[[], Session]) -> None:
        self._session = session
        self._lock = threading.RLock()
        #: In the order in which they began.
        self._groups: dict[str, _Group] = {}

    def allocate(self, group: str, name: str, length_bytes: int) -> Grant:
        """Space for one object of the group, in the place of any that has its name. VolumeFull, UsageError."""
        with self._lock:
            found = self._groups.get(group)
            if found is None:
                found = self._groups[group] = _Group(self._session().transaction())
            transaction = found.transaction
            before = found.grants.pop(name, None)
            if before is not None:
                transaction.give_up(before)
                found.written.discard(name)
            elif name not in found.replaced and name in transaction.session.volume:
                transaction.delete(name)
                found.replaced.add(name)
            try:
                grant = transaction.allocate(name, length_bytes)
            except BaseException:
                if not found.grants and not found.written:
                    # Nobody has anything of it.
                    self.give_up(group)
                raise
            found.grants[name] = grant
            return grant

    def accept(self, group: str, receipt: Receipt) -> None:
        """UsageError where the group has ended meanwhile, or the object was written again."""
        with self._lock:
            found = self._find(group)
            grant = found.grants.get(receipt.name)
            if grant is None or grant.birth != receipt.birth:
                raise UsageError("this object was written again meanwhile", where=f"object {receipt.name!r}")
            found.transaction.accept(receipt)
            found.written.add(receipt.name)

    def pending(self, group: str) -> dict[str, int]:
        """Length in bytes of each object of the group that is written."""
        with self._lock:
            found = self._groups.get(group)
            return {} if found is None else {name: found.grants[name].length_bytes for name in sorted(found.written)}

    def publish(self, group: str, *, delete: Iterable[str] = ()) -> int:
        """All of the group becomes visible and durable, and `delete` ends, in one commit; returns its sequence.
        UsageError where an object of it is not written yet: nothing happens then."""
        with self._lock:
            found = self._find(group)
            missing = sorted(set(found.grants) - found.written)
            if missing:
                raise UsageError(
                    "an object of what is to be published is still being written",
                    where=f"object {missing[0]!r}",
                    found=f"{len(missing)} of {len(found.grants)} objects",
                    next_step="publish when all ranks have written",
                )
            for name in delete:
                if name not in found.replaced:
                    found.transaction.delete(name)
            before = list(self._groups)[: list(self._groups).index(group)]
            del self._groups[group]
            sequence = found.transaction.commit()
            for other in before:
                if _parent(other) == _parent(group):
                    self.give_up(other)
            return sequence

    def give_up(self, group: str) -> None:
        """Nothing of it becomes visible; harmless where it is not there."""
        with self._lock:
            found = self._groups.pop(group, None)
        if found is not None:
            found.transaction.abort()

    def close(self) -> None:
        for group in list(self._groups):
            self.give_up(group)

    def _find(self, group: str) -> _Group:
        found = self._groups.get(group)
        if found is None:
            raise UsageError(
                "what was being written was given up, or is published already",
                where=f"group {group!r}",
                next_step="write all of it again",
            )
        return found


def _parent(group: str) -> str:
    return group.rpartition("/")[0]
