"""Processes that are stopped for a while, as the drill stops them."""

from headrace.accidents.stopping import stop, stopped

__all__ = ["stop", "stopped"]
