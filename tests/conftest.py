"""What holds for every test."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Generator
from multiprocessing import forkserver
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
_BEGUN = pytest.StashKey[float]()
CORE_SECONDS = "core seconds"


def _spent() -> float:
    """Core seconds of this process and of all that it, or its fork server, has waited for."""
    spent = sum(os.times()[:4])
    if server := getattr(forkserver._forkserver, "_forkserver_pid", None):
        with contextlib.suppress(OSError), open(f"/proc/{server}/stat") as file:  # noqa: PTH123
            spent += sum(map(int, file.read().rpartition(")")[2].split()[11:15])) / os.sysconf("SC_CLK_TCK")
    return spent


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_BEGUN] = _spent()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Each phase says what it cost (a thread's work, or a child's that others wait for, is the next one's)."""
    report = yield
    report.user_properties.append((CORE_SECONDS, _spent() - item.stash[_BEGUN]))
    item.stash[_BEGUN] = _spent()
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What it cost the machine, which files most of it, and how many Rust tests ran inside pytest's items
    (`tests/native`)."""
    spent = [after - before for before, after in zip(_CORES, _cores(), strict=True)]
    busy = spent[0] / (sum(spent) or 1)
    terminalreporter.write_line(f"{spent[0]:.0f} core seconds, whoever took them: the machine was busy to {busy:.0%}")
    noted = [
        (report.nodeid.partition("::")[0], name, value)
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
    ]
    files: dict[str, float] = {}
    for file, name, value in noted:
        if name == CORE_SECONDS:
            files[file] = files.get(file, 0.0) + value
    dearest = [file for file in sorted(files, key=files.__getitem__, reverse=True) if files[file] >= 10]
    if dearest:
        terminalreporter.write_line(", ".join(f"{file} {files[file]:.0f}" for file in dearest[:20]))
    counts = {name.removeprefix("rust "): value for _, name, value in noted if name.startswith("rust ")}
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
