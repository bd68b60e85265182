"""The rules of the volume, each switched off: then the world must notice.

`without(NAME)` patches the one function that is the rule. Numbers are sections of `docs/volume-format.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from headrace.testing import HostDevice, Quirks
from headrace.volume import follow
from headrace.volume.catalog import commit, log
from headrace.volume.catalog.tables import build
from headrace.volume.data import durable
from headrace.volume.data.objects import space_of
from headrace.volume.writing import fence, heartbeat, past, session
from tests.volume.simulation.weather import Weather


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _never(*_: Any, **__: Any) -> bool:
    return False


def _always(*_: Any, **__: Any) -> bool:
    return True


def _unforced(device: Any, offset: int, data: Any) -> None:
    device.write(offset, data)


def _by_another_association(devices: Any) -> None:
    for device in devices:
        device.as_host(device.hostid).flush()


def _forgets_what_was_in_flight(self: commit.LogWriter) -> None:
    """The next record goes to its place, with other bytes."""
    waiting, cursor = self.cursor.waiting, self.cursor
    if waiting:
        cursor.block -= sum(record.blocks for record in waiting)
        cursor.sequence, cursor.previous = waiting[0].sequence - 1, waiting[0].previous
        waiting.clear()


def _stays(self: commit.LogWriter, *, say_so: bool) -> None:
    if say_so:
        _move(self, say_so=say_so)


_move = commit.LogWriter.move


def _deallocates_first(writer: commit.LogWriter, outcome: Any, sequence: int, number: int) -> Any:
    for blob in outcome.gone:
        for member, offset, length in space_of(blob, writer.reader.superblock.stripe_bytes):
            writer.reader.devices[member].deallocate(offset, length)
    return _commit_records(writer, outcome, sequence, number)


_commit_records = session.commit_records


#: Name of a rule -> (owner, attribute, what stands in its place).
RULES: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    # 6: space that a late command may hit is not used again.
    "quarantine": [(session, "may_still_be_written", _never)],
    # ... and that of a write that was sent again: `device.unsettled()` names where its first copy may still land.
    "unsettled": [(fence, "unsettled", lambda devices: [])],
    # 4.1, 2: a flush that succeeds after a loss proves nothing.
    "loss counter": [(durable, "lost_since", _never)],
    # 4.2, drained: only success, confirmed by a report, means that nothing of the predecessor can land.
    "drained": [(fence.Fence, "drained", _always)],
    # 4.1, 1: windows are logged durably before their first use, so that a successor knows where late writes may land.
    "windows": [(session.Session, "_log_window", _nothing)],
    # Who wrote flushes, before it says that it wrote.
    "flush": [(durable, "flush_all", _nothing)],
    # ... and through the association that its writes went through.
    "flush through another": [(durable, "flush_all", _by_another_association)],
    # A place gets the same bytes again, or none, while an older command to it may live: the end of the log, too.
    "identical resend": [(commit.LogWriter, "adopt", _forgets_what_was_in_flight)],
    # After a predecessor of unknown fate the log goes on where nothing of that can land.
    "area not in force": [(commit.LogWriter, "move", _stays)],
    # 4.3: that is neither the area in force nor the one that the predecessor was moving to.
    "areas": [(commit, "refuge", lambda cursor, *_: cursor.area ^ 1)],
    # 4.2: where neither that pair is safe, nobody writes to the log before nothing can land any more.
    "wait": [(past, "wait_until_quiet", _nothing)],
    # ... and who was short says so, so that the next one knows.
    "settled": [(past, "earlier_are_gone", _always)],
    # Deleted space is given back to the target when that can no longer be taken back.
    "deallocation": [(session, "commit_records", _deallocates_first)],
    # 4.2, 2: who beats is not taken over.
    "patience": [(heartbeat, "wait_for_silence", _always)],
    # Where nothing else keeps a writer out: it looks at the heartbeat block before it writes to the log,
    "look before a commit": [
        (session.Session, "look", session.Session.check),
        (session.Session, "_on_lost", _nothing),
    ],
    # ... and when the commit is durable.
    "look after a commit": [
        (session.Session, "_confirm", session.Session.check),
        (session.Session, "_on_lost", _nothing),
    ],
    # 2.2, belief: a record is believed once a later one says that it is durable.
    "marker": [(log, "believed", _always)],
    # ... and who looks often looks at both copies in turns: a session may have gone on without the one.
    "turns": [(follow, "turns", lambda copies, look: (copies[0], copies[0]))],
    # I2: the log is durable when it is acknowledged.
    "write through": [(commit, "write_through", _unforced)],
    # A table is durable before a record refers to it.
    "tables written through": [(build, "write_through", _unforced)],
    # 4.2, 4: after every new association, ask before anything is written.
    "report after reconnect": [(HostDevice, "guard_writes", _nothing)],
    # 4.2, 3: everybody else is shut out, on every member, before the log is read.
    "fence": [
        (fence.Fence, "register", _nothing),
        (fence.Fence, "win", _nothing),
        (fence.Fence, "still_held", _nothing),
        (HostDevice, "guard_writes", _nothing),
    ],
}

_UNDRAINED = Quirks(fences_without_draining=True)
#: Sessions are lost while they open, one after another, and what they had under way lands later.
HARSH = Weather(lose_answer=0.02, given_up=1.0, cut=0.0, undrained_ghosts=True, sessions=12)
#: What a session leaves under way lands later, and nobody says that it has ended.
UNKNOWN_FATE = Weather(lose_answer=0.02, given_up=1.0, cut=0.0, undrained_ghosts=True)
_NOBODY_FENCES = Weather(stop=0.05, cut=0.0, many_tables=True, sessions=8), Quirks(no_reservations=True)

#: Where a rule matters often.
STORMS: dict[str, tuple[Weather, Quirks]] = {
    "areas": (
        Weather(
            lose_answer=0.006,
            given_up=1.0,
            cut=0.0,
            undrained_ghosts=True,
            many_tables=True,
            transactions=8,
            sessions=6,
        ),
        _UNDRAINED,
    ),
    "wait": (HARSH, _UNDRAINED),
    "settled": (HARSH, _UNDRAINED),
    "drained": (
        Weather(lose_answer=0.01, given_up=1.0, cut=0.0, undrained_ghosts=True, data_only=True, sessions=12),
        _UNDRAINED,
    ),
    "windows": (
        Weather(lose_answer=0.01, given_up=1.0, cut=0.0, undrained_ghosts=True, data_only=True, sessions=12),
        _UNDRAINED,
    ),
    "identical resend": (Weather(kill=0.01, cut=0.0, sessions=8), Quirks()),
    "area not in force": (
        Weather(
            lose_answer=0.008,
            given_up=1.0,
            cut=0.0,
            undrained_ghosts=True,
            many_tables=True,
            transactions=20,
            sessions=8,
        ),
        _UNDRAINED,
    ),
    "deallocation": (Weather(fail_command=0.01, kill=0.01, cut=0.03), Quirks()),
    "patience": (Weather(stop=0.05, cut=0.0), Quirks()),
    "look before a commit": _NOBODY_FENCES,
    "look after a commit": (
        Weather(stop_in_log=0.1, stop=0.05, cut=0.0, many_tables=True, sessions=8),
        Quirks(no_reservations=True),
    ),
    "tables written through": (Weather(cut=0.02, many_tables=True), Quirks()),
    "quarantine": (
        Weather(
            lose_answer=0.02,
            given_up=1.0,
            cut=0.0,
            undrained_ghosts=True,
            data_only=True,
            transactions=8,
            sessions=12,
        ),
        _UNDRAINED,
    ),
    "unsettled": (
        Weather(lose_answer=0.05, given_up=0.0, land=0.005, cut=0.0, resent_ghosts=True, transactions=30, sessions=4),
        Quirks(),
    ),
    "turns": (Weather(absent=0.5, cut=0.0, ghosts=False, transactions=8, sessions=6), Quirks()),
    "marker": (Weather(early=0.3, cut=0.01), Quirks()),
    "fence": (Weather(stop=0.05, cut=0.0, by_hand=0.7, sessions=12), Quirks()),
    "loss counter": (Weather(lose_answer=0.05, given_up=0.0, cut=0.01), Quirks()),
    "report after reconnect": (
        Weather(restart=0.02, stop=0.05, lose_answer=0.01, cut=0.0, by_hand=0.7, sessions=12),
        Quirks(forgets=True),
    ),
}


@contextmanager
def without(rule: str) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, stand_in in RULES[rule]:
            stack.enter_context(patch.object(owner, name, stand_in))
        yield
