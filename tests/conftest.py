"""What holds for every test."""

from __future__ import annotations

import os
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


def _cores() -> tuple[float, float]:
    """Seconds of this machine's cores, busy and idle."""
    with open("/proc/stat") as file:  # noqa: PTH123
        spent = [int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in file.readline().split()[1:]]
    return sum(spent[:3]) + sum(spent[5:7]), sum(spent[3:5])


_CORES = _cores()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What it cost the machine, and how many Rust tests ran inside pytest's items (`tests/native`)."""
    spent = [after - before for before, after in zip(_CORES, _cores(), strict=True)]
    busy = spent[0] / (sum(spent) or 1)
    terminalreporter.write_line(f"{spent[0]:.0f} core seconds, whoever took them: the machine was busy to {busy:.0%}")
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
