"""Operation fuzz against a dict: whatever is done, in whatever order, the volume holds what the dict holds."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import VolumeFull
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Session, Transaction, Volume
from headrace.volume.repair.scrub import scrub
from headrace.volume.writing import heartbeat
from headrace.volume.writing.compose import Part
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
        self.devices = [MemoryDevice(2 * MIB, block_bytes=block) for _ in range(members)]
        self.volume = Volume.create(devices=self.devices, stripe_bytes=STRIPE, log_bytes=128 * KIB)
        self.reader = Volume.open(self.devices)
        self.state: State = {}
        self.seed = 0
        self.begin()

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
        except (KeyError, VolumeFull):
            pass

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
        if clean:
            self.session.close()
        else:
            self.session._beat.stop(None)
        self.volume = Volume.open(self.devices, write=True)
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

    def teardown(self) -> None:
        if hasattr(self, "session"):
            assert scrub(self.devices).clean
            self.session.close()


@pytest.mark.usefixtures("nobody_else", "quick")
def test_operations() -> None:
    assert heartbeat.SETTLE_S == 0
    settings_ = settings(
        max_examples=25,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Operations, settings=settings_)
