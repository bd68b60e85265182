"""Two runs on one device: the second is told at its start, whoever it is and wherever it runs."""

from __future__ import annotations

import secrets
import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.places import Shard, device_io, mark, open_place, open_writer
from headrace.bench.places.mark import Mark, Seen, decode, encode
from headrace.bench.places.memory import ALIGN
from headrace.cli import main
from headrace.device import open_device
from headrace.errors import DeviceError, UsageError
from headrace.units import MIB
from tests.waiting import until


def quiet(fraction: float, text: str) -> None:
    pass


def _block(uri: str) -> Seen | None:
    with open_device(uri) as device:
        block = np.empty(ALIGN, np.uint8)
        device.read_into(MIB, block)
        return decode(block)


def test_a_second_run_is_refused_at_its_start(
    namespace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mark, "BEAT_S", 0.1)
    with open_place(namespace, scratch=True) as first:
        assert _block(namespace) is None
        first.prepare(2 * MIB, tell=quiet)
        found = _block(namespace)
        assert found is not None
        until(lambda: (now := _block(namespace)) is not None and now.beat > found.beat, "it is renewed")
        monkeypatch.setattr(mark, "_OWNER", secrets.token_bytes(16))
        arguments = ["bench", namespace, "-p", "ingest", "--size", "2MiB", "--seconds", "0.05", "--rounds", "1"]
        assert main([*arguments, "--scratch", "--yes"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "another run of headrace bench writes there" in line and found.who in line
        # Who only reads is told.
        with open_place(namespace) as reader:
            assert f"another run of headrace bench writes there ({found.who})" in reader.plan(MIB, 0)[-1]
        with first.room([Shard("a", MIB)]):
            pass
    # At its end, nothing of it is there.
    assert _block(namespace) is None
    assert main([*arguments, "--scratch", "--yes"]) == 0


def test_two_that_looked_at_one_moment_do_not_both_begin(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mark, "BEAT_S", 0.1)
    with open_place(namespace, scratch=True) as first:
        monkeypatch.setattr(mark, "_OWNER", secrets.token_bytes(16))
        with open_place(namespace, scratch=True) as second:
            second.prepare(MIB, tell=quiet)
            with pytest.raises(UsageError, match="another run"):
                first.prepare(MIB, tell=quiet)
            second.forget("dropped")


def test_what_a_killed_run_left_is_taken_over_and_it_ends_if_it_comes_back(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mark, "LOOK_S", 0.5)
    with open_place(namespace, scratch=True) as first:
        # One that is stopped renews nothing.
        monkeypatch.setattr(mark, "BEAT_S", 3600.0)
        first.prepare(MIB, tell=quiet)
        left = _block(namespace)
        monkeypatch.setattr(mark, "_OWNER", secrets.token_bytes(16))
        monkeypatch.setattr(mark, "BEAT_S", 0.1)
        with open_place(namespace, scratch=True) as second:
            second.prepare(MIB, tell=quiet)
            now = _block(namespace)
            assert left is not None and now is not None and now.owner != left.owner
            # It comes back.
            first._mark._over.set()  # type: ignore[attr-defined]
            first._mark._look()  # type: ignore[attr-defined]
            with pytest.raises(DeviceError, match="another run took this device"):
                first.forget("dropped")
            with pytest.raises(DeviceError, match="another run took this device"), first.room([Shard("a", MIB)]):
                pass
            # What it does at its end does the other no harm.
            first.close()
            after = _block(namespace)
            assert after is not None and after.owner == now.owner
            second.forget("dropped")


def test_who_answers_late_is_alive_for_so_long(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an answer says was so when it was asked for: one that is late says nothing of the time since. And the owner
    of a mark on a slow device renews it as slowly."""
    clock = [0.0]

    class Slow:
        """Each read takes 4 s, and so does a write of the owner, which looks before it writes."""

        def __init__(self, dead: bool) -> None:
            self._dead = dead

        def read_into(self, at: int, block: np.ndarray[Any, Any]) -> None:
            beat = 7 if self._dead else int(clock[0] // 9)
            block[:] = encode(Seen(b"o" * 16, beat, "somebody"))
            clock[0] += 4

    monkeypatch.setattr(
        mark, "time",
        SimpleNamespace(
            monotonic=lambda: clock[0], sleep=lambda seconds: clock.__setitem__(0, clock[0] + seconds),
            strftime=time.strftime,
        ),
    )  # fmt: skip
    for begun in range(9):
        clock[0] = float(begun)
        assert Mark(cast(Any, Slow(dead=False)), MIB, namespace).living() == "somebody", begun
    clock[0] = 0.0
    assert Mark(cast(Any, Slow(dead=True)), MIB, namespace).living() == ""
    assert mark.LOOK_S < clock[0] < 60


def test_what_somebody_made_of_a_device_meanwhile_is_not_written_over(namespace: str) -> None:
    with open_place(namespace, scratch=True) as place:
        place.prepare(MIB, tell=quiet)
        with place.room([Shard("a", MIB)]):
            pass
        with open_device(namespace) as device:
            block = np.zeros(ALIGN, np.uint8)
            block[0x438:0x43A] = (0x53, 0xEF)
            device.write(0, block)
            before = np.empty(8 * MIB, np.uint8)
            device.read_into(0, before)
        with pytest.raises(UsageError, match="ext4"), place.room([Shard("a", MIB)]):
            pass
    with open_device(namespace) as device:
        after = np.empty(8 * MIB, np.uint8)
        device.read_into(0, after)
    # But for the mark, which may have been renewed meanwhile.
    after[MIB : MIB + ALIGN] = before[MIB : MIB + ALIGN]
    assert np.array_equal(before, after)


def test_who_stood_still_looks_before_it_writes_and_blames_no_storage(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-Z and `fg`, when another run has taken the device."""
    shards = [Shard("a", 3 * MIB)]
    with open_place(namespace, scratch=True) as first, first.room(shards) as room:
        writer = open_writer(room.for_writer())
        try:
            writer.save([0], lambda count: None)
            assert writer.restore([0], lambda count: None) == 3 * MIB
            # No renewal comes between.
            first._mark.end()  # type: ignore[attr-defined]
            with open_device(namespace) as device:
                device.write(MIB, encode(Seen(b"x" * 16, 1, "somebody")))
                device.write(MIB + ALIGN, np.full(3 * MIB, 7, np.uint8))
            monkeypatch.setattr(device_io, "_STILL_S", 0.0)
            for work in (writer.save, writer.restore):
                with pytest.raises(DeviceError, match=r"another run took this device.*found somebody"):
                    work([0], lambda count: None)
        finally:
            writer.close()
    with open_device(namespace) as device:
        found = np.empty(3 * MIB, np.uint8)
        device.read_into(MIB + ALIGN, found)
    assert (found == 7).all()


@given(data=st.binary(max_size=ALIGN), at=st.integers(0, ALIGN - 1), flip=st.integers(1, 255))
def test_only_a_whole_mark_is_one(data: bytes, at: int, flip: int) -> None:
    block = np.zeros(ALIGN, np.uint8)
    block[: len(data)] = np.frombuffer(data, np.uint8)
    decode(block)
    said = b"[" * 4000
    deep = mark._HEAD.pack(b"HRBENCH1", b"o" * 16, 1, len(said), mark._checksum(1, said)) + said
    assert decode(np.frombuffer(deep.ljust(ALIGN, b"\0"), np.uint8)) is None
    seen = Seen(b"o" * 16, 7, "process 1 on n\x1b[2J")
    whole = encode(seen)
    found = decode(whole)
    assert found == Seen(seen.owner, seen.beat, "process 1 on n?[2J")
    whole[at] ^= flip
    changed = decode(whole)
    # The owner is compared, and what follows the words is not looked at.
    assert changed is None or 8 <= at < 24 or changed == found
