"""What is committed, as far as anybody was told: I2 and I3 of `docs/volume-format.md` as a data structure.

A **state** is name -> length; no two objects that ever are have the same length, so that says which object it is, and
its length says what its bytes are. The **chain** is the states that somebody was shown or that were acknowledged. An
**attempt** is a commit that was asked for, and whose answer has not come, or was an error.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

State = dict[str, int]


class Violation(AssertionError):
    """A promise of the volume was broken."""


def content(length: int) -> bytes:
    """What the object of this length holds."""
    return random.Random(length).randbytes(length)


@dataclass(eq=False)
class Attempt:
    """A commit under way: it becomes the state after `base` whole, or not at all."""

    who: str
    base: int
    state: State
    #: Where it is in the chain.
    index: int | None = None
    #: A later session opened without it: it is nothing for good.
    excluded: bool = False


class Chain:
    def __init__(self) -> None:
        self.states: list[State] = [{}]
        self.attempts: list[Attempt] = []
        #: The last one whose commit returned: what is behind it a reader may miss that cannot read every log copy.
        self.last_acknowledged = 0

    @property
    def last(self) -> int:
        return len(self.states) - 1

    def attempt(self, who: str, base: int, state: State) -> Attempt:
        made = Attempt(who, base, state)
        self.attempts.append(made)
        return made

    def _candidates(self) -> list[Attempt]:
        return [one for one in self.attempts if one.index is None and not one.excluded and one.base == self.last]

    def _append(self, attempt: Attempt) -> None:
        self.states.append(attempt.state)
        attempt.index = self.last

    def acknowledged(self, attempt: Attempt) -> None:
        """Its commit returned: it is the last state, unless somebody was shown it before."""
        if attempt.index is not None:
            self.last_acknowledged = max(self.last_acknowledged, attempt.index)
            return
        if attempt.excluded:
            raise Violation(f"{attempt.who}: acknowledged a commit that a later session does not know")
        if attempt.base != self.last:
            raise Violation(f"{attempt.who}: acknowledged a commit after {attempt.base}, and {self.last} is the last")
        self._append(attempt)
        self.last_acknowledged = self.last

    def observed(self, who: str, state: State, since: int) -> int:
        """Somebody who began to look when `since` was the last one was shown this state. Returns its index."""
        for index in range(since, len(self.states)):
            if self.states[index] == state:
                return index
        for attempt in self._candidates():
            if attempt.state == state:
                self._append(attempt)
                return self.last
        raise Violation(f"{who}: was shown what nobody committed\n{self._difference(state, since)}")

    def opened(self, who: str, state: State, since: int) -> int:
        """A session that began to open when `since` was the last one has this state, and nothing else can come."""
        # Older states may have been the same; it is the last one, or the one in flight.
        if self.states[self.last] != state and not any(one.state == state for one in self._candidates()):
            index = self.observed(who, state, since)
            raise Violation(f"{who}: opened with state {index}, and {self.last} is the last")
        index = self.observed(who, state, self.last)
        # It has marked that again.
        self.last_acknowledged = max(self.last_acknowledged, index)
        for attempt in self.attempts:
            attempt.excluded |= attempt.index is None
        return index

    def after_cut(self, shown: list[State], since: int) -> None:
        """What readers, and at last a session, find one after another when everything lost its power.

        `since`: the last state that somebody was told of; the session must have it. A reader before that may miss what
        was shown and not acknowledged: its marker was seen before it was durable, and the session marks it again.
        """
        first = min(since, self.last_acknowledged)
        known = [*self.states[first:], *(one.state for one in self._candidates())]
        at = 0
        for position, state in enumerate(shown):
            if position == len(shown) - 1:
                at = max(at, since - first)
            if state not in known:
                raise Violation(f"after a power cut: a state that nobody committed\n{self._difference(state, since)}")
            if state not in known[at:] or (at > self.last - first and state != known[at]):
                raise Violation("after a power cut: what a reader was shown was taken back")
            at = known.index(state, at)

    def may_be_gone(self, name: str, length: int, since: int) -> bool:
        """Is there, or may there be, a state from `since` on without this object?"""
        states = [*self.states[since:], *(one.state for one in self._candidates())]
        return any(state.get(name) != length for state in states)

    def _difference(self, state: State, since: int) -> str:
        lines = []
        named = [(f"state {i}", one) for i, one in enumerate(self.states[since:], since)]
        named += [(f"attempt of {one.who}", one.state) for one in self._candidates()]
        for name, known in named:
            more = {key: state[key] for key in state if known.get(key) != state[key]}
            less = {key: known[key] for key in known if state.get(key) != known[key]}
            lines.append(f"  against {name}: found besides {more}, missing {less}")
        return "\n".join(lines)
