"""Batches on a CUDA device: the same numbers as on the CPU, whatever the ring and the streams do."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.dataset import PackOptions, pack_stream
from headrace.torch import DocumentLoader, TokenLoader
from tests.dataset.corpora import ingest_texts, native_volume

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_batches_on_the_device_are_those_on_the_cpu(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sequence_length": 512, "global_batch": 8, "rank": 0, "world": 1, "seed": 2}
    with native_volume() as volume:
        ingest_texts(volume, tmp_path, count=400)
        with TokenLoader(volume, "corpus", **options) as each:
            expected = list(islice(each, 200))
            state = each.state_dict()
        for prefetch in (1, 4):
            with TokenLoader(volume, "corpus", **options, prefetch=prefetch, device="cuda") as each:
                batches = list(islice(each, 200))
                assert each.state_dict() == state
                # Work on the consumer's stream while later batches are copied on the loader's own.
                sums = [batch.float().mul(3).sum() for batch in batches]
                assert all(batch.is_cuda and batch.dtype == torch.int64 for batch in batches)
                assert all(torch.equal(a.cpu(), b) for a, b in zip(batches, expected, strict=True))
                assert torch.stack(sums).cpu().tolist() == pytest.approx([b.float().mul(3).sum() for b in expected])


def test_documents_on_the_device_are_those_on_the_cpu(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sequence_length": 128, "global_batch": 8, "rank": 0, "world": 1, "seed": 2}
    with native_volume() as volume:
        ingest_texts(volume, tmp_path, count=400)
        with volume.session(run_id="test") as session:
            pack_stream(session, "corpus", PackOptions(sequence_length=128))
        with (
            DocumentLoader(volume, "corpus", **options) as here,
            DocumentLoader(volume, "corpus", **options, prefetch=2, device="cuda") as there,
        ):
            for expected, batch in islice(zip(here, there, strict=True), 100):
                assert batch.pop("max_seqlen") == expected.pop("max_seqlen")
                assert batch.keys() == expected.keys()
                for key, tensor in expected.items():
                    assert batch[key].is_cuda and torch.equal(batch[key].cpu(), tensor), key
