"""How many pieces of a save may be under way, from how long they take: what is slower than it can be has company.

A piece that shares its way (a link, a target, a drive) with somebody's reads takes longer, and so do those reads. So

    waiting = seconds of a piece - the fewest that one took lately          (own pieces in front of it count, too)
    waiting within the limit: one piece more for each round of answers      else: half as many, once a round

as delay-based congestion control does for traffic that is to yield (LEDBAT, RFC 6817; Swift, SIGCOMM 2020, whose window
may be less than one: then a piece is sent now and then). The limit is half of what a piece takes alone, so that even a
drive or a switch that shares evenly shows the company, which a fixed delay would not.

Ranks that save together are company, too. What one piece takes is learnt from pieces with long pauses of chance between
them, so that some meet nobody; from then on who meets somebody steps aside, and one or few at a time have the way. The
fewest seconds are forgotten after 30 to 60 s, and learnt again: else a queue of our own making would be taken for the
way itself. No clock and no I/O: a function of what it is told, and of a seed.
"""

from __future__ import annotations

import random
from collections import deque

from headrace.units import KIB, MIB

#: A piece. Doubled where one takes less than `_SHORT_S` on its own: what wakes a thread is not to be measured.
SMALLEST_BYTES = 256 * KIB
LARGEST_BYTES = 4 * MIB
_SHORT_S = 1e-3
#: Pieces under way; and the least, over the number of ranks, of which so many count.
MOST = 64.0
LEAST = 1 / 8
_RANKS = 8
#: Waiting that is taken for nobody's, as a share of what a piece takes alone, and at least.
_LIMIT_SHARE = 0.5
_LIMIT_S = 0.25e-3
#: Answers that are looked at together: the fastest counts, as a slow one may be chance.
_LOOKED_AT = 2
#: Answers from which it is learnt what a piece takes, and how much of the time a rank has one under way meanwhile.
_LEARNT_FROM = 8
_LEARNING_SHARE = 1 / 4
_PERIOD_S = 30.0


class DelayWindow:
    """`room` and `pause_s` say what may be sent; `answered` what came of it. Seconds by any clock that goes on.

    `ranks`: that save together, and may have one way. `seed`: another one for each.
    """

    def __init__(self, ranks: int = 1, seed: int = 0) -> None:
        ranks = max(1, min(ranks, _RANKS))
        self._least = LEAST / ranks
        self._learning = _LEARNING_SHARE / ranks
        self._chance = random.Random(seed)
        self.piece_bytes = SMALLEST_BYTES
        #: Pieces; below 1 there is one at a time, and a pause behind it.
        self.pieces = self._learning
        #: Seconds from the last answer until the next piece may be sent.
        self.pause_s = 0.0
        self._fastest = [float("inf"), float("inf")]
        self._period_began: float | None = None
        self._left_to_learn = _LEARNT_FROM
        self._recent: deque[float] = deque(maxlen=_LOOKED_AT)
        self._halved_at = float("-inf")

    @property
    def base_s(self) -> float:
        """The fewest seconds that a piece took lately; infinite before the first."""
        return min(self._fastest)

    @property
    def limit_s(self) -> float:
        """What a piece may take before it has company."""
        return self.base_s + max(_LIMIT_S, _LIMIT_SHARE * self.base_s)

    def room(self, under_way_bytes: int) -> int:
        """Bytes of one piece, or 0 where as many as may be are under way."""
        fits = under_way_bytes + self.piece_bytes <= max(1.0, self.pieces) * self.piece_bytes
        return self.piece_bytes if fits or not under_way_bytes else 0

    @property
    def learning(self) -> bool:
        return self._left_to_learn > 0

    def answered(self, length_bytes: int, seconds: float, now: float) -> None:
        """A piece was answered `seconds` after it was sent. Others than whole ones say nothing."""
        if length_bytes != self.piece_bytes:
            return
        if self._period_began is None:
            self._period_began = now
        elif now - self._period_began >= _PERIOD_S:
            self._period_began = now
            self._fastest = [self._fastest[1], float("inf")]
            self._learn()
        self._fastest[1] = min(self._fastest[1], seconds)
        self._recent.append(seconds)
        if self._left_to_learn:
            self._left_to_learn -= 1
            if not self._left_to_learn:
                self._learnt()
        elif min(self._recent) <= self.limit_s:
            self.pieces = min(MOST, 1.0 if self.pieces < 1 else self.pieces + 1 / self.pieces)
        elif now - self._halved_at >= seconds:
            self._halved_at = now
            self.pieces = max(self._least, self.pieces / 2)
        self.pause_s = 0.0
        if self.pieces < 1:
            self.pause_s = min(self.base_s, seconds) * (1 / self.pieces - 1) * self._chance.uniform(0.5, 1.5)

    def _learn(self) -> None:
        self._left_to_learn = _LEARNT_FROM
        self.pieces = self._learning
        self._recent.clear()

    def _learnt(self) -> None:
        self.pieces = 1.0
        if self.base_s < _SHORT_S and self.piece_bytes < LARGEST_BYTES:
            # Nothing is known of larger ones.
            self.piece_bytes *= 2
            self._fastest = [float("inf"), float("inf")]
            self._learn()
