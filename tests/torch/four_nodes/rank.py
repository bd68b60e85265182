"""What torchrun starts on each node: draws batches, trains on them, and says what it has seen.

It opens the volume by its address alone: there is no file that two nodes see. Each step is an all-reduce of gradients,
as in training, so the ranks go in step, and one that hangs would hold up all.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from headrace.metrics import NodeMetrics
from headrace.torch import TokenLoader
from headrace.volume import Volume


def main() -> None:
    uris, steps, pause_s = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = torch.nn.Embedding(512, 4)
    seen, waits = hashlib.sha256(), []
    with (
        Volume.open(uris) as volume,
        TokenLoader(
            volume, "corpus", sequence_length=32, global_batch=16, seed=7, prefetch=2, stall_timeout_s=60
        ) as loader,
        NodeMetrics(loader) as metrics,
    ):
        for step in range(steps):
            batch = next(loader)
            seen.update(batch.numpy().tobytes())
            waits.append(loader.metrics().last_wait_s)
            model(batch).square().mean().backward()
            assert model.weight.grad is not None
            dist.all_reduce(model.weight.grad)
            with torch.no_grad():
                model.weight -= 0.1 * model.weight.grad / dist.get_world_size()
            model.weight.grad = None
            if rank == 0 and step % 10 == 0:
                print(f"step {step}", flush=True)
            time.sleep(pause_s)
        node = metrics.node()
        losses = sum(path["losses"] for path in node["paths"])
        weights = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
        print(
            "result",
            json.dumps(
                {
                    "rank": rank,
                    "host": os.uname().nodename,
                    "seen": seen.hexdigest(),
                    "weights": weights,
                    "consumed": loader.consumed,
                    "longest_wait_s": max(waits),
                    "losses": losses,
                    "ranks_of_the_node": len(node["ranks"]),
                }
            ),
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
