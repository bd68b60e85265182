"""Which part of the data a rank gets: from the process group, from a `DeviceMesh`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from headrace.errors import UsageError
from headrace.torch import TokenLoader
from headrace.volume import Volume
from tests.dataset.corpora import ingest_texts
from tests.torch.crew import Rank, run

OPTIONS: dict[str, Any] = {"sequence_length": 32, "global_batch": 8, "seed": 3}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("volume")
    with Volume.create([f"file:{folder}/a.img?create=16MiB"]) as volume:
        ingest_texts(volume, folder, count=40)
        return volume.uris[0]


@pytest.fixture(scope="module")
def volume(uri: str) -> Iterator[Volume]:
    with Volume.open(uri) as volume:
        yield volume


def steps(volume: Volume, **options: Any) -> list[torch.Tensor]:
    with TokenLoader(volume, "corpus", **OPTIONS, **options) as each:
        return list(islice(each, 6))


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rank_and_world_come_from_the_process_group(volume: Volume) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        batches = steps(volume)
        # What is given wins: ranks of a model-parallel group share their data.
        assert steps(volume, rank=0, world=1)[0].shape[0] == 8
    finally:
        torch.distributed.destroy_process_group()
    assert same(batches, steps(volume, rank=1, world=2))
    assert same(steps(volume), steps(volume, rank=0, world=1))


def _with_meshes(rank: Rank, uri: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    seen: dict[str, Any] = {}
    with Volume.open(uri) as volume:

        def ids(mesh: Any, **options: Any) -> list[int]:
            with TokenLoader(volume, "corpus", **OPTIONS, mesh=mesh, **options) as each:
                return [number for _ in islice(each, 3) for number in each.last_batch_ids.tolist()]

        def refused(mesh: Any, **options: Any) -> str:
            with pytest.raises(UsageError) as caught:
                ids(mesh, **options)
            return str(caught.value)

        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        seen["dp tp"] = ids(square)
        seen["along tp"] = ids(square, mesh_dims="tp")
        seen["both"] = ids(square, mesh_dims=("tp", "dp"))
        seen["all the same"] = ids(square, mesh_dims=())
        seen["the part"] = ids(square["dp"])
        hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        seen["hybrid"] = ids(hybrid)
        pipeline = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
        seen["wrong name"] = refused(square, mesh_dims=("dp", "context"))
        seen["twice"] = refused(square, mesh_dims=("dp", "dp"))
        seen["none known"] = refused(pipeline)
        seen["along cp"] = ids(pipeline, mesh_dims="cp")
        seen["no names"] = refused(init_device_mesh("cpu", (2, 2)))
        seen["both ways"] = refused(square, rank=0, world=2)
        seen["a name"] = refused("dp")
        pair = DeviceMesh("cpu", [1, 3], mesh_dim_names=("dp",))
        seen["pair"] = ids(pair) if rank.rank in (1, 3) else refused(pair)
    return seen


def test_a_mesh_says_which_ranks_share_their_samples(uri: str, volume: Volume) -> None:
    found = run(4, _with_meshes, uri)

    def ids(rank: int, world: int) -> list[int]:
        with TokenLoader(volume, "corpus", **OPTIONS, rank=rank, world=world) as each:
            return [number for _ in islice(each, 3) for number in each.last_batch_ids.tolist()]

    halves, quarters = [ids(rank, 2) for rank in range(2)], [ids(rank, 4) for rank in range(4)]
    assert not set(halves[0]) & set(halves[1])

    def of_all(what: str) -> list[Any]:
        return [seen[what] for seen in found]

    assert of_all("dp tp") == of_all("the part") == [halves[0], halves[0], halves[1], halves[1]]
    assert of_all("along tp") == of_all("along cp") == [halves[0], halves[1], halves[0], halves[1]]
    assert of_all("both") == of_all("hybrid") == quarters
    assert of_all("all the same") == [ids(0, 1)] * 4
    assert [found[1]["pair"], found[3]["pair"]] == halves and "not in the mesh" in found[0]["pair"]
    seen = found[0]
    assert "no dimension 'context'" in seen["wrong name"] and "of dp, tp" in seen["wrong name"]
    assert "twice" in seen["twice"]
    assert "found pp, cp" in seen["none known"] and "mesh_dims=" in seen["none known"]
    assert "none that has a name" in seen["no names"]
    assert "one of the two" in seen["both ways"] and "found str" in seen["a name"]


def test_dimensions_without_a_mesh(volume: Volume) -> None:
    with pytest.raises(UsageError, match="none is given"):
        steps(volume, mesh_dims="dp")
