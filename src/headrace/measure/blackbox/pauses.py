"""What goes wrong again and again is not dumped each time."""

from __future__ import annotations

import time
from dataclasses import dataclass

#: Kinds that are told apart; all others are one.
_MOST_KINDS = 16


@dataclass
class _Kind:
    until: float
    pause_s: float
    left_out: int = 0


class Pauses:
    """Of each kind a first one is dumped, and then none for `first_s`, for twice as long behind the next, and so on up
    to `most_s`. For any thread; two of one kind at a moment may both be dumped."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._kinds: dict[str, _Kind] = {}

    def _of(self, kind: str) -> _Kind:
        known = kind in self._kinds or len(self._kinds) < _MOST_KINDS
        return self._kinds.setdefault(kind if known else "", _Kind(time.monotonic(), self._first_s))

    def left_s(self, kind: str) -> float:
        """Until the next one of this kind may be dumped."""
        return max(0.0, self._of(kind).until - time.monotonic())

    def begin(self, kind: str) -> int:
        """One is dumped now. Returns how many have been left out since the last."""
        found = self._of(kind)
        found.until, found.pause_s = time.monotonic() + found.pause_s, min(2 * found.pause_s, self._most_s)
        left_out, found.left_out = found.left_out, 0
        return left_out

    def leave_out(self, kind: str) -> bool:
        """One is not dumped; true: it is the first since the last that was."""
        found = self._of(kind)
        found.left_out += 1
        return found.left_out == 1
