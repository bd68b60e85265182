"""Nodes and a shaped link between them: targets, and what a bare socket carries over the same link in the same run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from headrace.testing.nodes import Node


def serve(node: Node, clients: Sequence[Node], stack: ExitStack, nqn: str, *namespaces: str) -> list[str]:
    """Start a target in this node, which `clients` may use; the addresses of its namespaces."""
    command = [sys.executable, "-m", "headrace.cli", "serve", *namespaces, "--nqn", nqn]
    command += ["--listen", f"{node.address}:4420"]
    for client in clients:
        command += ["--allow-host", client.hostnqn]
    lines = _started(node, command, stack, len(namespaces))
    if not all(line.startswith("READY ") for line in lines):
        raise RuntimeError(f"the target in {node.name} did not start")
    return [line.split()[1] for line in lines]


def bare_rate(server: Node, client: Node, seconds: float) -> float:
    """Bytes a second that one TCP connection between two of Python's sockets carries from `server` to `client`."""
    with ExitStack() as stack:
        (port,) = _started(server, [sys.executable, "-m", "benchmarks.link_socket", "send", server.address], stack, 1)
        command = [sys.executable, "-m", "benchmarks.link_socket", "receive", server.address, port, str(seconds)]
        answer = json.loads(client.run(command, timeout_s=60 + 2 * seconds).stdout)
    return float(answer["bytes_per_s"])


def _started(node: Node, command: list[str], stack: ExitStack, lines: int) -> list[str]:
    """A process that lives as long as the stack; the first lines it prints."""
    process = stack.enter_context(
        node.popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8")
    )
    stack.callback(process.terminate)
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(lines)]
