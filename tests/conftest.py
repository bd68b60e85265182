"""What holds for every test."""

from __future__ import annotations

import signal

# A shell that starts something in the background makes it deaf to SIGINT, and so every process that this one starts.
# Then no test of Ctrl-C would mean anything; give the signal its default back.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
