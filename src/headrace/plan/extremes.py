"""The least and the most that the formulas of `headrace.plan.goodput` give within ranges, where they turn.

Such a formula is one of a few times: how long a save blocks and until it is committed, between failures, of an
interval, of a restart. Along some of them it goes up or down and never turns (`_directions`): its ends lie at theirs.
The box of the others is cut where its bounds are the widest, again and again, until nothing that is left can lie more
than `TOLERANCE` beyond the best point that was found (branch and bound). The bounds of a box are put together of parts
that do not turn. With Daly's interval D(blocked, mtbf), x = sqrt(blocked / 2 mtbf):

    blocked / D = x / (1 + x / 3 + x^2 / 9)      goes up with blocked, and down with mtbf (for x < 1)
    D / mtbf = 2 x (1 + x / 3 + x^2 / 9)         too; above 2 from x = 0.75 on, where failures leave nothing

so what trains goes down with blocked and up with mtbf. With committed it goes down, too: where D is longer, for so
much more is lost at a failure; else committed is the interval, where it would turn at sqrt(2/3 blocked mtbf) or less,
and D is longer than that.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from headrace.plan.quantities import Range
from headrace.plan.situation import Situation, chosen_interval_s, goodput, ideal_interval_s, storage_share

#: A share of the time: what an end may be short at most.
TOLERANCE = 1e-4
#: Of more boxes than these the bounds are taken as they are: wider than need be, and never short. Of what a change wins
#: the bounds are wide, for most of it is in both of what is compared: there the best point is taken.
_BOXES, _BOXES_OF_CHANGE = 1000, 30

Pair = tuple[float, float]
#: Ranges of the times by their names, and one point in them.
Box = dict[str, Pair]
Point = dict[str, float]
Change = Callable[[Situation], Situation]


class _Times(NamedTuple):
    """Within a box. `interval` None: Daly's."""

    blocked: Pair
    committed: Pair
    mtbf: Pair
    other: Pair
    load: Pair
    busy: Pair
    interval: Pair | None
    synchronous: bool


class _Parts(NamedTuple):
    """Shares, before what comes first is taken from what comes after."""

    stopped: Pair
    rework: Pair
    restarts: Pair
    busy: Pair

    @property
    def left(self) -> Pair:
        low, high = (self.rework[end] + self.restarts[end] for end in (1, 0))
        return max(0.0, 1 - low), max(0.0, 1 - high)

    @property
    def trains(self) -> Pair:
        low, high = self.left
        return self.busy[0] * (1 - self.stopped[1]) * low, self.busy[1] * (1 - self.stopped[0]) * high


class Extremes:
    """Of a share of the time: "goodput", "storage" (what it costs), one of `Shares`; with `change` what that wins."""

    def __init__(self, what: str, *, synchronous: bool, change: Change | None = None) -> None:
        self._what, self._synchronous, self._change = what, synchronous, change

    def within(self, values: Mapping[str, Range]) -> Pair:
        """`values`: by the names of `goodput.SYMBOLS`."""
        box = {name: (values[symbol].low, values[symbol].high) for name, symbol in _PLAIN.items() if symbol in values}
        box["committed"] = _quotient(values["size"], values["write rate"])
        if "copy rate" in values:
            box["blocked"] = _quotient(values["share of a rank"], values["copy rate"])
        return -self._most(box, -1), self._most(box, 1)

    def _most(self, box: Box, sign: int) -> float:
        """Of `sign` times the value."""
        up, down = _directions(self._what, self._synchronous, "interval" in box)
        fixed = dict.fromkeys(up, 1) | dict.fromkeys(down, -1)
        box = {name: (pair[fixed[name] * sign > 0],) * 2 if name in fixed else pair for name, pair in box.items()}

        def value(point: Point) -> float:
            return sign * self._value(point)

        def bound(box: Box) -> float:
            low, high = self._bounds(box)
            return high if sign > 0 else -low

        if self._change is not None:
            return _branch_and_bound(box, value, bound, _BOXES_OF_CHANGE)[0]
        best, most = _branch_and_bound(box, value, bound, _BOXES)
        return best if most <= best + TOLERANCE else most

    def _value(self, point: Point) -> float:
        here = _situation(point, self._synchronous)
        if self._change is not None:
            return goodput(self._change(here)) - goodput(here)
        of = {"goodput": goodput, "storage": storage_share}.get(self._what)
        return of(here) if of else float(getattr(here.shares(), self._what))

    def _bounds(self, box: Box) -> Pair:
        here = _times(box, self._synchronous)
        if self._what == "storage":
            return _cost(here)
        if self._change is not None:
            then, now = _trains(_changed(box, self._synchronous, self._change)), _trains(here)
            return then[0] - now[1], then[1] - now[0]
        if self._what == "goodput":
            return _trains(here)
        parts = _parts(here)
        low, high = parts.left
        if self._what == "saves":
            return low * parts.stopped[0], high * parts.stopped[1]
        if self._what == "data_wait":
            low, high = _trains(here._replace(busy=_ONE))
            return low * (1 - parts.busy[1]), high * (1 - parts.busy[0])
        mine, other = parts.rework, parts.restarts
        if self._what == "restarts":
            mine, other = other, mine
        # Goes up with its own, and down with the other one.
        return mine[0] / max(1.0, mine[0] + other[1]), mine[1] / max(1.0, mine[1] + other[0])


