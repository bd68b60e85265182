"""Public fakes and helpers for tests: what fails on demand, so that code above it can be shown to cope."""

from headrace.testing.crash import Crash, CrashDevice, Timeline
from headrace.testing.devices import MemoryDevice

__all__ = ["Crash", "CrashDevice", "MemoryDevice", "Timeline"]
