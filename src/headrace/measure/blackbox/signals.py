"""SIGTERM and SIGUSR2 for a black box: seen by a thread even while the main thread sits in C code, and passed on.

The interpreter's own handler, which runs at once on whatever thread the kernel chose, writes the number of the signal
to a socket (`signal.set_wakeup_fd`) and does no more. A thread of the box reads it. Handlers in Python run in the main
thread, when that is back in the interpreter; it may never be. So:

* what was to be done on the signal before the box came, is done behind the dump: a handler in Python by the main
  thread, as it always was, after it has waited for the dump, but not for long;
* where the signal was to end the process, the box's thread ends it by the signal itself, as the kernel would have;
  but not where somebody has put a handler since: then that one has the last word.

A child of a fork has the handlers, and would write to its parent's socket: it gives both back first of all, so that a
signal ends it as if there were no box.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

#: How long a signal is held up for a dump. Schedulers give 30 s and more before they kill.
GRACE_S = 10.0
#: Between two looks of a handler at what the box's thread is at.
_LOOK_S = 0.01
_open: weakref.WeakSet[Signals] = weakref.WeakSet()


class Signals:
    """Of one box. Made and closed by the main thread; elsewhere it does nothing, and `why_not` says so."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.why_not = ""
        self._before: dict[int, Any] = {}
        #: The box's thread has nothing in hand. No lock: handlers run in the middle of each other.
        self._idle = True
        self._process = os.getpid()
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        # Not `select`: it knows no descriptors from 1024 on.
        self._poll = select.poll()
        self._poll.register(self._near, select.POLLIN)
        self._wakeup_before = -1
        self._closed = False
        if threading.current_thread() is not threading.main_thread():
            self.why_not = "signals are the main thread's, and the box was made by another one"
            return
        for number in numbers:
            before = signal.getsignal(number)
            if before is None or before is signal.SIG_IGN:
                # As under nohup.
                of_whom = "handled by C code" if before is None else "ignored"
                self.why_not = f"{signal.Signals(number).name} was {of_whom} when the box was made"
                continue
            self._before[number] = before
            signal.signal(number, self._handle)
        self._wakeup_before = signal.set_wakeup_fd(self._far.fileno(), warn_on_full_buffer=False)
        _open.add(self)

    # ---- the box's thread ----

    def wait(self, timeout_s: float) -> list[int]:
        """Signals of ours that came; empty when the time has passed, or `wake` was called."""
        self._idle = True
        self._poll.poll(timeout_s * 1000)
        self._idle = False
        try:
            data = self._near.recv(4096)
        except OSError:
            # Nothing came, or it is closed.
            return []
        if self._wakeup_before >= 0 and (others := data.replace(b"\0", b"")):
            with contextlib.suppress(OSError):
                os.write(self._wakeup_before, others)
        return [number for number in dict.fromkeys(data) if number in self._before]

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self._far.send(b"\0")

    def done(self, number: int) -> None:
        """The dump for it is made, or was given up: what the signal was to do is done now."""
        if number == signal.SIGTERM and signal.getsignal(number) == self._handle and self._ends(number):
            _end_by(number)

    def _ends(self, number: int) -> bool:
        """Nobody was there before this box, and others, which are waited for."""
        before = self._before.get(number)
        owner = getattr(before, "__self__", None)
        if isinstance(owner, Signals):
            owner._settle()
            return owner._ends(number)
        return before is signal.SIG_DFL

    def _settle(self) -> None:
        """Until the box's thread has done what there was for it, but not for long."""
        until = time.monotonic() + GRACE_S
        while not self._closed and (self._has_some() or not self._idle) and time.monotonic() < until:
            time.sleep(_LOOK_S)

    def _has_some(self) -> bool:
        # In this order: the thread is not idle before it takes them.
        try:
            return bool(self._near.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    # ---- the main thread ----

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if self._process == os.getpid() and number == signal.SIGTERM:
            self._settle()
        if callable(before):
            before(number, frame)
        elif number == signal.SIGTERM:
            _end_by(number)

    def close(self) -> None:
        """Handlers are as before, but where somebody has put another one since. Again: does nothing."""
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        if self._process == os.getpid():
            self._give_back()
            self._let_go()

    def _give_back(self) -> None:
        for number, before in self._before.items():
            # Bound methods are equal, not the same.
            if signal.getsignal(number) == self._handle:
                with contextlib.suppress(ValueError):
                    signal.signal(number, before)

    def _let_go(self) -> None:
        for other in list(_open):
            if other._wakeup_before == self._far.fileno():
                other._wakeup_before = self._wakeup_before
        try:
            found = signal.set_wakeup_fd(-1)
            # Or it is somebody else's by now.
            with contextlib.suppress(OSError):
                signal.set_wakeup_fd(self._wakeup_before if found == self._far.fileno() else found)
        except ValueError:
            # Not by the main thread. What the interpreter may write to stays open; nobody reads it.
            return
        for end in (self._near, self._far):
            end.close()


def _forked() -> None:
    """In the child: not a word to the parent's thread, and signals as they were."""
    # Of several boxes the last one has the handler, then the one before: as many turns as there are.
    for signals in list(_open) * len(_open):
        signals._give_back()
    for signals in list(_open):
        signals._let_go()


os.register_at_fork(after_in_child=_forked)


def _end_by(number: int) -> None:
    """As if no handler had been there. Python lets only the main thread say that, and that may be in C code."""
    libc: Any = ctypes.CDLL(None)
    set_handler: Callable[[int, Any], Any] = libc.signal
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    set_handler(number, None)
    os.kill(os.getpid(), number)
