"""The loader over NVMe/TCP, with a real target that stops, goes on, dies and comes back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.errors import DeviceTimeout
from headrace.testing.serve import serving
from headrace.torch import TokenLoader
from headrace.volume import Volume, contents
from headrace.volume.catalog.tables.table import Table
from tests.dataset.corpora import ingest_texts
from tests.stopping import stop, stopped
from tests.waiting import until

NQN = "nqn.2026-01.io.headrace:test-loader"


def test_a_stalled_target_is_named_and_the_step_goes_on_after_it(tmp_path: Path) -> None:
    with serving(NQN, "mem:32MiB") as target:
        uri = target.uri(keepalive=20, io_timeout=60)
        with Volume.create([uri]) as volume:
            ingest_texts(volume, tmp_path, count=60)
            options = {"sequence_length": 64, "global_batch": 4, "rank": 0, "world": 1, "seed": 5}
            with TokenLoader(volume, "corpus", **options) as each:
                expected = list(islice(each, 20))
            with TokenLoader(volume, "corpus", **options, prefetch=2, stall_timeout_s=4.0) as each:
                seen = list(islice(each, 5))
                stop(target.process.pid)
                try:
                    with pytest.raises(DeviceTimeout) as caught:
                        for batch in each:
                            seen.append(batch)
                    began = time.monotonic()
                    with pytest.raises(DeviceTimeout):
                        next(each)
                    assert time.monotonic() - began > 3.6
                finally:
                    os.kill(target.process.pid, signal.SIGCONT)
                message = str(caught.value)
                assert "object 'corpus.bin', member 0, " in message and "within 4 s" in message
                assert ", LBA " in message and f", sent to 127.0.0.1:{target.port} " in message
                # What had arrived was handed out; what had not comes now, and nothing is left out or twice.
                assert 5 <= len(seen) <= 7
                seen += list(islice(each, 20 - len(seen)))
            assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


@contextmanager
def held(volume: Volume) -> Iterator[None]:
    """By a thread that looks into the catalogue, and waits for a device."""
    has, over = threading.Event(), threading.Event()

    def hold() -> None:
        with volume.lock:
            has.set()
            over.wait(90)

    thread = threading.Thread(target=hold)
    thread.start()
    has.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("who", ["the target stands still", "another thread has the catalogue"])
def test_what_has_to_be_looked_up_is_not_waited_for_beyond_the_step(
    tmp_path: Path, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(NQN, "mem:64MiB") as target:
        uri = target.uri(keepalive=120, io_timeout=120)
        with Volume.create([uri]) as volume:
            ingest_texts(volume, tmp_path, count=60)
            with volume.session(run_id="test") as session, session.transaction() as transaction:
                # So many that the catalogue has tables.
                names = [f"other/{number:05}" for number in range(20_000)]
                transaction.put_many(names, bytes(len(names)), np.ones(len(names), np.int64))
            options = {"sequence_length": 64, "global_batch": 4, "rank": 0, "world": 1, "seed": 5}
            with TokenLoader(volume, "corpus", **options) as each:
                expected = list(islice(each, 12))
        # Nothing of it stays in memory.
        monkeypatch.setattr(contents, "_DECODED", 0)
        monkeypatch.setattr(Table, "_last", property(lambda table: (), lambda table, leaves: None), raising=False)
        with Volume.open([uri]) as volume:
            volume.log.nodes._cache_bytes = 0
            with TokenLoader(volume, "corpus", **options, prefetch=1, stall_timeout_s=2.0) as each:
                seen = list(islice(each, 3))
                # What is on its way already would be what is waited for.
                until(lambda: each.metrics().ready == each.metrics().in_flight)
                began = time.monotonic()
                with stopped(target.process.pid) if "target" in who else held(volume):
                    with pytest.raises(DeviceTimeout, match="a batch did not come in time") as caught:
                        for batch in each:
                            seen.append(batch)
                    with pytest.raises(DeviceTimeout, match="a batch did not come in time"):
                        next(each)
                    assert time.monotonic() - began < 60
                message = str(caught.value)
                assert "within 2 s" in message and "object" not in message
                assert (", LBA " in message) is ("target" in who)
                assert 3 <= len(seen) <= 4
                seen += islice(each, 12 - len(seen))
        assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
