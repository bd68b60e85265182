"""Rules of the house that import-linter cannot see: the compiled module, lazy imports, sizes of files, crates."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src/headrace"
MODULES = sorted(SOURCE.rglob("*.py"))
LONGEST_FILE_LINES = 700
HEAVY = ("torch", "pyarrow", "tokenizers", "safetensors")


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_only_two_rooms_touch_the_native_module() -> None:
    users = {room(path) for path in MODULES if "headrace._native" in imports(path)}
    assert users <= {"device", "fabric"}
    assert "device" in users


def test_only_the_framework_edge_imports_torch() -> None:
    users = {room(path) for path in MODULES if any(name.split(".")[0] == "torch" for name in imports(path))}
    assert users <= {"torch", "demo"}


@pytest.mark.parametrize("package", HEAVY)
def test_heavy_packages_are_imported_where_they_are_used(package: str) -> None:
    """At the head of a file only in the rooms that are about that package."""
    users = {
        room(path) for path in MODULES if any(n.split(".")[0] == package for n in imports(path, top_level_only=True))
    }
    assert users <= {"torch", "demo"}


def test_the_command_line_starts_light() -> None:
    code = "import sys, headrace.cli; print(*sorted(set(sys.modules) & {'torch', 'pyarrow', 'tokenizers', 'numpy'}))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == ""


def test_files_hold_one_thing() -> None:
    sources = [*MODULES, *(ROOT / "native").glob("*/src/**/*.rs")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources}
    long = {name: count for name, count in lines.items() if count > LONGEST_FILE_LINES}
    assert not long


def test_host_and_target_never_depend_on_each_other() -> None:
    for crate, never in (
        ("host", ("target", "media")),
        ("target", ("host",)),
        ("wire", ("host", "target", "media", "transfer")),
    ):
        manifest = (ROOT / f"native/{crate}/Cargo.toml").read_text()
        assert not [other for other in never if f"headrace-{other}" in manifest.partition("[dependencies]")[2]]
