"""Signs of life: while ranks measure, each tells the others now and then that it is there, and that it runs.

A thread of each rank sends a beat every `BEAT_S`. Two things may be wrong with a rank that is waited for:

* No beat comes for `Meeting.silent_s`: its process was stopped, or its node hangs.
* Beats come, and say that its main thread has not run for `HANGS_S`: the kernel holds it in a call, as it does where a
  mount hangs. What the kernel counts as a thread's switches tells so (proc_pid_status(5)): whoever works, waits with a
  deadline or shows how far it is, is switched to again and again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import MeetingFailed

BEAT_S = 2.0
#: Longer than any wait of the main thread has that is not looked at on the way (a flow that connects: 90 s).
HANGS_S = 120.0


class Stillness:
    """Of the thread that makes it: for how long it has not run. Asked by another thread."""

    def __init__(self) -> None:
        self._status = Path(f"/proc/self/task/{threading.get_native_id()}/status")
        self._switches = ""
        self._since_s = time.monotonic()

    def seconds(self) -> float:
        """As far as it was asked often: it notices what has changed since the last time."""
        try:
            lines = self._status.read_text().splitlines()
        except OSError:
            lines = []
        switches = " ".join(line for line in lines if "ctxt_switches" in line)
        now = time.monotonic()
        # A kernel that does not tell cannot be held against anybody.
        if switches != self._switches or not switches:
            self._switches, self._since_s = switches, now
        return now - self._since_s


class Beats:
    """The thread that tells. `send(still_s)` is called on it; what it raises of `OSError` is a beat that was not sent.
    Made on the main thread of the rank, whose beats they are."""

    def __init__(self, send: Callable[[float], None]) -> None:
        self._send = send
        self._stillness = Stillness()
        self._over = threading.Event()
        # A daemon: one that the kernel holds in a write to a folder must not keep the process.
        self._thread = threading.Thread(target=self._run, name="bench-beats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(BEAT_S)

    def _run(self) -> None:
        while not self._over.wait(BEAT_S):
            try:
                self._send(self._stillness.seconds())
            except OSError:
                continue


class Heard:
    """What was heard of one rank, by who waits for it."""

    def __init__(self) -> None:
        now = time.monotonic()
        #: When the last beat came, and when it was sent, by this rank's clock.
        self._came_s = self._sent_s = now
        self._still_s = 0.0
        self._last: object = None

    def wait_from_now(self) -> None:
        """Nobody listened before: what has come since then is heard now."""
        self._came_s = time.monotonic()

    def beat(self, message: Mapping[str, Any], clock_s: float) -> None:
        """A beat; `clock_s`: this rank's clock plus it is the one by which it says when it was sent."""
        still_s, sent_s = message.get("beat"), message.get("sent")
        # In a folder the last one stands until the next.
        if sent_s == self._last:
            return
        self._last = sent_s
        if isinstance(still_s, int | float) and isinstance(sent_s, int | float) and math.isfinite(still_s + sent_s):
            self._came_s = time.monotonic()
            self._sent_s = min(self._came_s, sent_s - clock_s)
            self._still_s = still_s

    def check(self, name: str, silent_s: float) -> None:
        """MeetingFailed where it hangs, or is not heard any more."""
        now = time.monotonic()
        if now - self._came_s > silent_s:
            raise MeetingFailed(
                f"{name} has not been heard of since {_clock(now - self._sent_s)}", found=f"{silent_s:g} s of silence",
                next_step="see whether its process was stopped or its node hangs",
            )  # fmt: skip
        if self._still_s > HANGS_S:
            raise MeetingFailed(
                f"{name} hangs since {_clock(now - self._sent_s + self._still_s)}",
                found=f"its main thread has not run for {self._still_s:.0f} s",
                next_step="see what it waits for there: `headrace doctor` on its node looks at its mounts",
            )  # fmt: skip


def message(still_s: float, clock_s: float) -> dict[str, Any]:
    """`clock_s`: this rank's clock plus it is rank 0's."""
    return {"beat": round(still_s, 1), "sent": time.monotonic() + clock_s}


def _clock(ago_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() - ago_s))
