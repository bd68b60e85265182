"""Real loops with one fault at a time: `explain` names the right one, and never storage where it was not.

All of them, many times: `python -m tests.measure.faults`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.measure.blackbox.tell import sentence
from tests.measure.faults import FAULTS, Fault, Rig, rigged, run, wrong

#: Others are of the long grid, or are told apart on dumps made by hand (`test_explain.py`).
HERE = (
    "a frozen path",
    "a slow target",
    "slow decoding",
    "a slow collective",
    "a save to a frozen target",
    "a lack of CPUs",
    "a frozen target while nobody waits",
    "a frozen target and a lack of CPUs",
)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with rigged() as rig:
        yield rig


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in HERE], ids=lambda fault: fault.name)
def test_the_fault_that_was_put_in_is_named(rig: Rig, fault: Fault, tmp_path: Path) -> None:
    found = run(rig, fault, tmp_path)
    assert not wrong(rig, fault, found), sentence(found)
