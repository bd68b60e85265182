"""Being told to stop: a signal is noted when it comes, and acted on at the next boundary of a step, by all ranks.

A scheduler tells some ranks, or all of them, at moments that differ: Slurm sends SIGTERM at the time limit (and before,
with `--signal=USR1@120`, SIGUSR1), Kubernetes SIGTERM, `torchrun` hands a SIGTERM of its own on. What is done about it
stands in `Checkpointer`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

from headrace.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """Which signals tell a job to stop. Equal on all ranks."""

    signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1)
    #: Seconds between the signal and the moment at which the process is killed. Kubernetes and Slurm's `KillWait` leave
    #: 30 by default; with `--signal=USR1@120` there are 120. The step under way takes its part of them.
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.signals:
            raise UsageError("Preemption.signals", expected="at least one", found="none")
        for each in self.signals:
            if each in (signal.SIGKILL, signal.SIGSTOP) or each not in signal.valid_signals():
                raise UsageError(
                    "Preemption.signals",
                    expected="signals that a process may hear of",
                    found=str(getattr(each, "name", each)),
                )
        if not self.grace_s > 0:
            raise UsageError("Preemption.grace_s", expected="above 0", found=str(self.grace_s))


class SignalWatch:
    """Notes the first of the signals that comes to this process, until `close` puts the handlers before it back."""

    def __init__(self, preemption: Preemption) -> None:
        self._preemption = preemption
        self._came: tuple[signal.Signals, float] | None = None
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("signals can be watched by the main thread only", next_step="make the Checkpointer there")
        for each in preemption.signals:
            self._before[each] = signal.signal(each, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked worker (of a DataLoader, say) has this handler, too. It is nobody's to save, and must end.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self._came is None:
            self._came = signal.Signals(number), time.monotonic()

    @property
    def came(self) -> signal.Signals | None:
        return None if self._came is None else self._came[0]

    @property
    def left_s(self) -> float | None:
        """Seconds of the grace period that are left; None where no signal came."""
        return None if self._came is None else self._preemption.grace_s - (time.monotonic() - self._came[1])

    def close(self) -> None:
        before, self._before = self._before, {}
        for each, handler in before.items():
            # None: it was not set from Python, and cannot be put back from there.
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
