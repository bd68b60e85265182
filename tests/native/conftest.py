"""Counts the Rust tests and says so at the end of the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

_COUNTS = pytest.StashKey[dict[str, int]]()


@pytest.fixture
def record_rust_tests(request: pytest.FixtureRequest) -> Iterator[dict[str, int]]:
    yield request.config.stash.setdefault(_COUNTS, {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash.get(_COUNTS, {})
    if counts:
        each = ", ".join(f"{crate} {count}" for crate, count in sorted(counts.items()))
        terminalreporter.write_line(f"Rust: {sum(counts.values())} tests passed inside the crate items ({each})")
