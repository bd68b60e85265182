"""A few seconds of coverage-guided fuzzing of every receive path, over the kept corpus and beyond it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
#: For each target. Long runs are `make fuzz`.
SECONDS = 3


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "scripts/fuzz.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FUZZ = load()


@pytest.fixture(scope="module")
def programs() -> Path:
    try:
        return FUZZ.build(quick=True)
    except FUZZ.CannotFuzz as error:
        pytest.skip(f"the fuzzers do not build here: {str(error)[-2000:]}")


def test_every_target_is_listed() -> None:
    assert {path.stem for path in (ROOT / "native/fuzz/fuzz_targets").glob("*.rs")} == set(FUZZ.TARGETS)
    for name in FUZZ.TARGETS:
        assert FUZZ.kept(name), f"{name} has no corpus"


def test_the_kept_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in FUZZ.KEPT.rglob("*") if path.is_file()) < 1 << 20


@pytest.mark.slow
@pytest.mark.timeout(900)  # The first run compiles.
@pytest.mark.parametrize("name", FUZZ.TARGETS)
def test_nothing_hurts(name: str, programs: Path) -> None:
    status, said = FUZZ.explore(programs / name, SECONDS, [])
    assert "INFO: Loaded 1 modules" in said and "stat::number_of_executed_units" in said, said[-3000:]
    if status:
        pytest.fail(f"an invariant of {name} does not hold:\n{said[-6000:]}", pytrace=False)
