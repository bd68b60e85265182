"""What a stage says of itself may be anything; what it is filled with is durable before it is said to be there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.device import crc32c
from headrace.errors import HeadraceError
from headrace.testing.devices import MemoryDevice
from headrace.volume import Volume
from headrace.volume.stage import layout, plan
from headrace.volume.stage import read as stage_read
from headrace.volume.stage.fill import _Filling, fill
from headrace.volume.stage.layout import HEAD_BYTES, Head
from headrace.volume.stage.plan import plan_of
from headrace.volume.stage.read import Near
from headrace.volume.stage.store import Held, address_of, hold
from headrace.volume.stage.throttle import Throttle
from headrace.volume.stage.verify import verify

CHUNK = 64 << 10
SIZES = {"a": 700_000, "b": 100, "c": CHUNK, "d": 0, "e": 5 * CHUNK + 1}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(plan, "CHUNK_BYTES", CHUNK)


@pytest.fixture(scope="module", params=["native", "reference"])
def volume(request: pytest.FixtureRequest) -> Iterator[Volume]:
    """Objects of one blob, and one of slices that begin and end anywhere."""
    chance = np.random.default_rng(1)
    if request.param == "native":
        made = Volume.create(["mem:16MiB", "mem:16MiB"], stripe_bytes=64 << 10)
    else:
        made = Volume.create(devices=[MemoryDevice(16 << 20)], stripe_bytes=64 << 10)
    with made as volume:
        with volume.session(run_id="test") as session:
            with session.transaction() as transaction:
                for name, size in SIZES.items():
                    transaction.put(name, chance.bytes(size), checksum_block_bytes=4096)
            with session.transaction() as transaction:
                transaction.compose("f", [("a", 650_001, 40_000), ("e", 3, 70_000), b"new bytes", ("a", 0, 10)])
        yield volume


def staged(volume: Volume, where: Path) -> Path:
    infos = [volume.stat(name) for name in (*SIZES, "f")]
    made = plan_of(volume, "some", infos)
    held = hold(address_of(where, volume.id, "some"))
    assert held is not None
    with held:
        held.lay_out(made, force=False)
        assert fill(volume, made, held, Throttle(None, 1.0)).copied_bytes == made.facts.wanted_bytes
        assert held.there[made.wanted].all() and not verify(volume, made, held).bad
    (path,) = where.glob("*.stage")
    return path


def check(near: Near, volume: Volume) -> dict[str, Any]:
    """Ranges of all objects by chance, several in a read; what `near` says then."""
    chance = np.random.default_rng(2)
    for name in (*SIZES, "f"):
        whole = np.frombuffer(volume.read(name), np.uint8)
        starts = chance.integers(0, len(whole) + 1, 6)
        lengths = np.array([chance.integers(0, len(whole) - start + 1) for start in starts.tolist()])
        places = np.cumsum(lengths) - lengths
        buffers = [np.zeros(int(lengths.sum()), np.uint8), np.zeros(int(lengths.sum()), np.uint8)]
        index = np.arange(6) % 2
        near.submit_read(name, starts, lengths, buffers, places, index).wait()
        for start, length, place, which in zip(starts, lengths, places, index, strict=True):
            assert np.array_equal(buffers[which][place : place + length], whole[start : start + length])
    return near.describe()


def test_ranges_of_objects_and_of_slices(volume: Volume, tmp_path: Path) -> None:
    path = staged(volume, tmp_path)
    said = check(Near(volume, tmp_path, "some"), volume)
    assert said["volume_bytes"] == 0 and said["state"] == "complete"
    # Only what the objects have bytes in is there.
    assert path.stat().st_size < sum(SIZES.values()) + (256 << 10)


def test_errors_of_the_caller_are_none_of_the_stage(volume: Volume, tmp_path: Path) -> None:
    staged(volume, tmp_path)
    near, buffer = Near(volume, tmp_path, "some"), np.zeros(100, np.uint8)
    wrong: list[tuple[Any, ...]] = [
        ("a", [-1], [10], [buffer], [0]), ("a", [0], [1 << 62], [buffer], [0]), ("a", [0], [101], [buffer], [0]),
        ("a", [0], [10], [buffer], [95]), ("a", [0], [10], [b"bytes are not for writing"], [0]),
        ("a", [0, 1], [10], [buffer], [0]), ("nobody", [0], [1], [buffer], [0]), ("a", [0.5], [1], [buffer], [0]),
        ("a", [0], [10], [buffer], [0], [7]),
    ]  # fmt: skip
    for each in wrong:
        with pytest.raises(HeadraceError) as ours:
            near.submit_read(*each).wait()
        with pytest.raises(HeadraceError) as theirs:
            volume.submit_read(*each).wait()
        assert type(ours.value) is type(theirs.value), each
    said = check(near, volume)
    assert said["trouble"] is None and said["state"] == "complete"


@pytest.mark.parametrize("volume", ["native"], indirect=True)
def test_every_byte_of_what_it_says_of_itself(volume: Volume, tmp_path: Path) -> None:
    path = staged(volume, tmp_path)
    good = path.read_bytes()
    facts = json.loads(good[HEAD_BYTES:].split(b"\0")[0])
    used = [*range(48), *range(HEAD_BYTES, HEAD_BYTES + len(json.dumps(facts)), 11)]
    for place in used:
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        check(Near(volume, tmp_path, "some"), volume)


def rewritten(good: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The same stage with other facts, and a head that fits them."""
    head = Head.decode(good[:HEAD_BYTES], "")
    assert head is not None
    facts = json.loads(good[HEAD_BYTES : HEAD_BYTES + head.facts_bytes])
    change(facts)
    data = json.dumps(facts).encode()[: head.map_at - HEAD_BYTES]
    begin = Head.of(data, head.map_at, head.nonce).encode() + data
    return begin.ljust(head.map_at, b"\0") + good[head.map_at :]