_ZERO, _ONE = (0.0, 0.0), (1.0, 1.0)
_PLAIN = {
    "mtbf": "mtbf", "other": "other", "read": "read rate", "needed": "needed", "restart": "restart bytes",
    "interval": "interval",
}  # fmt: skip


def _directions(what: str, synchronous: bool, given: bool) -> tuple[set[str], set[str]]:
    """Along what it goes up, and along what down; along the others it turns. `given`: the interval is."""
    # A save that takes longer than a given interval makes that longer.
    stretches = given and not synchronous
    committed: set[str] = set() if stretches else {"committed"}
    if what == "goodput":
        return {"mtbf", "read"}, {"blocked", "other", "restart", "needed", *committed}
    if what == "data_wait":
        return {"mtbf", "needed"}, {"blocked", "other", "restart", *committed}
    if what == "storage":
        return {"restart", "needed", "committed"}, {"read"}
    if what == "saves":
        if not given:
            return {"read"}, {"restart", "other", *(set() if synchronous else {"committed"})}
        return {"read", "blocked", "mtbf"}, {"restart", "other", "interval", *(set() if synchronous else {"committed"})}
    if what == "rework":
        return {"read", "blocked", "committed", "interval"}, {"restart", "other"}
    if what == "restarts":
        # Daly's interval is a little shorter from mtbf = blocked / 2 on.
        return {"restart", "other"}, {"read", "blocked", "committed", "interval", *({"mtbf"} if given else ())}
    return set(), set()


def _quotient(above: Range, below: Range) -> Pair:
    return above.low / below.high, above.high / below.low


def _situation(point: Point, synchronous: bool) -> Situation:
    return Situation(
        feed_needed=point["needed"], read=point["read"], write=1.0, size=point["committed"],
        share=point.get("blocked", 0.0), copy=1.0, mtbf_s=point["mtbf"], restart_bytes=point["restart"],
        other_s=point["other"], synchronous=synchronous, interval_s=point.get("interval"),
    )  # fmt: skip


def _times(box: Box, synchronous: bool) -> _Times:
    (read, faster), (least, most) = box["read"], box["needed"]
    return _Times(
        blocked=box.get("blocked", _ZERO), committed=box["committed"], mtbf=box["mtbf"], other=box["other"],
        load=(box["restart"][0] / faster, box["restart"][1] / read), interval=box.get("interval"),
        busy=(min(1.0, read / most) if most else 1.0, min(1.0, faster / least) if least else 1.0),
        synchronous=synchronous,
    )  # fmt: skip


