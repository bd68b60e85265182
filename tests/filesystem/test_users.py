"""The libraries that fsspec is for, used as their documentation says; each knows nothing of headrace but an address."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from headrace.filesystem import HeadraceFileSystem
from headrace.testing.serve import serving


@pytest.fixture
def options(addresses: str) -> dict[str, str]:
    return {"volume": addresses}


@pytest.fixture(autouse=True)
def _no_instances_stay() -> Iterator[None]:
    yield
    for fs in list(HeadraceFileSystem._cache.values()):
        fs.close()
    HeadraceFileSystem.clear_instance_cache()


def test_pandas(options: dict[str, str]) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"token": np.arange(100_000), "text": [f"word {i}" for i in range(100_000)]})
    frame.to_parquet("headrace://tables/a.parquet", storage_options=options)
    frame.to_csv("headrace://tables/a.csv", index=False, storage_options=options)
    assert pd.read_parquet("headrace://tables/a.parquet", columns=["text"], storage_options=options).equals(
        frame[["text"]]
    )
    assert pd.read_csv("headrace://tables/a.csv", storage_options=options).equals(frame)


def test_pyarrow_dataset(options: dict[str, str]) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.dataset as ds

    table = pa.table({"part": np.repeat(np.arange(4), 1000), "value": np.arange(4000)})
    fs = fsspec.filesystem("headrace", **options)
    ds.write_dataset(table, "set", format="parquet", partitioning=["part"], filesystem=fs)
    assert len(fs.find("set")) == 4
    found = ds.dataset("set", format="parquet", partitioning=["part"], filesystem=fs)
    assert found.to_table(filter=ds.field("part") == 2)["value"].to_pylist() == list(range(2000, 3000))


def test_datasets(options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    texts = [f"A line of text, number {i}." for i in range(1000)]
    made = datasets.Dataset.from_dict({"text": texts})
    made.save_to_disk("headrace://hf/saved", storage_options=options)
    assert datasets.load_from_disk("headrace://hf/saved", storage_options=options)["text"][:] == texts
    made.to_parquet("headrace://hf/lines.parquet", storage_options=options)
    streamed = datasets.load_dataset(
        "parquet",
        data_files="headrace://hf/*.parquet",
        storage_options=options,
        streaming=True,
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert [row["text"] for row in streamed] == texts


def test_distributed_checkpoint(options: dict[str, str]) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    try:
        from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter
    except ModuleNotFoundError:  # PyTorch before 2.15
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    torch.manual_seed(0)
    state = {"model": torch.nn.Linear(256, 128).state_dict(), "step": torch.tensor(7)}
    dcp.save(state, storage_writer=FsspecWriter("headrace://ckpt/step-7", **options), no_dist=True)
    assert "ckpt/step-7/.metadata" in fsspec.filesystem("headrace", **options).find("ckpt")
    empty = {"model": torch.nn.Linear(256, 128).state_dict(), "step": torch.tensor(0)}
    dcp.load(empty, storage_reader=FsspecReader("headrace://ckpt/step-7", **options), no_dist=True)
    assert empty["step"] == 7
    assert all(torch.equal(empty["model"][name], tensor) for name, tensor in state["model"].items())


def test_over_nvme_tcp(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    from headrace.volume import Volume

    with serving("nqn.2026-11.test:fsspec", "mem:64MiB", "mem:64MiB") as target:
        options = {"volume": f"{target.uri(1)},{target.uri(2)}"}
        Volume.create(options["volume"]).close()
        frame = pd.DataFrame({"x": np.arange(10_000)})
        frame.to_parquet("headrace://x.parquet", storage_options=options)
        assert pd.read_parquet("headrace://x.parquet", storage_options=options).equals(frame)
        fsspec.filesystem("headrace", **options).close()
