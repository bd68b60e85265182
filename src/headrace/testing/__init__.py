"""Public fakes and helpers for tests: what fails on demand, so that code above it can be shown to cope."""

from headrace.testing.crash import Crash, CrashDevice, Timeline
from headrace.testing.devices import MemoryDevice
from headrace.testing.hosts import HostDevice
from headrace.testing.namespace import Accident, Command, Ghost, Overwrite, Quirks, SharedNamespace

__all__ = [
    "Accident",
    "Command",
    "Crash",
    "CrashDevice",
    "Ghost",
    "HostDevice",
    "MemoryDevice",
    "Overwrite",
    "Quirks",
    "SharedNamespace",
    "Timeline",
]
