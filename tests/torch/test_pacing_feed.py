"""A save beside a feed whose reads do not come: what it writes meanwhile is counted, and who may end that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from headrace.testing.serve import ServeProcess, serving
from headrace.torch import TokenLoader, VolumeWriter, WriterOptions
from headrace.torch.save.window import SMALLEST_BYTES
from headrace.volume import Volume, hunger
from tests.dataset.corpora import ingest_texts
from tests.torch.way import Way
from tests.waiting import until

NQN = "nqn.2026-01.io.headrace:test-pacing"
BYTES = 8 << 20
#: Long enough that what has to go meanwhile is less than a piece.
DEADLINE_S = 20_000.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    with serving(NQN, "mem:96MiB") as target:
        with Volume.create([target.uri()]) as volume:
            ingest_texts(volume, tmp_path_factory.mktemp("corpus"), count=60)
        yield target


def starved(feed: Any) -> bool:
    """It is dry, and stays so: what had passed the frozen way comes all the same."""
    while not hunger.dry():
        next(feed)
    time.sleep(0.3)
    return hunger.dry()


@pytest.mark.parametrize("ends", ["the reads come", "somebody waits", "it is told not to"])
def test_nothing_is_written_while_a_step_waits(
    target: ServeProcess, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever else reads ahead in this process is none of it.
    monkeypatch.setattr(hunger, "_reading", {})
    state = {"weights": torch.arange(BYTES // 4, dtype=torch.int32)}
    options = WriterOptions(deadline_s=DEADLINE_S, pacing=ends != "it is told not to", overwrite=True)
    with ExitStack() as stack:
        way = stack.enter_context(Way(target.port, 1))
        # The way stands still for as long as it is told to: that is not to be a loss of the path.
        uri = f"nvme+tcp://127.0.0.1:{way.port}/{NQN}?nsid=1&io_timeout=300&keepalive=300"
        volume = stack.enter_context(Volume.open(uri))
        feed: Any = TokenLoader(volume, "corpus", sequence_length=64, global_batch=4, rank=0, world=1, prefetch=4)
        stack.enter_context(feed)
        writer = stack.enter_context(VolumeWriter([target.uri()], "run", options=options))
        # A save that gives way wrongly is not waited for until its least rate has ended it.
        stack.callback(way.thaw)
        writer.prepare(state)
        # What has to be looked up is known from here on.
        next(feed)
        way.freeze()
        until(lambda: starved(feed), "nothing comes any more")
        began = time.monotonic()
        future = writer.async_save(state, "run/step-2")
        if ends == "it is told not to":
            until(future.done, "the save was written while the feed was dry")
            assert hunger.dry() and future.result().pacing is None
            return
        until(lambda: (writer.describe()["pacing"] or {}).get("held_by") == "feed", "the save gives way")
        # It may have been about to send a piece when the feed ran dry.
        pressed = BYTES * (time.monotonic() - began) / (DEADLINE_S / 2) + SMALLEST_BYTES
        said = writer.describe()["pacing"]
        assert said["sent_bytes"] <= pressed and not future.done()
        assert said["within_seconds"] <= DEADLINE_S / 2
        if ends == "the reads come":
            way.thaw()
            until(lambda: not hunger.dry(), "the feed has its batches")
            until(future.done, "the save goes on")
        report = future.result(60).pacing
        assert report is not None and report.feed_seconds > 0
        assert (report.hurried_bytes > BYTES / 2) is (ends == "somebody waits")
        assert report.pressed_bytes + report.hurried_bytes <= BYTES + SMALLEST_BYTES


@pytest.mark.parametrize("save", ["synchronous", "short"])
def test_what_gives_way_to_nobody(target: ServeProcess, save: str) -> None:
    with VolumeWriter([target.uri()], "run", options=WriterOptions(overwrite=True)) as writer:
        if save == "short":
            report = writer.async_save({"weights": torch.ones(1000)}, "run/step-3").result(60)
        else:
            report = writer.save({"weights": torch.ones(BYTES // 4)}, "run/step-3")
    assert report.pacing is None
