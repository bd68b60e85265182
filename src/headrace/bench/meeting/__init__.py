"""Several processes that measure together: they begin at one moment, and rank 0 gathers what they found.

    seat = seat_of(os.environ)                     # rank, world, where rank 0 is; None: one process
    with meet(seat, folder=None) as meeting:       # everybody is there, or one clear line on every rank
        begin_s = meeting.start({"options": ...})  # on this rank's time.monotonic(): the same moment everywhere
        ...
        merged = meeting.gather(outcome, merge)    # `merge` runs on rank 0; every rank has its answer

`seat.py` reads the environment, `tcp.py` meets on a port of rank 0's node, `folder.py` in a folder that all see,
`messages.py` has the bytes. A rank that dies or never comes ends the meeting on every rank within its deadline.
"""

from __future__ import annotations

import os

from headrace.bench.meeting.folder import FolderMeeting
from headrace.bench.meeting.seat import DEFAULT_PORT, Seat, seat_of
from headrace.bench.meeting.tcp import TcpMeeting
from headrace.bench.meeting.together import JOIN_S, SLACK_S, Meeting

__all__ = ["DEFAULT_PORT", "JOIN_S", "SLACK_S", "Meeting", "Seat", "meet", "seat_of"]


def meet(
    seat: Seat, *, folder: str | os.PathLike[str] | None = None, port: int = DEFAULT_PORT, join_s: float = JOIN_S
) -> Meeting:
    """Meet the other ranks, in `folder` where one is given, else on `port` of rank 0's node; use it in a `with`.

    Returns when all are there. Raises `MeetingFailed` on every rank that came, naming those that did not within
    `join_s`; `UsageError` where the seat or the port cannot be meant.
    """
    meeting: Meeting = TcpMeeting(seat, port) if folder is None else FolderMeeting(seat, folder)
    try:
        meeting.join(join_s)
    except BaseException as error:
        meeting.leave(error)
        raise
    return meeting
