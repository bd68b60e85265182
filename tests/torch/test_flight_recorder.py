"""Dumps that PyTorch's own Flight Recorder writes are read without unpickling: who had not come to a collective."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from headrace.measure.blackbox.flight_recorder import lacking, parse_flight_recorder
from headrace.measure.blackbox.plain import load_plain

c10d = pytest.importorskip("torch._C._distributed_c10d")
if not all(hasattr(c10d, name) for name in ("_dump_fr_trace", "_reset_fr_trace", "ProcessGroupGloo")):
    pytest.skip("this PyTorch has no Flight Recorder of gloo that can be begun anew", allow_module_level=True)


def test_who_had_not_come_is_seen_in_dumps_of_pytorch() -> None:
    store = c10d.HashStore()
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(lambda rank: c10d.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60)), range(2)))
    c10d._reset_fr_trace()
    tensors = [torch.ones(4) for _ in groups]
    for work in [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]:
        work.wait()
    dumps = {1: (c10d._dump_fr_trace(), c10d._dump_fr_trace_json())}
    waits = groups[0].allreduce([tensors[0]])
    dumps[0] = (c10d._dump_fr_trace(), c10d._dump_fr_trace_json())
    groups[1].allreduce([tensors[1]]).wait()
    waits.wait()

    assert load_plain(dumps[0][0]) == pickle.loads(dumps[0][0])
    for form in (0, 1):
        records = [parse_flight_recorder(dumps[rank][form], Path(f"nccl_trace_rank_{rank}")) for rank in (0, 1)]
        (found,) = lacking(records, 2)
        assert (found.name, found.joined, found.missing) == ("all_reduce", (0,), (1,)), form
        assert found.sequence == 2
        ours = records[0].collectives[-1]
        assert found.since_ns == ours.created_ns > 10**18
