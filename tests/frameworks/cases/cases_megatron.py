"""megatron-core: its own datasets on a volume give what they give on local files, also where batches are read ahead."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from headrace.errors import DatasetError, ObjectNotFound, UsageError
from headrace.torch.megatron import ReadAhead, indexed_dataset
from headrace.volume import Volume
from tests.frameworks.cases.job import (
    BATCH,
    LENGTH,
    SAVE_EVERY,
    SEED,
    Job,
    Order,
    as_torchrun,
    hashes,
    killed_and_resumed,
    tiny_gpt,
    watched,
)
from tests.torch.crew import Rank

SAMPLES = 300


def _config(cached: Path | None) -> GPTDatasetConfig:
    tokenizer = SimpleNamespace(eod=0, eos=0, pad=-1, vocab_size=512, unique_identifiers={"name": "test"})
    return GPTDatasetConfig(
        random_seed=SEED, sequence_length=LENGTH, split="1,0,0", tokenizer=tokenizer,
        path_to_cache=None if cached is None else str(cached),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=True, create_attention_mask=False,
    )  # fmt: skip


def _gpt(low: Any, cached: Path) -> GPTDataset:
    return GPTDataset(low, "corpus", np.arange(len(low)), SAMPLES, Split.train, _config(cached))


@pytest.fixture(scope="module")
def files(uri: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same pair as local files; their prefix."""
    folder = tmp_path_factory.mktemp("files")
    with Volume.open(uri) as volume:
        for end in ("bin", "idx"):
            (folder / f"corpus.{end}").write_bytes(volume.read(f"corpus.{end}"))
    return folder / "corpus"


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_the_indexed_dataset_is_theirs(uri: str, files: Path) -> None:
    theirs = IndexedDataset(str(files))
    with Volume.open(uri) as volume:
        ours = indexed_dataset(volume, "corpus")
        again = pickle.loads(pickle.dumps(ours))
        for each in (ours, again):
            assert isinstance(each, IndexedDataset) and len(each) == len(theirs)
            assert np.array_equal(each.sequence_lengths, theirs.sequence_lengths)
            assert np.array_equal(each.document_indices, theirs.document_indices)
            for index in range(len(theirs)):
                assert np.array_equal(each[index], theirs[index]) and each[index].dtype == theirs[index].dtype
            assert all(np.array_equal(a, b) for a, b in zip(each[3:7], theirs[3:7], strict=True))
            assert np.array_equal(each.get(5, offset=1, length=1), theirs.get(5, offset=1, length=1))
        for count, offset in ((100, volume.stat("corpus.bin").length_bytes - 100), (1 << 50, 0), (-1, 0), (1, -2)):
            with pytest.raises(DatasetError, match="leads out of the tokens"):
                ours.bin_reader.read(np.uint16, count, offset)
        with pytest.raises(ObjectNotFound):
            indexed_dataset(volume, "nothing")


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "multiprocessing_context": "fork"}])
def test_batches_that_are_read_ahead(uri: str, files: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    theirs = _gpt(IndexedDataset(str(files)), tmp_path)
    with Volume.open(uri) as volume:
        ours = ReadAhead(_gpt(indexed_dataset(volume, "corpus"), tmp_path))
        wanted = [list(range(first, first + 8)) for first in range(0, 160, 8)]
        sampler: Any = wanted if options else ours.ahead_of(wanted, batches=3)
        batches = DataLoader(ours, batch_sampler=sampler, **options)
        assert len(batches) == 20
        for got, expected in zip(batches, DataLoader(theirs, batch_sampler=wanted), strict=True):
            assert same(got, expected)
        assert not ours._ahead
        assert same(ours[7], theirs[7])
        # A blend of them; an iteration that was broken off leaves nothing that is never asked for.
        blend = BlendedDataset([ours.dataset, ours.dataset], [0.7, 0.3], 100, _config(None))
        mixed = ReadAhead(blend)
        for got, index in zip(mixed.__getitems__(range(40)), range(40), strict=True):
            assert got["dataset_id"] == blend.dataset_index[index]
            assert same({**got, "dataset_id": torch.tensor(0)}, {**blend[index], "dataset_id": torch.tensor(0)})
        again = mixed.ahead_of(wanted[:8], batches=3)
        next(iter(again))
        assert len(list(again)) == 8 and len(mixed._ahead) == 8


def test_what_cannot_be_read_ahead(uri: str, files: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read ahead"):
        ReadAhead(_gpt(IndexedDataset(str(files)), tmp_path))
    with Volume.open(uri) as volume:
        low = indexed_dataset(volume, "corpus")
        with pytest.raises(UsageError, match="VolumeIndexedDataset"):
            ReadAhead(low)
        with pytest.raises(UsageError, match="batches"):
            ReadAhead(_gpt(low, tmp_path)).ahead_of([], batches=0)


def _batches(rank: Rank, consumed: int) -> Iterator[list[int]]:
    """As Megatron's sampler: the rank's part of each step, from the counter in the checkpoint on."""
    local = BATCH // rank.world
    for first in range(consumed, SAMPLES - BATCH, BATCH):
        yield list(range(first + rank.rank * local, first + (rank.rank + 1) * local))


def train(rank: Rank, job: Job) -> int:
    as_torchrun(rank)
    path = job.folder / "checkpoint"
    with job.volume() as volume:
        model: Any = watched(tiny_gpt(), rank, job)
        step = 0
        if job.resume:
            saved = torch.load(path)
            model.load_state_dict(saved["model"])
            step = saved["consumed"] // BATCH
        begun = step
        data = ReadAhead(_gpt(indexed_dataset(volume, "corpus"), job.folder / "cached"))
        sampler = data.ahead_of(_batches(rank, step * BATCH))
        if rank.world > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for batch in islice(DataLoader(data, batch_sampler=sampler), job.steps - step):
            model(input_ids=batch["tokens"], labels=batch["labels"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % SAVE_EVERY == 0 and rank.rank == 0 and not job.resume:
                state = {"model": model.module.state_dict(), "consumed": step * BATCH}
                torch.save(state, path.with_suffix(".new"))
                path.with_suffix(".new").replace(path)
    return begun


def test_ranks_are_killed_and_go_on(job: Job, files: Path) -> None:
    theirs = _gpt(IndexedDataset(str(files)), job.folder / "cached")
    rows = [hashes(theirs[index]["tokens"][None])[0] for index in range(SAMPLES)]
    killed_and_resumed(job, train, Order(rows, SAMPLES), world=3)
