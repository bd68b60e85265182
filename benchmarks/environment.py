"""What a figure was measured on; a figure without it means nothing."""

from __future__ import annotations

import os
import platform
from functools import cache
from importlib import metadata
from pathlib import Path

from benchmarks.cores import layout


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version() -> str:
    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:
        return "source tree"


@cache
def environment() -> dict[str, object]:
    """CPU, cores usable by this process and who was on which, memory, kernel, Python and headrace versions."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": len(layout().usable),
        "pinning": {"client": layout().client, "server": layout().server, "client's second thread": layout().second},
        "memory_gib": round(memory_bytes / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "headrace": _version(),
    }
