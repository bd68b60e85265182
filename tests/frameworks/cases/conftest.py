"""A volume behind a target for all cases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.dataset import PackOptions, pack_stream
from headrace.testing.serve import serving
from headrace.volume import Volume
from tests.dataset.corpora import ingest_texts
from tests.frameworks.cases.job import BATCH, LENGTH, Job, Order

STEPS = 20


@pytest.fixture(scope="session")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving("nqn.2026-01.io.headrace:test-frameworks", "mem:32MiB", start_timeout_s=60) as target:
        with Volume.create([target.uri()]) as volume:
            ingest_texts(volume, tmp_path_factory.mktemp("corpus"), count=40)
            with volume.session(run_id="test") as session:
                pack_stream(session, "corpus", PackOptions(sequence_length=LENGTH))
        yield target.uri()


@pytest.fixture(scope="session")
def order(uri: str) -> Order:
    order = Order.of(uri, (STEPS + 8) * BATCH)
    # So that the end of an epoch shows: it comes within the steps, and not at the end of one.
    assert BATCH < order.epoch < STEPS * BATCH and order.epoch % BATCH
    return order


@pytest.fixture
def job(uri: str, tmp_path: Path) -> Job:
    return Job(uri=uri, folder=tmp_path, steps=STEPS)
