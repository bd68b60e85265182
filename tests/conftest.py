"""What holds for every test."""

from __future__ import annotations

import os
import resource
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A shell that starts something in the background makes it deaf to SIGINT, and so every process that this one starts.
# Then no test of Ctrl-C would mean anything; give the signal its default back.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# PyTorch's threads wait for each other by spinning: with one for each core, in each of several processes, most of the
# cores' time goes there. What is computed here is small.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No example has to be quick: the machine may be busy. (With CI set, Hypothesis has a profile of its own that says so.)
if settings.get_current_profile_name() == "default":
    settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("unhurried")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What it cost the machine, and how many Rust tests ran inside pytest's items (`tests/native`)."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    terminalreporter.write_line(f"{sum(each.ru_utime + each.ru_stime for each in used):.0f} core seconds")
    counts = {
        name.removeprefix("rust "): value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name.startswith("rust ")
    }
    if counts:
        each = ", ".join(f"{crate} {count}" for crate, count in sorted(counts.items()))
        terminalreporter.write_line(f"Rust: {sum(counts.values())} tests passed inside the crate items ({each})")


# ---- several tests at once (`-n 3`) ----------------------------------------------------------------------------------

#: These run long and wait much, so they begin first. Of each folder one test runs at a time: one guest, one cargo.
ONE_AT_A_TIME = ("tests/interop", "tests/native")


def _together(nodeid: str) -> str:
    """Tests with the same answer run in one process, in their order: a file's share what it made for them."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in ONE_AT_A_TIME if file.startswith(f"{folder}/")), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _together(nodeid)

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _together(item.nodeid) not in ONE_AT_A_TIME)
