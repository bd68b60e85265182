"""A batch that was read and could not be made into what the caller gets: it is not lost, and counts for nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import islice
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from headrace.dataset import (
    FeedOptions,
    PackOptions,
    TokenStream,
    WindowFeed,
    pack_stream,
)
from headrace.dataset.feed import feed, flight, ring, stretch
from headrace.errors import UsageError
from headrace.torch import DocumentLoader, TokenLoader
from headrace.torch.feed import loader
from headrace.torch.feed.loader import OrderOptions
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


#: What hands out batches of tokens.
TOKENS = (loader, feed, flight, stretch)


class Interruption:
    """Ctrl-C when `lines` lines were executed in the modules that hand out batches."""

    def __init__(self, lines: int, modules: Sequence[ModuleType]) -> None:
        self.left = lines
        self._files = {module.__file__ for module in modules}

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def interrupted_at(lines: int, call: Callable[[], object], modules: Sequence[ModuleType] = TOKENS) -> bool:
    before, interruption = sys.gettrace(), Interruption(lines, modules)
    sys.settrace(interruption)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    assert interruption.left > 0
    return False


def _standing(each: Any) -> tuple[Any, ...]:
    metrics = each.metrics()
    return each.state_dict(), metrics.samples, metrics.token_bytes, each._last and each.last_batch_ids.tolist()


@pytest.mark.parametrize("kind", [TokenLoader, DocumentLoader])
@pytest.mark.parametrize("batches", [None, 0, 1])
def test_ctrl_c_at_any_line_loses_no_batch_and_gives_none_twice(
    volume: Volume, kind: Callable[..., Any], batches: int | None
) -> None:
    """Neither in this loader nor in one that goes on from its state. When it begins, at its first and second batch."""
    with kind(volume, "corpus", **OPTIONS) as each:
        expected = [_inputs(batch) for batch in islice(each, 4)]
    lines, interrupted = 0, True
    while interrupted:
        lines += 1
        with kind(volume, "corpus", **OPTIONS, prefetch=2) as each:
            seen = [next(each) for _ in range(batches or 0)]
            before = _standing(each)
            interrupted = interrupted_at(lines, each.__iter__ if batches is None else each.__next__)
            assert not interrupted or before == _standing(each)
            # `next` alone: `iter` begins.
            while interrupted and len(seen) < len(expected):
                seen.append(next(each))
        assert not interrupted or all(torch.equal(_inputs(a), b) for a, b in zip(seen, expected, strict=True)), lines
    assert lines > 30


def test_what_was_acquired_is_the_next_again(volume: Volume) -> None:
    each = WindowFeed(TokenStream.open(volume, "corpus"), FeedOptions(sequence_length=LENGTH, global_batch=BATCH))
    first, counted, second = each.acquire(), each.counted, each.acquire()
    assert first is not None and second is not None
    tokens = second.tokens.copy()
    each.back_to(counted)
    again = each.acquire()
    assert again is not None and again.position == second.position and (again.tokens == tokens).all()
    # Old buffers are nobody's: nothing is read into them, and nothing of what is read now lies there.
    assert not np.shares_memory(again.tokens, first.tokens) and not np.shares_memory(again.tokens, second.tokens)
    each.close()


@pytest.mark.parametrize("kind", [TokenLoader, DocumentLoader])
def test_batches_that_have_no_room_in_memory_are_refused(
    volume: Volume, kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that are read ahead, also where one of them has."""
    need = 4 * BATCH * (LENGTH + 1) * 2
    for memory, global_batch in ((need - 1, BATCH), (ring.MEMORY_BYTES, 1 << 30)):
        monkeypatch.setattr(ring, "MEMORY_BYTES", min(memory, 1 << 36))
        found = need * global_batch // BATCH
        with pytest.raises(
            UsageError, match=rf"no room in memory.* {found} bytes .*: 4 batches of {global_batch} rows"
        ):
            kind(volume, "corpus", **OPTIONS | {"global_batch": global_batch})
    monkeypatch.setattr(ring, "MEMORY_BYTES", need)
    with kind(volume, "corpus", **OPTIONS) as each:
        assert each.ring_bytes == need


def test_the_loaders_take_every_option_of_the_feed() -> None:
    own = {"sequence_length", "global_batch", "rank", "world"}
    assert set(OrderOptions.__annotations__) == {each.name for each in fields(FeedOptions)} - own


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_named(volume: Volume) -> None:
    with pytest.raises(UsageError, match=r"no such device at device cuda: expected a CUDA device, found none"):
        TokenLoader(volume, "corpus", **OPTIONS, device="cuda")