def moved(column: int, by: int) -> Callable[[dict[str, Any]], None]:
    def change(facts: dict[str, Any]) -> None:
        for row in facts["blobs"]:
            row[column] += by

    return change


LIES: list[Callable[[dict[str, Any]], None]] = [
    *(moved(column, by) for column in range(6) for by in (1, 4096, 65536, 1 << 61, -(1 << 20))),
    *(lambda facts, key=key, value=value: facts.update({key: value}) for key in (
        "volume_id", "volume", "dataset", "objects", "chunk_bytes", "blobs", "wanted_chunks", "wanted_bytes",
        "data_bytes",
    ) for value in (None, -1, 1 << 61, [[1, 2]], 1.5)),
    lambda facts: (facts.update(data_bytes=(1 << 62) - 1), moved(2, 1 << 61)(facts)),
    lambda facts: (facts.update(data_bytes=(1 << 62) - 1), moved(3, 1 << 61)(facts)),
    lambda facts: facts["blobs"].reverse(),
    lambda facts: facts["blobs"].clear(),
    lambda facts: facts["blobs"].append([1 << 40, 1 << 50, 0, 0, 0, facts["wanted_chunks"]]),
]  # fmt: skip


@pytest.mark.parametrize("volume", ["native"], indirect=True)
def test_whatever_it_says_of_itself(volume: Volume, tmp_path: Path) -> None:
    path = staged(volume, tmp_path)
    good = path.read_bytes()
    for lie in LIES:
        path.write_bytes(rewritten(good, lie))
        check(Near(volume, tmp_path, "some"), volume)
        held = hold(address_of(tmp_path, volume.id, "some"))
        assert held is not None
        with held:
            held.lay_out(plan_of(volume, "some", [volume.stat("a")]), force=False)


