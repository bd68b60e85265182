"""The Rust tests, one pytest item a crate, so that one summary covers both languages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NATIVE = ROOT / "native"
#: The glue crate is an extension module: it has no tests of its own and does not link without Python.
CRATES = sorted(path.parent.name for path in NATIVE.glob("*/Cargo.toml") if path.parent.name != "py")
#: Crates with an ignored test that measures and is never a gate: it runs by hand.
WITH_MEASUREMENTS = {"interop-tests"}
RESULT = re.compile(r"^test result: (\w+)\. (\d+) passed; (\d+) failed; (\d+) ignored", re.M)


def test_every_crate_is_listed() -> None:
    assert {"wire", "media", "transfer", "host", "target"} <= set(CRATES)


def test_no_example_in_a_comment_goes_untested() -> None:
    """Where crates say that there are none, cargo does not look for them."""
    for crate in CRATES:
        if "doctest = false" in (NATIVE / crate / "Cargo.toml").read_text():
            for path in (NATIVE / crate / "src").rglob("*.rs"):
                fences = re.findall(r"^\s*//[/!]\s*```(.*)", path.read_text(), re.M)
                assert set(fences[::2]) <= {"text"}, path


@pytest.mark.slow
@pytest.mark.timeout(1500)  # The first run compiles.
@pytest.mark.parametrize("crate", CRATES)
def test_crate(crate: str, record_property: Callable[[str, object], None]) -> None:
    cargo = shutil.which("cargo")
    if cargo is None:
        pytest.fail("cargo is not on PATH: run `make test`, which finds it")
    answer = subprocess.run(
        [cargo, "test", "--quiet", "-p", f"headrace-{crate}"],
        cwd=ROOT,
        env={**os.environ, "RUST_BACKTRACE": "1", "CARGO_TERM_COLOR": "never"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    results = RESULT.findall(answer.stdout)
    passed = sum(int(result[1]) for result in results)
    record_property(f"rust {crate}", passed)  # Added up in `tests/conftest.py`.
    if answer.returncode:
        pytest.fail(f"cargo test -p headrace-{crate}\n{answer.stdout}\n{answer.stderr}", pytrace=False)
    assert passed > 0, f"crate {crate} ran no test"
    ignored = sum(int(result[3]) for result in results)
    assert ignored == 0 or crate in WITH_MEASUREMENTS, f"crate {crate} ignores {ignored} tests"
