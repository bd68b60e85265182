"""The loader over two ways to one target: slow, frozen, cut. Every batch comes once, in its order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import pytest
import torch

from headrace.device import NativeDevice, PathInfo
from headrace.errors import DeviceTimeout
from headrace.testing.serve import ServeProcess, serving
from headrace.torch import TokenLoader
from headrace.volume import Volume
from tests.dataset.corpora import ingest_texts
from tests.torch.way import Way
from tests.waiting import until

NQN = "nqn.2026-01.io.headrace:test-loader-paths"
OPTIONS: dict[str, Any] = {"sequence_length": 64, "global_batch": 4, "rank": 0, "world": 1, "seed": 5}
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    with serving(NQN, "mem:32MiB") as target:
        with Volume.create([target.uri()]) as volume:
            ingest_texts(volume, tmp_path_factory.mktemp("corpus"), count=60)
        yield target


@pytest.fixture(scope="module")
def expected(target: ServeProcess) -> list[torch.Tensor]:
    with Volume.open(target.uri()) as volume, TokenLoader(volume, "corpus", **OPTIONS) as each:
        return list(islice(each, 400))


@contextmanager
def two_ways(target: ServeProcess, **options: object) -> Iterator[tuple[list[Way], Volume]]:
    with ExitStack() as stack:
        ways = [stack.enter_context(Way(target.port, seed)) for seed in (1, 2)]
        portals = ",".join(f"127.0.0.1:{way.port}" for way in ways)
        query = "&".join(f"{name}={value}" for name, value in {"nsid": 1, **options}.items())
        volume = stack.enter_context(Volume.open(f"nvme+tcp://{portals}/{NQN}?{query}"))
        until(lambda: all(path.usable for path in paths(volume)), "both paths")
        yield ways, volume


def paths(volume: Volume) -> list[PathInfo]:
    device = volume.devices[0]
    assert isinstance(device, NativeDevice)
    return device.paths()


def same(seen: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(seen) <= len(expected) and all(
        torch.equal(a, b) for a, b in zip(seen, expected[: len(seen)], strict=True)
    )


def test_a_slow_path_is_seen_named_and_avoided(target: ServeProcess, expected: list[torch.Tensor]) -> None:
    with (
        two_ways(target, policy="round-robin", keepalive=60, io_timeout=60) as (ways, volume),
        TokenLoader(volume, "corpus", **OPTIONS) as each,
    ):
        seen = list(islice(each, 20))
        ways[0].late_s = (0.3, 0.5)
        end = time.monotonic() + LIMIT_S
        while not paths(volume)[0].slow:
            assert time.monotonic() < end, paths(volume)
            seen.append(next(each))
        # Those that were sent before have come when these have.
        seen += islice(each, each.options.prefetch)
        before, begun = paths(volume), time.monotonic()
        seen += islice(each, 100)
        first, second = (after.reads - now.reads for now, after in zip(before, paths(volume), strict=True))
        assert second >= 90 and first <= 2 * (2 + time.monotonic() - begun), (first, second)
        assert paths(volume)[0].slow_times >= 1 and not paths(volume)[1].slow
        ways[0].late_s = (0.0, 0.0)
        end = time.monotonic() + LIMIT_S
        while paths(volume)[0].slow and len(seen) < 400:
            assert time.monotonic() < end, paths(volume)
            seen.append(next(each))
            time.sleep(0.02)
        assert not paths(volume)[0].slow
    assert same(seen, expected)


@pytest.mark.parametrize("how", ["cut", "freeze"])
def test_one_of_two_paths_dies_under_way(target: ServeProcess, expected: list[torch.Tensor], how: str) -> None:
    with (
        two_ways(target, keepalive=3, io_timeout=60) as (ways, volume),
        TokenLoader(volume, "corpus", **OPTIONS, stall_timeout_s=LIMIT_S) as each,
    ):
        seen = list(islice(each, 20))
        getattr(ways[0], how)()
        seen += islice(each, 100)
        until(lambda: not paths(volume)[0].usable, "the path is given up")
        seen += islice(each, 50)
        assert paths(volume)[0].losses >= 1
        {"cut": ways[0].heal, "freeze": ways[0].thaw}[how]()
        until(lambda: paths(volume)[0].usable, "the path is back")
        seen += islice(each, 50)
    assert len(seen) == 220 and same(seen, expected)


def test_reads_that_a_frozen_path_holds_come_by_the_other(target: ServeProcess, expected: list[torch.Tensor]) -> None:
    """Long before it is given up."""
    with (
        two_ways(target, policy="round-robin", keepalive=240, io_timeout=240) as (ways, volume),
        TokenLoader(volume, "corpus", **OPTIONS, stall_timeout_s=LIMIT_S) as each,
    ):
        seen = list(islice(each, 20))
        ways[0].freeze()
        seen += islice(each, 100)
        first = paths(volume)[0]
        assert first.usable and first.slow and first.losses == 0, first
        ways[0].thaw()
        end = time.monotonic() + LIMIT_S
        while paths(volume)[0].slow and len(seen) < 4000:
            assert time.monotonic() < end, paths(volume)
            seen.append(next(each))
            time.sleep(0.02)
        assert not paths(volume)[0].slow
    assert same(seen[: len(expected)], expected)


def test_without_any_path_the_step_that_needs_the_data_is_told(
    target: ServeProcess, expected: list[torch.Tensor]
) -> None:
    with (
        two_ways(target, loss_timeout="forever", keepalive=60) as (ways, volume),
        TokenLoader(volume, "corpus", **OPTIONS, stall_timeout_s=4.0) as each,
    ):
        seen = list(islice(each, 10))
        for way in ways:
            way.cut()
        with pytest.raises(DeviceTimeout) as caught:
            for batch in each:
                seen.append(batch)
        message = str(caught.value)
        assert "object 'corpus.bin', member 0, nvme+tcp://" in message and ", LBA " in message
        assert "waiting for a path" in message and "within 4 s" in message
        for way in ways:
            assert f"127.0.0.1:{way.port} is " in message
            way.heal()
        until(lambda: any(path.usable for path in paths(volume)), "a path is back")
        seen += islice(each, 30)
    assert len(seen) < 60 and same(seen, expected)
