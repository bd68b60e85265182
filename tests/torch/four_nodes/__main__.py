"""Four nodes of the rig, `torchrun --nnodes=4`, two targets on nodes of their own.

    python -m tests.torch.four_nodes                 # one link cut, one target stopped, under way
    python -m tests.torch.four_nodes --calm          # nothing happens: the same samples

The volume is striped over both targets, so every batch needs both. At a third of the steps the link of the first target
is taken down for some seconds; at two thirds the second target is stopped (SIGSTOP) for as long. Then: every rank has
seen the samples that the order says, each once, in their order; all have the same weights, which are those of a calm
run; each has waited, and has lost associations and got them back.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from headrace.device import NativeDevice
from headrace.testing.nodes import Node, Nodes
from headrace.torch import TokenLoader
from headrace.volume import Volume
from tests.dataset.corpora import ingest_texts

NQN = "nqn.2026-01.io.headrace:four"
PORT = 4420
RANKS = 4
STEPS = 120
PAUSE_S = 0.05
ACCIDENT_S = 8.0
LIMIT_S = 240.0
ROOT = Path(__file__).resolve().parents[3]


def serve(node: Node, stack: ExitStack) -> subprocess.Popen[Any]:
    command = [sys.executable, "-m", "headrace.cli", "serve", "mem:32MiB", "--nqn", f"{NQN}-{node.number}"]
    command += ["--listen", f"{node.address}:{PORT}", "--allow-host", "any"]
    process = node.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def uri(node: Node) -> str:
    return f"nvme+tcp://{node.address}:{PORT}/{NQN}-{node.number}?nsid=1&keepalive=2"


class Ranks:
    """torchrun on four nodes."""

    def __init__(self, nodes: list[Node], uris: list[str], stack: ExitStack) -> None:
        self.results: list[dict[str, Any]] = []
        self.step = -1
        self.output: list[str] = []
        self.processes = []
        self._threads = []
        for number, node in enumerate(nodes):
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=4", f"--node-rank={number}",
                "--nproc-per-node=1", f"--master-addr={nodes[0].address}", "--master-port=29500",
                "-m", "tests.torch.four_nodes.rank", json.dumps(uris), str(STEPS), str(PAUSE_S),
            ]  # fmt: skip
            environment = {
                "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            process = node.popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            self.processes.append(process)
            thread = threading.Thread(target=self._follow, args=(process,))
            thread.start()
            self._threads.append(thread)

    def _follow(self, process: subprocess.Popen[Any]) -> None:
        for line in process.stdout or ():
            self.output.append(line)
            if found := re.search(r"step (\d+)$", line):
                self.step = int(found[1])
            if "result " in line:
                self.results.append(json.loads(line.partition("result ")[2]))

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            failed = [process.returncode for process in self.processes if process.poll() not in (None, 0)]
            if failed or time.monotonic() > end:
                raise SystemExit(f"{what}: not in time, or a rank failed: {failed}\n{''.join(self.output[-60:])}")
            time.sleep(0.05)

    def end(self) -> list[dict[str, Any]]:
        self.until("all ranks end", lambda: all(process.poll() == 0 for process in self.processes))
        for thread in self._threads:
            thread.join()
        return sorted(self.results, key=lambda each: int(each["rank"]))


def inside(process: subprocess.Popen[Any], name: str) -> int:
    """The process in the node that this one stands for: signals to stop do not pass."""
    children, found = [process.pid], 0
    while children:
        pid = children.pop()
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        if name in text and "node_inside" not in text:
            found = pid
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    if not found:
        raise SystemExit(f"no process {name} was found in the node")
    return found


def expected(uris: list[str], rank: int, stack: ExitStack) -> str:
    seen = hashlib.sha256()
    with (
        Volume.open(uris) as volume,
        TokenLoader(volume, "corpus", sequence_length=32, global_batch=16, seed=7, rank=rank, world=RANKS) as loader,
    ):
        for _ in range(STEPS):
            seen.update(next(loader).numpy().tobytes())
    return seen.hexdigest()


def prepare(uris: list[str]) -> None:
    """Run in a node: the corpus into the volume, and what each rank should see."""
    with tempfile.TemporaryDirectory() as folder:
        with Volume.create(uris, stripe_bytes=64 << 10) as volume:
            ingest_texts(volume, Path(folder), count=200)
            assert all(isinstance(device, NativeDevice) for device in volume.devices)
        with ExitStack() as stack:
            print("expected", json.dumps([expected(uris, rank, stack) for rank in range(RANKS)]), flush=True)


def run(calm: bool) -> dict[str, Any]:
    with ExitStack() as stack:
        nodes = stack.enter_context(Nodes(2 + RANKS))
        targets = [serve(node, stack) for node in nodes[:2]]
        uris = [uri(node) for node in nodes[:2]]
        environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        command = [sys.executable, "-m", "tests.torch.four_nodes", "--prepare", json.dumps(uris)]
        answer = nodes[2].run(command, env=environment, cwd=ROOT, timeout_s=LIMIT_S, check=False)
        if answer.returncode:
            raise SystemExit(f"the volume could not be made: {answer.stdout}{answer.stderr}")
        wanted = json.loads(answer.stdout.partition("expected ")[2])
        begun = time.monotonic()
        ranks = Ranks(list(nodes[2:]), uris, stack)
        if not calm:
            ranks.until("a third", lambda: ranks.step >= STEPS // 3)
            nodes[0].set_link(up=False)
            time.sleep(ACCIDENT_S)
            nodes[0].set_link(up=True)
            ranks.until("two thirds", lambda: ranks.step >= 2 * STEPS // 3)
            stopped = inside(targets[1], "headrace.cli")
            os.kill(stopped, signal.SIGSTOP)
            time.sleep(ACCIDENT_S)
            os.kill(stopped, signal.SIGCONT)
        results = ranks.end()
        seconds = time.monotonic() - begun
    assert [each["rank"] for each in results] == list(range(RANKS)), results
    assert len({each["host"] for each in results}) == RANKS, "each on a node of its own"
    assert [each["seen"] for each in results] == wanted, "not the samples that the order says"
    assert len({each["weights"] for each in results}) == 1, "ranks went apart"
    assert all(each["consumed"] == 16 * STEPS and each["ranks_of_the_node"] == 1 for each in results)
    if not calm:
        assert all(each["longest_wait_s"] > 1 and each["losses"] >= 2 for each in results), results
    return {
        "calm": calm,
        "steps": STEPS,
        "seconds": round(seconds, 1),
        "longest_wait_s": [round(each["longest_wait_s"], 2) for each in results],
        "losses": [each["losses"] for each in results],
        "weights": results[0]["weights"][:16],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calm", action="store_true", help="without accidents")
    parser.add_argument("--prepare", metavar="URIS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare:
        prepare(json.loads(options.prepare))
        return
    if options.calm:
        print(json.dumps(run(calm=True)))
        return
    calm, rough = run(calm=True), run(calm=False)
    print(json.dumps(calm))
    print(json.dumps(rough))
    assert calm["weights"] == rough["weights"], "accidents changed what was learnt"


if __name__ == "__main__":
    main()
