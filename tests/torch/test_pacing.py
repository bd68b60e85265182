"""A save that nobody waits for gives way to reads, and ends in time: its rules, on clocks and ways that are told."""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.torch import WriterOptions
from headrace.torch.save.pacing import Awaited, Pacer, Rhythm, within_seconds
from headrace.torch.save.window import LEAST, SMALLEST_BYTES, DelayWindow
from headrace.volume import hunger

RATE = 100e6
LATENCY_S = 0.2e-3
TICK_S = 0.2e-3
TOTAL = 64 << 20


@dataclass
class Saver:
    """Sends what its window lets it, over a way that it shares evenly with whoever else is there."""

    window: DelayWindow | None
    under_way: deque[list[float]] = field(default_factory=deque)
    free_at: float = 0.0
    sent_bytes: float = 0.0

    def send(self, now: float) -> None:
        if self.window is None:
            while len(self.under_way) < 16:
                self.under_way.append([SMALLEST_BYTES, SMALLEST_BYTES, now])
            return
        while room := self.window.room(int(sum(piece[1] for piece in self.under_way))):
            if not self.under_way and now < self.free_at:
                return
            self.under_way.append([room, room, now])

    def move(self, share: float, now: float) -> None:
        self.sent_bytes += share
        while self.under_way and share > 0:
            moved = min(share, self.under_way[0][0])
            self.under_way[0][0] -= moved
            share -= moved
            if self.under_way[0][0] <= 0:
                _, length, sent = self.under_way.popleft()
                if self.window is not None:
                    self.window.answered(int(length), now - sent + LATENCY_S, now)
                    self.free_at = now + self.window.pause_s


def beside(savers: list[Saver], seconds: float, *, burst_bytes: float, period_s: float) -> tuple[float, float]:
    """A reader gets `burst_bytes` each `period_s`, as fast as the way and the savers let it. How long its slowest burst
    took, and how much the savers moved: both over what they would have been alone, or of the rest."""
    now, next_burst, left, began = 0.0, 0.25, 0.0, 0.0
    read, slowest = 0.0, 0.0
    while now < seconds:
        if burst_bytes and left <= 0 and now >= next_burst:
            left, began, next_burst = burst_bytes, now, next_burst + period_s
        for saver in savers:
            saver.send(now)
        busy = [saver for saver in savers if saver.under_way]
        share = RATE * TICK_S / max(1, len(busy) + (left > 0))
        now += TICK_S
        for saver in busy:
            saver.move(share, now)
        if left > 0:
            left -= share
            read += share
            slowest = max(slowest, now - began)
    moved = sum(saver.sent_bytes for saver in savers)
    return slowest / max(burst_bytes / RATE, TICK_S), moved / (RATE * seconds - read)


def test_who_has_time_gives_way_to_bursts_at_half_of_the_way_and_takes_what_they_leave() -> None:
    greedy, _ = beside([Saver(None)], 3, burst_bytes=10e6, period_s=0.2)
    assert greedy == pytest.approx(2.0, abs=0.05)
    slower, taken = beside([Saver(DelayWindow())], 3, burst_bytes=10e6, period_s=0.2)
    assert slower < 1.4 and taken > 0.75


@pytest.mark.parametrize("count", [1, 4])
def test_without_company_the_way_is_taken(count: int) -> None:
    savers = [Saver(DelayWindow(count, seed)) for seed in range(count)]
    _, taken = beside(savers, 3, burst_bytes=0, period_s=1)
    assert taken > 0.8


def test_savers_that_begin_together_do_not_take_each_other_for_the_way_itself() -> None:
    """Else the reader would be one more of many to each of them, and none would step aside."""
    savers = [Saver(DelayWindow(4, seed)) for seed in range(4)]
    slower, taken = beside(savers, 3, burst_bytes=10e6, period_s=0.2)
    assert slower < 2.5 and taken > 0.6


def test_pieces_grow_until_one_can_be_timed() -> None:
    window = DelayWindow()
    for step in range(100):
        window.answered(window.piece_bytes, window.piece_bytes / 2e9, step * 0.01)
    assert window.base_s >= 1e-3 and window.piece_bytes == 2 << 20
    assert window.room(0) == window.piece_bytes


