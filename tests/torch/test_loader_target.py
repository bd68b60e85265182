"""The loader over NVMe/TCP, with a real target that stops, goes on, dies and comes back."""

from __future__ import annotations

import os
import signal
import time
from itertools import islice
from pathlib import Path

import pytest
import torch

from headrace.errors import DeviceTimeout
from headrace.testing.serve import serving
from headrace.torch import TokenLoader
from headrace.volume import Volume
from tests.dataset.corpora import ingest_texts
from tests.stopping import stop

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