def _changed(box: Box, synchronous: bool, change: Change) -> _Times:
    """What a change asks of storage goes up with what is read and written, and down with the time for that; so what
    a load and a save take then goes up and down as it did, and up with `mtbf` and `interval`, where it is that time."""

    def at(high: set[str]) -> Situation:
        return change(_situation({name: pair[name in high] for name, pair in box.items()}, synchronous))

    low, high = at({"read", "needed"}), at({"committed", "interval", "restart", "mtbf"})
    busy = [min(1.0, one.read / one.feed_needed) if one.feed_needed else 1.0
            for one in (at({"needed", "mtbf"}), at({"read", "restart"}))]  # fmt: skip
    interval = None
    if low.interval_s is not None and high.interval_s is not None:
        interval = (low.interval_s, high.interval_s)
    return _Times(
        blocked=box.get("blocked", _ZERO), committed=(low.committed_s, high.committed_s), mtbf=box["mtbf"],
        other=box["other"], load=(low.restart_bytes / low.read, high.restart_bytes / high.read),
        busy=(busy[0], busy[1]), interval=interval, synchronous=low.synchronous,
    )  # fmt: skip


def _trains(times: _Times) -> Pair:
    """The least and the most, as they are: nothing in it turns but along the interval, and along what stretches it."""
    low, high = times.committed
    if times.interval is None:
        # Goes down with `committed`, of which its parts go up and down.
        slow, fast = times._replace(committed=(high, high)), times._replace(committed=(low, low))
        return _parts(slow).trains[0], _parts(fast).trains[1]
    short, long = times.interval

    def at(end: int, committed: float, interval: float) -> float:
        """All else at its worst (0), or at its best."""
        mtbf, chosen = times.mtbf[end], max(committed, interval)
        blocked = committed if times.synchronous else times.blocked[1 - end]
        restarts = (times.load[1 - end] + times.other[1 - end]) / mtbf
        left = max(0.0, 1 - (chosen / 2 + committed) / mtbf - restarts)
        return times.busy[end] * max(0.0, 1 - (blocked / chosen if chosen else 0.0)) * left

    # For one `committed` it is the product of a part that rises, ever more slowly, and a straight one that falls: least
    # at the ends. Where `committed` is the interval, too.
    least = min(at(0, min(high, max(low, one)), one) for one in times.interval)
    least = min(least, *(at(0, one, other) for one in times.committed for other in times.interval))
    # And most where its derivative is 0.
    room = max(0.0, times.mtbf[1] - times.load[0] - times.other[0])
    blocked = low if times.synchronous else times.blocked[0]
    most = at(1, low, min(max(long, low), max(short, low, math.sqrt(2 * blocked * max(0.0, room - low)))))
    if high > long and not times.synchronous:
        stretched = min(high, max(long, low, math.sqrt(2 / 3 * blocked * room)))
        most = max(most, at(1, stretched, stretched))
    return least, most


def _parts(times: _Times) -> _Parts:
    committed, mtbf, interval = times.committed, times.mtbf, times.interval or (None, None)
    blocked = committed if times.synchronous else times.blocked
    # Behind x = 1 the share of the interval begins again at 2/3 of it. Nothing is left there.
    beyond = times.interval is None and blocked[1] >= 2 * mtbf[0]

    def share(end: int) -> float:
        """Of the interval. It goes down with `committed`, but where that is `blocked`."""
        after = committed[end if times.synchronous else 1 - end]
        chosen = chosen_interval_s(blocked[end], after, mtbf[1 - end], interval[1 - end])
        return min(1.0, blocked[end] / chosen) if chosen else 0.0

    def rework(end: int) -> float:
        chosen = chosen_interval_s(blocked[end], committed[end], mtbf[1 - end], interval[end])
        return (chosen / 2 + committed[end]) / mtbf[1 - end]

    def restarts(end: int) -> float:
        return (times.load[end] + times.other[end]) / mtbf[1 - end]

    return _Parts(
        stopped=(min(share(0), 2 / 3), 1.0) if beyond else (share(0), share(1)), rework=(rework(0), rework(1)),
        restarts=(restarts(0), restarts(1)), busy=times.busy,
    )  # fmt: skip


