"""A node is cut off in the middle of a save.

    python -m tests.torch.four_nodes.partition               # a rank's node
    python -m tests.torch.four_nodes.partition --victim 0    # the coordinator's

Four nodes of the rig, each with a rank, and two with targets, share no files. When one rank is about to write its part,
the link of its node is taken down. Every other rank has an error within the deadlines that it was given, which names
that rank; where it is the coordinator, with whom the store of the job is gone, that it cannot be reached. Nothing of
that step is visible. Then the link is up again, and a new job restores the step before, to the bit, and saves the one
that failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

from headrace.testing.nodes import Node, Nodes
from tests.torch.four_nodes.__main__ import RANKS, ROOT, serve, uri
from tests.torch.four_nodes.saving import DEADLINE_S, STALL_S
from tests.waiting import until

LIMIT_S = 240.0
ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
CREATE = "import sys; from headrace.volume import Volume; Volume.create(sys.argv[1:], stripe_bytes=65536).close()"


class Job:
    """A rank on each node, and what they said."""

    def __init__(self, nodes: list[Node], stack: ExitStack, port: int, *arguments: Any) -> None:
        self.said: list[dict[str, Any]] = []
        self.output: list[str] = []
        self.processes: list[subprocess.Popen[Any]] = []
        for rank, node in enumerate(nodes):
            job = {"RANK": rank, "WORLD_SIZE": len(nodes), "MASTER_ADDR": nodes[0].address, "MASTER_PORT": port}
            process = node.popen(
                [sys.executable, "-m", "tests.torch.four_nodes.saving", json.dumps(arguments)],
                env={**ENVIRONMENT, **{name: str(value) for name, value in job.items()}},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
            )
            self.processes.append(process)
            thread = threading.Thread(target=self._follow, args=(process,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(process.wait)
            stack.callback(process.kill)

    def _follow(self, process: subprocess.Popen[Any]) -> None:
        for line in process.stdout or ():
            self.output.append(line)
            if line.startswith("said "):
                self.said.append(json.loads(line.partition(" ")[2]))

    def all(self, key: str) -> dict[int, dict[str, Any]]:
        return {each["rank"]: each for each in list(self.said) if key in each}

    def wait_for(self, key: str, ranks: set[int]) -> dict[int, dict[str, Any]]:
        try:
            until(lambda: ranks <= self.all(key).keys(), f"{key!r} of ranks {sorted(ranks)}", LIMIT_S)
        except AssertionError:
            print("".join(self.output[-80:]))
            raise
        return self.all(key)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def run(victim: int) -> dict[str, Any]:
    with ExitStack() as stack:
        nodes = stack.enter_context(Nodes(2 + RANKS))
        for node in nodes[:2]:
            serve(node, stack)
        uris = [f"{uri(node)}&loss_timeout=60" for node in nodes[:2]]
        create = [sys.executable, "-c", CREATE, *uris]
        # The targets may not listen yet.
        until(lambda: nodes[2].run(create, env=ENVIRONMENT, cwd=ROOT, check=False).returncode == 0, "a volume", LIMIT_S)
        ranks = list(nodes[2:])
        job = Job(ranks, stack, 29500, uris, [1, 2, 3], victim, False)
        job.wait_for("writing", {victim})
        ranks[victim].set_link(up=False)
        cut = time.monotonic()
        survivors = set(range(RANKS)) - {victim}
        failed = job.wait_for("failed", survivors)
        seconds = time.monotonic() - cut
        # Whether the one that is cut off has noticed by itself is told, and is nobody's promise: it reaches nobody.
        alone = job.all("failed").get(victim)
        job.end()
        ranks[victim].set_link(up=True)
        again = Job(ranks, stack, 29501, uris, [3, 4], -1, True)
        restored = again.wait_for("restored", set(range(RANKS)))
        saved = again.wait_for("saved", set(range(RANKS)))
    texts = {rank: each["failed"] for rank, each in failed.items() if rank in survivors}
    for rank, text in texts.items():
        assert failed[rank]["step"] == 3 and failed[rank]["kind"] == "CheckpointFailed", failed
        assert f"rank {victim}" in text or (victim == 0 and "store" in text), text
        assert failed[rank]["seconds"] < 3 * DEADLINE_S + STALL_S, failed[rank]
    assert all(each["restored"] == 2 and each["exact"] for each in restored.values()), restored
    assert saved.keys() == set(range(RANKS))
    return {
        "victim": victim,
        "survivors_knew_after_s": {rank: round(failed[rank]["seconds"], 1) for rank in sorted(survivors)},
        "all_knew_after_s": round(seconds, 1),
        "said": texts[min(texts)],
        "the_victim": None if alone is None else alone["failed"],
        "restored": 2,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victim", type=int, choices=range(RANKS), default=2)
    print(json.dumps(run(parser.parse_args().victim), indent=1))


if __name__ == "__main__":
    main()