def test_bytes_that_a_map_says_are_there(volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits set and no bytes behind them, as after a loss of power that nothing was flushed before."""
    monkeypatch.setattr(stage_read, "MOST_BAD", 1000)
    path = staged(volume, tmp_path)
    head = Head.decode(path.read_bytes()[:HEAD_BYTES], "")
    assert head is not None
    size, data = path.stat().st_size, head.map_at + 4096
    with path.open("r+b") as file:
        file.truncate(data)
        file.truncate(size)
    said = check(Near(volume, tmp_path, "some"), volume)
    assert said["trouble"] and said["stage_bytes"] == 0


def test_a_chunk_is_marked_when_it_and_its_table_are_durable(
    volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, Any]] = []
    write, flush, mark = Held.write, Held.flush, Held.mark

    def wrote(self: Held, place: int, data: np.ndarray) -> None:
        write(self, place, data)
        events.append(("write", (place, place + len(data))))

    def flushed(self: Held) -> None:
        # What was written when it begins.
        events.append(("flush", None))
        flush(self)

    def marked(self: Held, chunks: list[int], there: bool = True) -> None:
        events.append(("mark", list(chunks)))
        mark(self, chunks, there)

    table = _Filling._table

    def late(self: _Filling, blob: int) -> None:
        # Chunks of the blob are written before its table is.
        deadline = time.monotonic() + 5
        while not any(chunk.blob == blob for chunk in list(self._written)) and time.monotonic() < deadline:
            time.sleep(0.001)
        self._mark()
        table(self, blob)

    monkeypatch.setattr(_Filling, "_table", late)
    monkeypatch.setattr(Held, "write", wrote)
    monkeypatch.setattr(Held, "flush", flushed)
    monkeypatch.setattr(Held, "mark", marked)
    monkeypatch.setattr("headrace.volume.stage.fill._FLUSH_BYTES", 64 << 10)
    # Small pieces, and so several threads.
    monkeypatch.setattr("headrace.volume.stage.fill.PIECE_BYTES", 64 << 10)
    staged(volume, tmp_path)
    made = plan_of(volume, "some", [volume.stat(name) for name in (*SIZES, "f")])
    rows = {chunk.number: (made.facts.blobs[chunk.blob], chunk) for chunk in made.chunks(made.wanted)}
    pending: list[tuple[int, int]] = []
    durable: list[tuple[int, int]] = []
    seen: set[int] = set()
    for what, about in events:
        if what == "write":
            pending.append(about)
        elif what == "flush":
            durable, pending = durable + pending, []
        else:
            for number in about:
                row, chunk = rows[number]
                begin = int(row["data_at"]) + chunk.start
                wanted = [(begin, begin + chunk.length)]
                if row["table_bytes"]:
                    wanted.append((int(row["table_at"]), int(row["table_at"] + row["table_bytes"])))
                for low, high in wanted:
                    assert any(first <= low and high <= last for first, last in durable)
                seen.add(number)
    assert seen == set(rows) and sum(what == "mark" for what, _ in events) >= 1


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("limit", [None, 1000.0])
def test_a_throttle(share: float, limit: float | None) -> None:
    """Reads of all lengths, one after another and beside each other, in time that is made up."""
    clock, chance = Clock(), np.random.default_rng(3)
    throttle = Throttle(limit, share, clock=clock)
    taken, busy, waits = 0, 0.0, 0
    for _ in range(2000):
        while (wait_s := throttle._wait_s()) > 0:
            assert wait_s < 100
            clock.now += wait_s + 1e-9
            waits += 1
        several, size, passed = int(chance.integers(1, 4)), int(chance.integers(0, 200)), float(chance.random()) / 10
        for _ in range(several):
            # The first may begin; the others are what came in the same moment.
            throttle._seconds, throttle._bytes = max(throttle._seconds, 0.0), max(throttle._bytes, 0.0)
            assert throttle.begin(size)
        taken += several * size
        clock.now += passed
        busy += passed
        for _ in range(several):
            throttle.end()
        if chance.random() < 0.01:
            clock.now += 5.0  # Nothing to do: no more than a moment of it is made up for.
    assert waits > 100 and busy <= share * clock.now + 1
    if limit is not None:
        assert taken <= 3 * limit * clock.now
    throttle.stop()
    assert not throttle.begin(1)


def test_the_checksum_of_the_facts_is_what_the_head_says() -> None:
    head = Head.of(b"{}", 8192, bytes(16))
    assert head.facts_crc == crc32c(b"{}") and Head.decode(head.encode(), "") == head
    assert Head.decode(bytes(HEAD_BYTES), "") is None
