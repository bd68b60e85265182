"""May a command of a session before this one still land? What is known of that, and what is waited for.

    the last session       is gone where it ended with nothing under way, or where the targets confirm that they aborted
                           all of it (`Fence.drained`)
    those before it        are gone where its heartbeat block says so (SETTLED), or where it held the volume for
                           `QUIET_S`: they were shut out before its first beat

    last gone   before gone
    yes         yes           this session is settled, and says so in its own block
    no          yes           only the last one may still write to the log: this one goes to the other pair of areas.
                              But if that was lost on its way there, it may write to either pair: as in the last line
    yes         no            the last one had moved away from those before it: this one stays there, and is not settled
    no          no            no area is safe: this session waits for QUIET_S, and then all of them are gone

Only where targets refuse the writes of whoever was taken over from does time mean anything: nothing new of it is let to
a medium, and what had been let there ends by itself. Elsewhere (files, memory, `unfenced`) nobody waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.volume.layout import SETTLED, UNDRAINED, Heartbeat
from headrace.volume.writing.fence import Fence
from headrace.volume.writing.heartbeat import Verdict

_log = logging.getLogger("headrace")

#: So long after a host was shut out nothing of it can land any more, also where its target confirms nothing: twice what
#: Linux gives a disk to answer a command.
QUIET_S = 60.0


def lived_s(last: Heartbeat) -> float:
    """How long a session has held the volume, at least: by its beats, each of which comes an interval after the one
    before, and by its clock, since some beats come at once."""
    return min((last.beat - 1) * last.interval_ns, max(0, last.due_ns - last.started_ns)) / 1e9


def earlier_are_gone(last: Heartbeat) -> bool:
    """Can nothing land any more of the sessions before the one that this block names?"""
    return last.session == 0 or bool(last.flags & SETTLED) or lived_s(last) >= QUIET_S


@dataclass(frozen=True)
class Past:
    #: The last session ended, and left nothing under way, or the targets confirm that nothing of it is.
    gone: bool
    #: Nor of those before it.
    earlier_gone: bool

    @property
    def settled(self) -> bool:
        return self.gone and self.earlier_gone


def look_back(verdict: Verdict, number: int, fence: Fence, *, away: bool) -> Past:
    """What session `number` knows of those before it, when it holds all members. `away`: members are back that were not
    there before; who writes there was shut out just now."""
    last = verdict.last
    # Another one may have come and gone since the last one was judged, where the member that takers meet on was not the
    # same for both, or the block was lost: of that nobody knows that it ended.
    if verdict.number != number - 1:
        return Past(False, False)
    if last is None:
        # There has never been a session.
        return Past(verdict.clean, verdict.clean)
    drained = not last.flags & UNDRAINED and fence.drained(last.key)
    return Past(verdict.clean or drained, not away and earlier_are_gone(last))


def wait_until_quiet(check: Callable[[], None], uris: Sequence[str]) -> None:
    """`check` raises where there is nothing to wait for any more. Whoever waits is told, by Python's `logging`: on
    standard error, where a program has not set that up."""
    _log.warning(
        "headrace: the volume at %s opens for writing in %.0f seconds: sessions of it were lost, and its targets do "
        "not confirm that their last writes have ended",
        ", ".join(uris),
        QUIET_S,
    )
    end = time.monotonic() + QUIET_S
    while (left := end - time.monotonic()) > 0:
        check()
        time.sleep(min(left, 1.0))
    check()