def test_a_way_that_has_become_slower_for_good_is_learnt_anew() -> None:
    window, now = DelayWindow(), 0.0
    for seconds in [0.002] * 50 + [0.01] * 400:
        now += seconds + window.pause_s
        window.answered(window.piece_bytes, seconds, now)
        assert window.pieces >= LEAST
    assert window.pieces < 1
    while now < 100:
        now += 0.01 + window.pause_s
        window.answered(window.piece_bytes, 0.01, now)
    assert window.pieces >= 1 and window.base_s == 0.01


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(1e-6, 10), st.floats(0, 5)), max_size=80),
    st.integers(1, 2000),
    st.integers(0, 1 << 40),
)
def test_whatever_the_answers_one_piece_may_go_when_none_is_under_way(
    answers: list[tuple[float, float]], ranks: int, under_way: int
) -> None:
    window, now = DelayWindow(ranks), 0.0
    for seconds, between in answers:
        now += between
        window.answered(window.piece_bytes, seconds, now)
        assert window.room(0) == window.piece_bytes
        assert window.room(under_way) in (0, window.piece_bytes)
        assert 0 <= window.pause_s <= 1.5 * seconds / (LEAST / 8)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def written(pacer: Pacer, clock: Clock, seconds_a_piece: float, until_s: float = 1e9) -> tuple[int, float]:
    """What goes out until then, one piece under way at a time, and when the last byte did."""
    sent = 0
    while sent < TOTAL and clock.now < until_s:
        room = min(pacer.take(0), TOTAL - sent)
        assert room > 0
        clock.now += seconds_a_piece
        pacer.answered(room, seconds_a_piece)
        sent += room
    return sent, clock.now


def make(clock: Clock, dry: bool, within_s: float) -> tuple[Pacer, threading.Event]:
    hurry = threading.Event()
    pacer = Pacer(TOTAL, within_s=within_s, hurry=hurry, dry=lambda: dry, clock=clock, sleep=clock.sleep)
    return pacer, hurry


def test_while_a_step_waits_only_the_least_rate_goes_out() -> None:
    clock = Clock()
    pacer, _ = make(clock, True, 100.0)
    sent, _ = written(pacer, clock, 0.003, 50.0)
    assert abs(sent - TOTAL / 2) <= 2 * pacer.window.piece_bytes
    report = pacer.report()
    assert report.pressed_bytes == sent and report.hurried_bytes == 0
    assert report.feed_seconds > 45 and report.held_seconds == pytest.approx(report.feed_seconds, abs=1)
    _, ended = written(pacer, clock, 0.003)
    assert ended <= 101


def test_where_somebody_waits_all_goes_at_once() -> None:
    clock = Clock()
    pacer, hurry = make(clock, True, 100.0)
    sent, _ = written(pacer, clock, 0.003, 10.0)
    hurry.set()
    assert pacer.take(1 << 20) >= TOTAL
    assert pacer.report().hurried_bytes == TOTAL - sent
    assert pacer.describe()["hurried"] is True


def test_what_must_go_while_a_step_waits_goes_alone() -> None:
    clock = Clock()
    pacer, _ = make(clock, True, 1.0)
    assert pacer.take(0) == 0 or clock.now > 0
    clock.now += 0.5
    assert pacer.take(1 << 20) == 0
    assert pacer.take(0) == SMALLEST_BYTES


