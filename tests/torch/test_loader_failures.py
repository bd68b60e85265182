"""A batch that was read and could not be made into what the caller gets: it is not lost, and counts for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import islice
from typing import Any

import pytest
import torch

from headrace.dataset import FeedOptions, PackOptions, TokenStream, WindowFeed, pack_stream
from headrace.errors import UsageError
from headrace.torch import DocumentLoader, TokenLoader
from headrace.torch.loader import OrderOptions
from headrace.volume import Volume
from tests.dataset.corpora import ingest_texts, native_volume

LENGTH, BATCH = 32, 8
OPTIONS: dict[str, Any] = {"sequence_length": LENGTH, "global_batch": BATCH, "rank": 0, "world": 1, "seed": 3}


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Volume]:
    with native_volume() as volume:
        ingest_texts(volume, tmp_path_factory.mktemp("corpus"), count=40)
        with volume.session(run_id="test") as session:
            pack_stream(session, "corpus", PackOptions(sequence_length=LENGTH))
        yield volume


def _inputs(batch: Any) -> torch.Tensor:
    return batch if isinstance(batch, torch.Tensor) else batch["input_ids"]


@pytest.mark.parametrize("kind", [TokenLoader, DocumentLoader])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_the_batch_comes_again(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, kind: Callable[..., Any], error: type[BaseException]
) -> None:
    with kind(volume, "corpus", **OPTIONS) as each:
        expected = [_inputs(batch) for batch in islice(each, 20)]
    make, failing = kind._make, False

    def fail(self: Any, batch: Any) -> Any:
        made = make(self, batch)
        if failing:
            raise error("no memory")
        return made

    monkeypatch.setattr(kind, "_make", fail)
    with kind(volume, "corpus", **OPTIONS, prefetch=2) as each:
        seen = []
        for step in range(20):
            before = (each.state_dict(), each.metrics().samples, each.metrics().token_bytes, each.consumed)
            if step % 3 == 0:
                failing = True
                # More often than there are buffers.
                for _ in range(4):
                    with pytest.raises(error):
                        next(each)
                failing = False
                metrics = each.metrics()
                assert before == (each.state_dict(), metrics.samples, metrics.token_bytes, each.consumed)
                if step == 0:
                    with pytest.raises(UsageError, match="no batch"):
                        each.last_batch_ids  # noqa: B018
            seen.append(_inputs(next(each)))
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


def test_another_loader_goes_on_where_one_failed(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    with TokenLoader(volume, "corpus", **OPTIONS) as each:
        expected = list(islice(each, 6))
    with TokenLoader(volume, "corpus", **OPTIONS) as each:
        list(islice(each, 3))
        with monkeypatch.context() as patch:
            patch.setattr(TokenLoader, "_make", lambda self, batch: (_ for _ in ()).throw(MemoryError()))
            with pytest.raises(MemoryError):
                next(each)
        state = each.state_dict()
    with TokenLoader(volume, "corpus", **OPTIONS) as each:
        each.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(islice(each, 3), expected[3:], strict=True))


def test_only_the_last_batch_is_put_back_and_only_once(volume: Volume) -> None:
    feed = WindowFeed(TokenStream.open(volume, "corpus"), FeedOptions(sequence_length=LENGTH, global_batch=BATCH))
    first, second = feed.acquire(), feed.acquire()
    assert first is not None and second is not None
    with pytest.raises(UsageError, match="only the last"):
        feed.put_back(first)
    tokens = second.tokens.copy()
    feed.put_back(second)
    with pytest.raises(UsageError, match="only the last"):
        feed.put_back(second)
    again = feed.acquire()
    assert again is not None and again.position == second.position and (again.tokens == tokens).all()
    feed.release(again)
    with pytest.raises(UsageError, match="only the last"):
        feed.put_back(again)
    feed.release(first)
    feed.close()
    feed.put_back(first)


def test_the_loaders_take_every_option_of_the_feed() -> None:
    own = {"sequence_length", "global_batch", "rank", "world"}
    assert set(OrderOptions.__annotations__) == {each.name for each in fields(FeedOptions)} - own


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_named(volume: Volume) -> None:
    with pytest.raises(UsageError, match=r"no such device at device cuda: expected a CUDA device, found none"):
        TokenLoader(volume, "corpus", **OPTIONS, device="cuda")
