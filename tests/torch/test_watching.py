"""A watched job of two real ranks over gloo, under DDP: a slow rank, a slow exchange, a save that one rank makes.

And a collective that times out: both ranks dump, and PyTorch's Flight Recorder lies beside the dumps.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.measure.blackbox import dump_name, read_dump
from headrace.measure.blackbox.evidence import gather
from headrace.measure.blackbox.flight_recorder import lacking
from headrace.measure.watch.causes import STORAGE
from headrace.measure.watch.join import Attribution, attribute
from headrace.measure.watch.record import files_of
from headrace.measure.watch.verdict import sentence
from tests.torch.crew import Crew, Rank, run
from tests.waiting import until

SLOW_S = 0.06
STEPS = 12


def train(rank: Rank, folder: Path) -> None:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from headrace.measure import Watch
    from headrace.torch.watching import see_collectives

    def slowly(state: Any, bucket: Any) -> Any:
        time.sleep(SLOW_S)
        return allreduce_hook(state, bucket)

    for name in ("slow rank", "slow exchange", "slow save"):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        with Watch(folder / name, rank=rank.rank, world=rank.world) as watch:
            see_collectives(watch, model, slowly if name == "slow exchange" else allreduce_hook)
            for batch in watch.loader([torch.randn(8, 64)] * STEPS):
                with watch.compute():
                    if name == "slow rank" and rank.rank == 1:
                        time.sleep(SLOW_S)
                    model(batch).sum().backward()
                if name == "slow save" and rank.rank == 0:
                    with watch.checkpoint():
                        time.sleep(SLOW_S)
    with pytest.raises(UsageError, match="DistributedDataParallel"):
        see_collectives(watch, torch.nn.Linear(1, 1))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    run(2, train, folder)
    return folder


def found(job: Path, name: str) -> Attribution:
    made = attribute(files_of([job / name]))
    assert made.steps == STEPS and len(made.ranks) == 2
    return made


def test_a_slow_rank_is_named_and_others_wait_for_it_in_their_exchange(job: Path) -> None:
    made = found(job, "slow rank")
    slow_gpu_s = 2 * STEPS * SLOW_S
    assert made.spent_gpu_s["straggler"] > 0.7 * slow_gpu_s
    assert made.ranks[1].slowest > made.ranks[0].slowest
    # What rank 0 waited in its own view.
    assert made.ranks[0].spent["collective"] > 0.7 * STEPS * SLOW_S
    assert sum(made.spent_gpu_s[cause] for cause in STORAGE) < 0.1 * slow_gpu_s
    assert sentence(made).startswith("Storage is not your problem: ")


def test_a_slow_exchange_is_told_from_computing(job: Path) -> None:
    made = found(job, "slow exchange")
    assert made.spent_gpu_s["collective"] > 0.7 * 2 * STEPS * SLOW_S
    assert sum(made.spent_gpu_s[cause] for cause in STORAGE) < 0.1 * made.spent_gpu_s["collective"]
    assert sentence(made).startswith("Storage is not your problem: ")


def test_what_one_rank_saves_all_pay_for(job: Path) -> None:
    made = found(job, "slow save")
    # But for the last one, behind which rank 1 has nothing to wait for.
    assert made.spent_gpu_s["checkpoint"] > 0.7 * 2 * STEPS * SLOW_S
    assert made.ranks[0].slowest > made.ranks[1].slowest
    assert sentence(made).startswith("Checkpoints that training waited for are your problem")


def time_out(rank: Rank, folder: Path) -> str:
    import torch
    import torch.distributed as dist

    from headrace.measure.blackbox import BlackBox
    from headrace.measure.watch.watch import Watch

    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))
    with Watch(device=None, rank=rank.rank, world=2) as watch, BlackBox(folder, watch=watch) as box:
        # Both have come to one, so that both are known to be of the group; and to it at the same time.
        dist.barrier()
        dist.all_reduce(torch.ones(1), group=group)
        watch.begin_step(5)
        if rank.rank == 0:
            with suppress(RuntimeError), watch.collective():
                dist.all_reduce(torch.ones(1), group=group)
            rank.say("timed out")
        else:
            with watch.fetch():
                until(box.path.exists, "rank 0 has called")
            rank.say("called")
        rank.hear()
        return os.environ.get("TORCH_FR_DUMP_TEMP_FILE", "")


def test_ranks_of_a_collective_that_times_out_dump_with_the_flight_recorder(tmp_path: Path) -> None:
    crew = Crew(2, time_out, tmp_path)
    crew.hear(0, "timed out")
    crew.hear(1, "called")
    crew.say(0, "end")
    crew.say(1, "end")
    assert crew.join() == [str(tmp_path / "flight-recorder-")] * 2
    first, second = (read_dump(tmp_path / dump_name(rank)) for rank in range(2))
    assert first.why == "collective" and first.under_way is not None and first.under_way.cause == "collective"
    assert second.why == "request" and second.detail.startswith("rank 0: collective: ")
    assert second.under_way is not None and (second.under_way.step, second.under_way.cause) == (5, "fetch")
    import torch._C._distributed_c10d as c10d

    if not hasattr(c10d, "_dump_fr_trace"):
        pytest.skip("this PyTorch has no Flight Recorder of gloo")
    evidence = gather([tmp_path], [tmp_path])
    assert [flight.rank for flight in evidence.flights] == [0, 1]
    assert (0,) in {found.joined for found in lacking(list(evidence.flights), 2)}
