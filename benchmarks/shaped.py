"""Nodes and a shaped link between them: targets, and programs that answer jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from headrace.testing.nodes import Node


def serve(node: Node, clients: Sequence[Node], stack: ExitStack, nqn: str, *namespaces: str) -> list[str]:
    """Start a target in this node, which `clients` may use; the addresses of its namespaces."""
    return serve_each([node], clients, stack, nqn, *namespaces)[0]


def serve_each(
    nodes: Sequence[Node], clients: Sequence[Node], stack: ExitStack, nqn: str, *namespaces: str
) -> list[list[str]]:
    """The same in each of these nodes, all at once."""
    started = [_begin_serving(node, clients, stack, nqn, namespaces) for node in nodes]
    addresses = []
    for node, process in zip(nodes, started, strict=True):
        lines = [_line(process) for _ in namespaces]
        if not all(line.startswith("READY ") for line in lines):
            raise RuntimeError(f"the target in {node.name} did not start")
        addresses.append([line.split()[1] for line in lines])
    return addresses


def _begin_serving(
    node: Node, clients: Sequence[Node], stack: ExitStack, nqn: str, namespaces: Sequence[str]
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headrace.cli", "serve", *namespaces, "--nqn", nqn]
    command += ["--listen", f"{node.address}:4420"]
    for client in clients:
        command += ["--allow-host", client.hostnqn]
    return _start(node, command, stack, stderr=subprocess.DEVNULL)


def serve_bare(node: Node, stack: ExitStack) -> list[str]:
    """Start `benchmarks.link_socket` in this node; its address and port."""
    process = _start(node, [sys.executable, "-m", "benchmarks.link_socket", node.address], stack)
    return [node.address, _line(process)]


class Client:
    """A program in a node that answers one JSON line with another."""

    def __init__(self, node: Node, module: str, arguments: Sequence[str], stack: ExitStack) -> None:
        self._name = module
        self._process = _start(node, [sys.executable, "-m", module, *arguments], stack)

    def ask(self, **job: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = _line(self._process)
        if not line:
            raise RuntimeError(f"{self._name} ended (see standard error)")
        return json.loads(line)


def _start(node: Node, command: list[str], stack: ExitStack, **options: Any) -> subprocess.Popen[str]:
    """A process that lives as long as the stack."""
    process: subprocess.Popen[str] = stack.enter_context(
        node.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", **options)
    )
    stack.callback(process.terminate)
    return process


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