@settings(max_examples=40)
@given(st.floats(0.05, 600), st.lists(st.booleans(), min_size=1, max_size=8), st.floats(1e-4, 0.02))
def test_whatever_holds_it_up_a_save_ends_in_time(within_s: float, dry: list[bool], seconds_a_piece: float) -> None:
    clock, asked = Clock(), 0

    def is_dry() -> bool:
        nonlocal asked
        asked += 1
        return dry[asked // 16 % len(dry)]

    pacer = Pacer(
        TOTAL, within_s=within_s, hurry=threading.Event(), dry=is_dry, ranks=8, clock=clock, sleep=clock.sleep
    )
    _, ended = written(pacer, clock, seconds_a_piece)
    # It cannot be faster than its pieces are, one at a time.
    assert ended <= within_s * 17 / 16 + 1 + TOTAL / SMALLEST_BYTES * seconds_a_piece


@pytest.mark.parametrize(("intervals_s", "known"), [([40.0, 10.0, 10.0, 20.0], True), ([20.0] * 4, False)])
def test_a_save_that_gives_way_ends_before_the_next_one_is_due(intervals_s: list[float], known: bool) -> None:
    """With its flush, whatever holds it up: where somebody knows when that is, and where the last ones tell."""
    clock = Clock()
    rhythm = Rhythm(clock)
    assert rhythm.left_s is None
    for interval_s in intervals_s:
        began = clock.now
        # A longer one among the last says nothing where it is known.
        rhythm.begin(interval_s if known else None)
        clock.now += 0.5
        left_s = rhythm.left_s
        assert (left_s is None) == (not known and not began), "nobody knows with the first"
        if left_s is not None:
            within_s = within_seconds(600.0, left_s, TOTAL, None)
            pacer = Pacer(
                TOTAL, within_s=within_s, hurry=threading.Event(), dry=lambda: True, clock=clock, sleep=clock.sleep
            )
            written(pacer, clock, 0.003)
            clock.now += 3.0
            rhythm.closing_s = pacer.since_answered_s
            assert clock.now < began + interval_s
            # It took what it was let: the feed got the rest.
            assert pacer.report().feed_seconds > 0.6 * left_s
        clock.now = began + interval_s


@pytest.mark.parametrize(
    ("interval_s", "least_rate", "expected"),
    [(None, None, 300.0), (100.0, None, 80.0), (10_000.0, None, 300.0), (100.0, 10e6, 10.0), (None, 1.0, 300.0)],
)
def test_by_when_a_save_is_written(interval_s: float | None, least_rate: float | None, expected: float) -> None:
    assert within_seconds(600.0, interval_s, 100_000_000, least_rate) == expected


def test_a_least_rate_is_more_than_nothing() -> None:
    with pytest.raises(UsageError, match="least_rate"):
        WriterOptions(least_rate=0)


def test_a_future_tells_that_it_is_waited_for() -> None:
    told: list[int] = []
    future: Awaited[int] = Awaited(lambda: told.append(1))
    assert not future.done() and not told
    with pytest.raises(FutureTimeout):
        future.result(0)
    assert told == [1]
    future.set_result(5)
    assert future.result() == 5 and future.exception() is None and told == [1]


@pytest.mark.parametrize(
    ("ready", "low"),
    [
        ([], False),
        ([True], False),
        ([False], True),
        ([True, False], False),
        ([True, False, False], True),
        ([False, True, True, True], True),
        ([True, True, True, False], False),
    ],
)
def test_a_ring_is_low_before_it_is_empty(ready: list[bool], low: bool) -> None:
    assert hunger.is_low(ready) is low


class Waiting:
    """Reads ahead, and has nothing."""

    def batches_ahead(self) -> list[bool]:
        return [False]


@pytest.fixture
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests of this process left behind."""
    monkeypatch.setattr(hunger, "_reading", {})


@pytest.mark.usefixtures("nobody_else")
def test_only_those_that_read_ahead_count() -> None:
    ahead = Waiting()
    assert not hunger.dry()
    hunger.join(ahead)
    hunger.join(ahead)
    assert hunger.dry()
    hunger.leave(ahead)
    hunger.leave(ahead)
    assert not hunger.dry()
    hunger.join(ahead)
    del ahead
    gc.collect()
    assert not hunger.dry(), "nobody holds it any more"


def test_a_child_does_not_wait_for_feeds_of_its_parent() -> None:
    ahead = Waiting()
    hunger.join(ahead)
    try:
        child = os.fork()
        if not child:
            os._exit(hunger.dry())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert hunger.dry()
    finally:
        hunger.leave(ahead)
