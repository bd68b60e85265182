"""Setting up from nothing: what is missing is said in words; what has not changed is not done again."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def ready() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ready", ROOT / "scripts/ready.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def somewhere_else(monkeypatch: pytest.MonkeyPatch, ready: ModuleType, home: Path, path: Path) -> None:
    """A machine whose homes and PATH hold nothing but what the test puts there."""
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.delenv("RUSTUP_HOME", raising=False)
    monkeypatch.setattr(ready.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir=str(home)))


def test_no_c_compiler(ready: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(SystemExit):
        ready.check_machine()
    assert "no C compiler" in capsys.readouterr().err


def test_no_rust(
    ready: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    somewhere_else(monkeypatch, ready, tmp_path / "home", tmp_path / "bin")
    with pytest.raises(SystemExit):
        ready.cargo_environment()
    said = capsys.readouterr().err
    assert "cargo (Rust) was not found" in said
    assert "rustup.rs" in said


def test_rust_too_old(
    ready: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program(tmp_path / "bin", "cargo", "echo cargo 1.70.0")
    somewhere_else(monkeypatch, ready, tmp_path / "home", tmp_path / "bin")
    with pytest.raises(SystemExit):
        ready.cargo_environment()
    assert "1.70 is too old" in capsys.readouterr().err


def test_rustup_is_found_where_home_has_moved(
    ready: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    (old / ".rustup").mkdir(parents=True)
    cargo = program(old / ".cargo/bin", "cargo", f'[ "$RUSTUP_HOME" = {old}/.rustup ] && echo cargo 1.95.0')
    somewhere_else(monkeypatch, ready, tmp_path / "new", cargo.parent)
    environment = ready.cargo_environment()
    assert environment["RUSTUP_HOME"] == str(old / ".rustup")
    assert environment["PATH"].split(os.pathsep)[0] == str(cargo.parent)


def test_python_too_old(ready: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ready, "MINIMUM_PYTHON", (99, 0))
    with pytest.raises(SystemExit):
        ready.check_machine()
    assert "Python 3.10 or newer is needed" in capsys.readouterr().err


def test_packages_are_read_from_the_project(ready: ModuleType) -> None:
    names = {name.split(">")[0] for name in ready.development_packages()}
    assert {"numpy", "typer", "torch", "maturin", "pytest", "mypy", "ruff"} <= names


def test_a_failing_phase_shows_what_the_tool_said(
    ready: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(ready, "LOG", tmp_path / "ready.log")
    monkeypatch.setattr(ready, "ROOT", tmp_path)
    with pytest.raises(SystemExit):
        ready.phase("a phase", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"])
    assert "the reason" in capsys.readouterr().err
    assert "the reason" in (tmp_path / "ready.log").read_text()


def test_a_stamp_holds_until_something_changes(
    ready: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ready, "ROOT", tmp_path)
    monkeypatch.setattr(ready, "VENV", tmp_path)
    source = tmp_path / "source"
    source.write_text("one")
    assert not ready.done("part", ready.digest(source))
    ready.mark("part", ready.digest(source))
    assert ready.done("part", ready.digest(source))
    source.write_text("two")
    assert not ready.done("part", ready.digest(source))


def test_an_unknown_check_is_named() -> None:
    answer = subprocess.run(
        [sys.executable, ROOT / "scripts/check.py", "spelling"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 2
    assert "no check named spelling" in answer.stderr
