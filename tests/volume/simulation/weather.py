"""How often things go wrong in a world, and what its targets are."""

from __future__ import annotations

import random
from dataclasses import dataclass

from headrace.testing import Quirks
from headrace.units import KIB

#: What the targets of a world may be.
TARGETS = (
    Quirks(),
    Quirks(),
    Quirks(forgets=True),
    Quirks(fences_without_draining=True),
    Quirks(refuses_abort=True),
    Quirks(forgets=True, fences_without_draining=True),
    Quirks(no_reservations=True),
)


@dataclass(kw_only=True)
class Weather:
    """How often, of one step, things happen; each world has its own."""

    lose_answer: float = 0.0
    #: Of those: the caller is told.
    given_up: float = 0.2
    fail_command: float = 0.0
    restart: float = 0.0
    stop: float = 0.0
    #: Of writes to the log: stopped before it for so long that somebody takes over.
    stop_in_log: float = 0.0
    kill: float = 0.0
    land: float = 0.0
    early: float = 0.0
    cut: float = 0.02
    ghosts: bool = True
    #: Also of writes that the host sent again, and that succeeded.
    resent_ghosts: bool = False
    #: Also at targets that do not drain.
    undrained_ghosts: bool = False
    #: Late commands to the log are no matter.
    data_only: bool = False
    #: A member does not answer for a while.
    away: float = 0.0
    #: A byte of a structure that stands twice is flipped, on the copy that such things happen to.
    rot: float = 0.0
    #: The log moves often, and its recent changes become tables soon, which are merged.
    many_tables: bool = False
    #: Of transactions of a session; 0: as the seed wants.
    transactions: int = 0
    #: Jobs, one after another; 0: as the seed wants.
    sessions: int = 0
    #: Of jobs: they go on without one of the members, always the same.
    absent: float = 0.0
    #: Takeovers by hand, of all.
    by_hand: float = 0.0
    #: Of a log area.
    log_bytes: int = 128 * KIB

    @classmethod
    def of(cls, chance: random.Random) -> Weather:
        def rate(most: float) -> float:
            return chance.choice((0.0, most / 10, most / 3, most))

        return cls(
            lose_answer=rate(0.05),
            fail_command=rate(0.01),
            restart=rate(0.01),
            stop=rate(0.05),
            kill=rate(0.005),
            land=rate(0.05),
            early=rate(0.05),
            cut=chance.choice((0.0, 0.003, 0.01)),
            ghosts=chance.random() < 0.7,
            resent_ghosts=chance.random() < 0.3,
            away=rate(0.003),
            stop_in_log=rate(0.03),
            many_tables=chance.random() < 0.5,
            absent=chance.choice((0.0, 0.0, 0.4)),
            by_hand=chance.choice((0.0, 0.3)),
            # Two faults at once may be too much: a copy that cannot be read, and the other one damaged.
        )._maybe_rot(chance)

    def _maybe_rot(self, chance: random.Random) -> Weather:
        if chance.random() < 0.3:
            self.absent = 0.0
            self.rot, self.away, self.fail_command, self.given_up = 0.02, 0.0, 0.0, 0.0
        return self
