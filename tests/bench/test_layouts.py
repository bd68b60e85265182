"""Layouts of checkpoints against the sizes that MLPerf Storage publishes for them."""

from __future__ import annotations

import pytest

from headrace.bench.layouts import MODELS, files_of, layout, model_of, scale_for, total_bytes
from headrace.errors import UsageError
from headrace.units import GIB

#: Parameters, total GiB, files, GiB of the optimizer of a rank, most GiB of weights of a rank; from its rules and runs.
PUBLISHED = {
    "8b": (8.030e9, 104.7, 16, 11.218, 1.870),
    "70b": (6.988e10, 911.2, 128, 12.204, 2.034),
    "405b": (4.0585e11, 5292.2, 1544, 8.860, 3.458),
    "1t": (1.183e12, 15426.6, 2072, 12.913, 5.053),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_that_are_published(name: str) -> None:
    model = model_of(name)
    parameters, total, files, optimizer, weights = PUBLISHED[name]
    assert model.parameters == pytest.approx(parameters, rel=5e-4)
    ranks = [files_of(model, rank) for rank in range(model.ranks)]
    assert total_bytes(ranks) / GIB == pytest.approx(total, rel=1e-4)
    assert sum(map(len, ranks)) == files
    # The workload's own optimizer files have a few small tensors more.
    assert all(mine[0].length_bytes / GIB == pytest.approx(optimizer, abs=1.1e-3) for mine in ranks)
    most = max(sum(shard.length_bytes for shard in mine[1:]) for mine in ranks)
    assert most / GIB == pytest.approx(weights, abs=2e-3)
    names = [shard.name for mine in ranks for shard in mine]
    assert len(set(names)) == len(names)


def test_scales_and_ranks_that_cannot_be() -> None:
    assert set(MODELS) == set(PUBLISHED)
    scale = scale_for("8b", 2, 100 << 20)
    assert total_bytes(layout("8b", 2, scale)) == pytest.approx(100 << 20, rel=1e-4)
    assert scale_for("8b", 1, 1 << 60) == 1
    for name, ranks in (("9b", 1), ("8b", 9)):
        with pytest.raises(UsageError):
            layout(name, ranks)
