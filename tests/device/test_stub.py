"""`_native.pyi` says what the native module has: the same names, the same parameters."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import headrace
from headrace import _native


def _stub() -> dict[str, list[str]]:
    """Name (`function` or `Class.method`) -> parameters; getters have none."""
    tree = ast.parse((Path(headrace.__file__).parent / "_native.pyi").read_text())
    found: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = _parameters(node)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = []
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    found[f"{node.name}.{method.name}"] = _parameters(method)
    return found


def _parameters(node: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs) if argument.arg != "self"]


def test_stub_and_module_agree() -> None:
    stub = _stub()
    module: dict[str, list[str] | None] = {}
    for name, value in vars(_native).items():
        if name.startswith("__"):
            continue
        if isinstance(value, type):
            module[name] = []
            for method, member in vars(value).items():
                if method == "__new__" and value.__text_signature__:
                    module[f"{name}.__init__"] = list(inspect.signature(value).parameters)
                elif not method.startswith("__"):
                    callable_ = callable(member)
                    parameters = list(inspect.signature(member).parameters) if callable_ else []
                    module[f"{name}.{method}"] = [p for p in parameters if p != "self"]
        elif callable(value):
            module[name] = list(inspect.signature(value).parameters)
    assert module == stub