def _cost(here: _Times) -> Pair:
    """What trains over storage that takes no time, less what trains: put so that nothing large is taken from anything
    large. With `i` for such storage, its shares before what is lost to failures, and left = 1 - rework - restarts:

    (1 - busy) * stopped not i * left i + busy * (stopped not * least(left i, lost) - (stopped i - stopped) * left i)
    """
    blocked = _ZERO if here.synchronous else here.blocked

    def over_ideal(blocked: float, mtbf: float, other: float, given: float | None, chosen: float) -> float:
        if given is None:
            return chosen_interval_s(blocked, 0.0, mtbf, None)
        return ideal_interval_s(blocked, mtbf, other, given, chosen)

    def chosen(end: int) -> Pair:
        """Over such storage and over this one, where `committed` stretches the interval least (0) and most."""
        committed, rest = here.committed[end], 1 - end
        own, given = committed if here.synchronous else blocked[rest], here.interval and here.interval[rest]
        after = chosen_interval_s(own, committed, here.mtbf[rest], given)
        return over_ideal(blocked[rest], here.mtbf[rest], here.other[end], given, after), after

    interval = here.interval
    if interval is not None:
        # It goes up with all but `other`.
        ends = zip(blocked, here.mtbf, here.other[::-1], interval, map(max, interval, here.committed), strict=True)
        least, most = (ideal_interval_s(*one) for one in ends)
        interval = least, most
    ideal = _parts(here._replace(committed=_ZERO, load=_ZERO, busy=_ONE, interval=interval))
    now, left = _parts(here), ideal.left

    def lost(end: int) -> float:
        before, after = chosen(end)
        more = (after - before) / 2 + here.committed[end] + here.load[end]
        return min(left[end], more / here.mtbf[1 - end])

    def eased(end: int) -> float:
        """A longer interval stops training for a smaller share of it."""
        before, after = chosen(end)
        return ideal.stopped[end] * (1 - before / after) if after else 0.0

    if here.synchronous:
        more = now.stopped[0] * left[0], now.stopped[1] * left[1]
    else:
        more = -eased(1) * left[1], -(0.0 if ideal.stopped[1] >= 1 else eased(0)) * left[0]
    low = (1 - now.stopped[1]) * lost(0) + more[0]
    high = (1 - now.stopped[0]) * lost(1) + more[1]
    waits = (1 - ideal.stopped[1]) * left[0], (1 - ideal.stopped[0]) * left[1]
    low = min((1 - busy) * waits[0] + busy * low for busy in here.busy)
    high = max((1 - busy) * waits[1] + busy * high for busy in here.busy)
    return max(0.0, low), high


def _branch_and_bound(box: Box, value: Callable[[Point], float], bound: Callable[[Box], float], boxes: int) -> Pair:
    """The most of `value` that was found in the box, and what it is not above. `bound`: the same of a part of it."""
    names = [name for name, (low, high) in box.items() if low < high]
    plain = {name: pair[0] for name, pair in box.items()}
    corners = itertools.product(*(box[name] for name in names))
    best = max(value(plain | dict(zip(names, corner, strict=True))) for corner in corners)
    if not names:
        return best, best
    heap, count = [(-bound(box), 0, box)], itertools.count(1)
    for _ in range(boxes):
        if -heap[0][0] <= best + TOLERANCE:
            break
        box = heapq.heappop(heap)[2]
        middle = {name: _middle(*box[name]) for name in names}
        best = max(best, value(plain | middle))
        # Cut where it says most.
        name = min(names, key=lambda name: bound(box | {name: (middle[name], middle[name])}))
        for half in ((box[name][0], middle[name]), (middle[name], box[name][1])):
            below = box | {name: half}
            heapq.heappush(heap, (-bound(below), next(count), below))
    return best, max(best, -heap[0][0])


def _middle(low: float, high: float) -> float:
    if low == high:
        return low
    return (low * high) ** 0.5 if low > 0 and high > 2 * low else low + (high - low) / 2
