"""Operation fuzz against a dict: whatever is done, in whatever order, the volume holds what the dict holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import VolumeFull
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Session, Volume, heartbeat
from headrace.volume.scrub import scrub
from tests.volume.support import KIB, STRIPE, State, content

NAMES = st.sampled_from(["a", "b", "dir/c", "dir/d"])
SIZES = st.one_of(
    st.integers(0, 10 * KIB), st.integers(0, 400 * KIB), st.sampled_from([0, 1, 4096, STRIPE, 2 * STRIPE])
)
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

    @rule(changes=st.lists(st.tuples(NAMES, SIZES, BLOCKS, st.sampled_from("pdsg")), max_size=4), fail=st.booleans())
    def transaction(self, changes: list[tuple[str, int, int, str]], fail: bool) -> None:
        after = dict(self.state)
        touched: set[str] = set()
        try:
            with self.session.transaction() as tx:
                for name, size, block, how in changes:
                    if name in touched:
                        continue
                    touched.add(name)
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
                    if how != "d":
                        after[name] = data
                if fail:
                    raise KeyError
            self.state = after
        except (KeyError, VolumeFull):
            pass

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
