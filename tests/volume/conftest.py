from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from headrace.device import crc32c, reference
from headrace.volume.writing import heartbeat, past
from tests.volume.fenced import World


@pytest.fixture(autouse=True)
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Sessions that wait until late writes have ended (`past.wait_until_quiet`) do so by a clock of their own; how long
    they slept."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(past, "time", clock)
    return slept


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native CRC in the reference engine, for tests of many small reads (`test_reference.py` compares the two)."""

    def rows(data: reference.U8, seeds: reference.U32) -> reference.U32:
        return np.array([crc32c(row, int(seed)) for row, seed in zip(data, seeds, strict=True)], np.uint32)

    monkeypatch.setattr(reference, "crc32c_rows", rows)


@pytest.fixture
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes over heartbeats: whoever held the volume is dead, and no second taker comes."""
    monkeypatch.setattr(heartbeat, "SETTLE_S", 0.0)
    monkeypatch.setattr(heartbeat, "wait_for_silence", lambda block, seen, missed: True)


@pytest.fixture
def world() -> World:
    made = World()
    made.create()
    return made
