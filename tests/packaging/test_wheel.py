"""The wheel: one for every CPython from 3.10, installs without a compiler, runs in a locked-down container."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command: object, env: dict[str, str] | None = None, timeout: float = 600) -> str:
    answer = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    if answer.returncode:
        pytest.fail(f"{' '.join(map(str, command))}: exit status {answer.returncode}\n{answer.stdout}", pytrace=False)
    return answer.stdout


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that every user can enter (pytest's own are closed to others)."""
    with tempfile.TemporaryDirectory(prefix="headrace-wheel-") as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        yield folder


@pytest.fixture(scope="module")
def wheel(place: Path) -> Path:
    if not shutil.which("cargo"):
        pytest.fail("cargo is not on PATH: run `make test`, which finds it")
    run(sys.executable, "-m", "maturin", "build", "--release", "--quiet", "--out", place / "dist")
    (built,) = (place / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def fresh_python(place: Path, wheel: Path) -> Path:
    """The Python of a new environment with nothing in it but the wheel and what it asks for."""
    run(sys.executable, "-m", "venv", "--without-pip", place / "env")
    python = place / "env/bin/python"
    settings = {
        key: value for key, value in os.environ.items() if not key.startswith(("VIRTUAL_ENV", "PYTHON", "CARGO"))
    }
    without_compiler = {**settings, "PATH": str(python.parent)}
    install = ["install", "--quiet", "--no-compile", "--only-binary", ":all:", wheel]
    run(sys.executable, "-m", "pip", "--python", python, *install, env=without_compiler)
    return python


def test_one_wheel_for_every_python(wheel: Path) -> None:
    assert "-cp310-abi3-" in wheel.name


def test_what_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        size = sum(item.file_size for item in archive.infolist())
    assert any(name.endswith("_native.abi3.so") for name in names)
    assert "headrace/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    strangers = [name for name in names if not name.startswith(("headrace/", "headrace-"))]
    assert not strangers
    assert size < 20_000_000


def test_it_needs_no_framework(fresh_python: Path) -> None:
    said = run(
        fresh_python,
        "-c",
        "import sys, headrace.volume, headrace.dataset, headrace.checkpoint, headrace.model, headrace.cli\n"
        "print(*sorted(set(sys.modules) & {'torch', 'pyarrow', 'tokenizers', 'safetensors'}), 'END')",
        env={"PATH": "/nowhere"},
    )
    assert said.split() == ["END"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make the locked-down container")
@pytest.mark.skipif(not shutil.which("unshare"), reason="unshare (util-linux) is not installed")
def test_it_runs_in_a_locked_down_container(fresh_python: Path, place: Path) -> None:
    probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"mount namespaces cannot be made here: {probe.stderr.strip()}")
    script = place / "inside.py"
    shutil.copy(HERE / "inside.py", script)
    visible = [sys.base_prefix, place]
    cage = ["unshare", "--mount", "--propagation", "private", sys.executable, HERE / "cage.py", *visible, "--"]
    said = run(*cage, fresh_python, script, timeout=120)
    assert said.rstrip().endswith("CAGE ok"), said
