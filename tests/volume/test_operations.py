"""Operation fuzz against a dict: whatever is done, in whatever order, the volume holds what the dict holds."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.errors import ObjectNotFound, VolumeFull
from headrace.testing import MemoryDevice
from headrace.testing.serve import serving
from headrace.units import MIB
from headrace.volume import Session, Transaction, Volume
from headrace.volume.repair.scrub import scrub
from headrace.volume.writing import heartbeat
from headrace.volume.writing.compose import Part
from headrace.volume.writing.reserve import Reservation
from tests.volume.support import KIB, STRIPE, State, content

NAMES = st.sampled_from(["a", "b", "dir/c", "dir/d"])
SIZES = st.one_of(
    st.integers(0, 10 * KIB), st.integers(0, 400 * KIB), st.sampled_from([0, 1, 4096, STRIPE, 2 * STRIPE])
)
#: put, delete, stream, grant, compose, rename, many at once, delete by prefix
HOW = st.sampled_from("pdsgcrmx")
BLOCKS = st.sampled_from([4096, 16 * KIB, 64 * KIB])


class Operations(RuleBasedStateMachine):
    volume: Volume
    session: Session

    @initialize(members=st.integers(1, 3), block=st.sampled_from([512, 4096]))
    def create(self, members: int, block: int) -> None:
        self.where = self.make(members, block)
        self.volume = self.open(write=True)
        self.reader, self.lazy = self.open(), self.open()
        self.state: State = {}
        #: What was there at any time since the lazy one looked.
        self.since: list[State] = [{}]
        self.reservation: Reservation | None = None
        self.seed = 0
        self.begin()

    def make(self, members: int, block: int) -> list[Any]:
        """A new volume; returns what it is opened by."""
        devices = [MemoryDevice(2 * MIB, block_bytes=block) for _ in range(members)]
        Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB)
        return devices

    def open(self, *, write: bool = False) -> Volume:
        return Volume.open(self.where, write=write)

    def begin(self) -> None:
        self.session = self.volume.session("fuzz", takeover="if-dead", heartbeat_s=60)

    @rule(
        changes=st.lists(st.tuples(NAMES, SIZES, BLOCKS, st.sampled_from("pdsgcrmx")), max_size=4), fail=st.booleans()
    )
    def transaction(self, changes: list[tuple[str, int, int, str]], fail: bool) -> None:
        after = dict(self.state)
        touched: set[str] = set()
        try:
            with self.session.transaction() as tx:
                for name, size, block, how in changes:
                    if name in touched:
                        continue
                    touched.add(name)
                    if how == "x":
                        gone = [n for n in after if n.startswith(name + "/") and n in self.state and n not in touched]
                        if any(n.startswith(name + "/") and n not in gone for n in after):
                            continue
                        assert tx.delete_prefix(name + "/") == len(gone)
                        touched.update(gone)
                        for one in gone:
                            del after[one]
                        continue
                    if name in after:
                        tx.delete(name)
                        del after[name]
                    self.seed += 1
                    data = content(self.seed, size)
                    if how == "p":
                        tx.put(name, data, checksum_block_bytes=block)
                    elif how == "s":
                        half = [data[: size // 3], b"", data[size // 3 :]]
                        tx.write_stream(name, half, length_bytes=size if size % 2 else None, checksum_block_bytes=block)
                    elif how == "g":
                        tx.accept(self.volume.write_grant(tx.allocate(name, size, checksum_block_bytes=block), data))
                    elif how == "c":
                        data = self.compose(tx, name, data, block)
                    elif how == "r":
                        old = next((n for n in sorted(self.state) if n not in touched), None)
                        if old is None:
                            continue
                        touched.add(old)
                        tx.rename(old, name)
                        data = after.pop(old)
                    elif how == "m":
                        names = [f"{name}/{i}" for i in range(size % 5) if f"{name}/{i}" not in after]
                        names = [n for n in names if n not in touched]
                        touched.update(names)
                        lengths = [(size * (i + 1)) % 7000 for i in range(len(names))]
                        data = content(self.seed, sum(lengths))
                        tx.put_many(names, bytearray(data), lengths, checksum_block_bytes=block)
                        ends = np.cumsum([0, *lengths]).tolist()
                        after.update({n: data[ends[i] : ends[i + 1]] for i, n in enumerate(names)})
                        continue
                    if how != "d":
                        after[name] = data
                if fail:
                    raise KeyError
            self.state = after
            self.since.append(after)
        except (KeyError, VolumeFull):
            pass

    @rule(share=st.integers(0, 120))
    def reserve(self, share: int) -> None:
        """Space for what is under "dir/": it is there when it is wanted, whatever else is written until then."""
        if self.reservation is not None and share < 20:
            self.reservation.release()
            self.reservation = None
            return
        try:
            self.reservation = self.session.reserve(self.session.free_bytes * share // 100, "dir/")
        except VolumeFull:
            return
        assert self.session.reserved_bytes == self.reservation.held_bytes

    @precondition(lambda self: self.reservation is not None)
    @rule(name=st.sampled_from(["dir/c", "dir/d"]), share=st.integers(1, 100))
    def use_reservation(self, name: str, share: int) -> None:
        assert self.reservation is not None
        # A checksum block, and half of what is promised: the catalogue's own space comes on top.
        size = max(0, self.reservation.held_bytes - 64 * KIB) * share // 200
        if name in self.state or any(one.startswith(name + "/") for one in self.state):
            return
        self.seed += 1
        data = content(self.seed, size)
        with self.session.transaction() as tx:
            tx.put(name, data)
        self.state = {**self.state, name: data}
        self.since.append(self.state)

    @rule(refresh=st.booleans())
    def look_lazily(self, refresh: bool) -> None:
        """A reader that is behind: it reads what it knows of, or hears that it is gone."""
        if refresh:
            self.lazy.refresh()
            self.since = [self.state]
        for name in [info.name for info in self.lazy.list()][:4]:
            try:
                found = self.lazy.read(name)
            except ObjectNotFound:
                assert any(name not in state or state[name] != self.since[0].get(name) for state in self.since)
                continue
            assert any(state.get(name) == found for state in self.since)

    def compose(self, tx: Transaction, name: str, new: bytes, block: int) -> bytes:
        """Parts of whatever is committed, and new bytes between them."""
        chance = random.Random(self.seed)
        parts: list[Part] = []
        expected = b""
        for _ in range(chance.randrange(5)):
            if self.state and chance.random() < 0.7:
                source = chance.choice(sorted(self.state))
                data = self.state[source]
                start = chance.randrange(len(data) + 1)
                length = chance.randrange(len(data) - start + 1)
                parts.append((source if chance.random() < 0.5 else self.volume.stat(source), start, length))
                expected += data[start : start + length]
            else:
                piece = new[: chance.randrange(len(new) + 1)]
                parts.append(piece if chance.random() < 0.5 else lambda piece=piece: piece)
                expected += piece
        assert tx.compose(name, parts, checksum_block_bytes=block) == len(expected)
        return expected

    @rule(clean=st.booleans())
    def new_session(self, clean: bool) -> None:
        self.reservation = None
        if clean:
            self.session.close()
            self.volume.close()
        else:
            self.session._beat.stop(None)
        self.volume = self.open(write=True)
        self.begin()

    @precondition(lambda self: self.state)
    @rule(data=st.data(), verify=st.booleans())
    def ranges(self, data: st.DataObject, verify: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.state)))
        expected = self.state[name]
        starts, lengths = [], []
        for _ in range(data.draw(st.integers(1, 5))):
            start = data.draw(st.integers(0, len(expected)))
            starts.append(start)
            lengths.append(data.draw(st.integers(0, len(expected) - start)))
        places = np.cumsum([0, *lengths[:-1]])
        buffers = [bytearray(sum(lengths)), bytearray(sum(lengths))]
        index = data.draw(st.lists(st.integers(0, 1), min_size=len(starts), max_size=len(starts)))
        volume = data.draw(st.sampled_from([self.volume, self.reader]))
        volume.refresh()
        volume.submit_read(name, starts, lengths, buffers, places, index, verify=verify).wait()
        for start, length, place, which in zip(starts, lengths, places, index, strict=True):
            assert buffers[which][place : place + length] == expected[start : start + length]

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "state"):
            return
        self.reader.refresh()
        for volume in (self.volume, self.reader):
            assert {info.name: info.length_bytes for info in volume.list()} == {
                k: len(v) for k, v in self.state.items()
            }
        for name, data in self.state.items():
            assert self.reader.read(name) == data
        session = self.session
        with session.lock:
            info = self.volume.info()
            together = session.free_bytes + info.used_bytes + session.quarantined_bytes + session.deallocating_bytes
        assert together == info.capacity_bytes

    def teardown(self) -> None:
        if hasattr(self, "session"):
            assert scrub(self.volume.devices).clean
            self.session.close()
            for volume in (self.volume, self.reader, self.lazy):
                volume.close()


class OverATarget(Operations):
    """The same over NVMe/TCP."""

    uris: list[str]

    def make(self, members: int, block: int) -> list[Any]:
        uris = self.uris[: max(1, members - 1)]
        Volume.create(uris, stripe_bytes=STRIPE, log_bytes=128 * KIB, force=True).close()
        return uris


def _run(machine: type[Operations], examples: int) -> None:
    assert heartbeat.SETTLE_S == 0
    settings_ = settings(
        max_examples=examples,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        print_blob=True,
    )
    run_state_machine_as_test(machine, settings=settings_)


@pytest.mark.usefixtures("nobody_else", "quick")
def test_operations() -> None:
    _run(Operations, int(os.environ.get("HEADRACE_FUZZ_EXAMPLES", "25")))


@pytest.mark.usefixtures("nobody_else")
def test_operations_over_a_target() -> None:
    with serving("nqn.2026-01.io.headrace:operations", "mem:2MiB", "mem:2MiB") as target:
        OverATarget.uris = [target.uri(1), target.uri(2)]
        _run(OverATarget, int(os.environ.get("HEADRACE_FUZZ_EXAMPLES", "4")))
