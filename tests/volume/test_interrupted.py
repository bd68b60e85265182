"""Ctrl-C in the middle of anything: no two objects get the same space, and none gets lost; a buffer is its caller's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.device import flush_all
from headrace.errors import DeviceTimeout, HeadraceError, SessionLost
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Volume, many
from headrace.volume.repair.scrub import scrub
from tests.volume.support import KIB, STRIPE, state_of, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")


def interrupt(*args: object, **options: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def volume() -> Volume:
    return Volume.create(devices=[MemoryDevice(4 * MIB) for _ in range(2)], stripe_bytes=STRIPE, log_bytes=128 * KIB)


@pytest.mark.parametrize("where", ["mark", "apply", "free"])
def test_between_the_record_and_the_catalogue_the_session_ends(
    volume: Volume, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put("before", b"0" * 50_000)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), session.transaction() as tx:
            tx.put("x", b"1" * 50_000)
            tx.delete("before")
            owner = {"mark": session._writer, "apply": session.catalog, "free": session._allocator}[where]
            patch.setattr(owner, where, interrupt)
        with pytest.raises(SessionLost), session.transaction() as tx:
            tx.put("y", b"2" * 50_000)
    again = Volume.open(volume.devices, write=True)
    with writing(again) as session, session.transaction() as tx:
        tx.put("z", b"3" * 3 * MIB)
    assert state_of(again) == {"x": b"1" * 50_000, "z": b"3" * 3 * MIB}
    assert scrub(volume.devices).clean


def test_after_it_the_objects_keep_their_space(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when all that waits for late writes is set free, as a renewal does."""
    with writing(volume) as session:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), session.transaction() as tx:
            tx.put("x", b"1" * 50_000)
            patch.setattr(session._writer, "compact", interrupt)
        session._allocator.settle()
        expected = {"x": b"1" * 50_000}
        for i in range(100):
            # Large ones, and at last all that is left.
            name, data = f"y/{i}", bytes([i]) * (300_000 if session.free_bytes > 900_000 else 20_000)
            try:
                with session.transaction() as tx:
                    tx.put(name, data)
                expected[name] = data
            except HeadraceError:
                break
        assert session.free_bytes < 300_000 and state_of(volume) == expected
    assert scrub(volume.devices).clean


@pytest.mark.parametrize("where", ["_write_header", "_write"])
def test_a_session_does_not_go_on_where_the_log_is_not(
    volume: Volume, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written, and then interrupted: in the header of a move, or in any record."""
    expected: dict[str, bytes] = {}
    with writing(volume) as session:
        writer = session._writer
        write = getattr(writer, where)

        def interrupted(*args: object) -> None:
            write(*args)
            raise KeyboardInterrupt

        # As the target of a move has it, where nothing but the log keeps others out.
        monkeypatch.setattr(session, "_look_at_log", lambda: None)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(writer, where, interrupted)
            for i in range(40):
                with session.transaction() as tx:
                    tx.put(f"{i}", b"1")
                expected[f"{i}"] = b"1"
        with pytest.raises(SessionLost), session.transaction() as tx:
            tx.put("after", b"2")
    found = state_of(Volume.open(volume.devices))
    assert found.items() >= expected.items() and len(found) <= len(expected) + 1
    assert scrub(volume.devices).clean


def test_a_merge_is_in_the_log_and_in_memory_or_the_session_ends(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing(volume) as session:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(session.catalog, "_replace", interrupt)
            for i in range(40):
                with session.transaction() as tx:
                    tx.put_many([f"{i:02}/{j:03}" + "x" * 100 for j in range(300)], bytes(300), 1)
        with pytest.raises(SessionLost), session.transaction() as tx:
            tx.put("after", b"2")
    again = Volume.open(volume.devices, write=True)
    assert len(again.list()) == 300 * (i + 1)
    with writing(again) as session, session.transaction() as tx:
        tx.put("after", b"2")
    assert scrub(volume.devices).clean


@pytest.mark.parametrize("verb", ["put_many", "compose"])
def test_what_was_written_and_not_noted_takes_no_space(volume: Volume, verb: str) -> None:
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put("before", b"0" * 5000)
        free, tx = session.free_bytes, session.transaction()
        if verb == "put_many":
            tx._packs = Interrupted()  # type: ignore[assignment]
            with pytest.raises(KeyboardInterrupt):
                tx.put_many(["a", "b"], bytes(300_000), [100_000, 200_000])
            tx._packs = []
        else:
            tx._composed = Interrupted()  # type: ignore[assignment]
            with pytest.raises(KeyboardInterrupt):
                tx.compose("c", [("before", 0, None), bytes(300_000)])
            tx._composed = {}
        tx.put("x", b"1" * 5000)
        tx.commit()
        assert session.free_bytes == free - 8192 and session.quarantined_bytes == 0
    assert state_of(volume) == {"before": b"0" * 5000, "x": b"1" * 5000}
    assert scrub(volume.devices).clean


class Interrupted:
    """Ctrl-C comes a moment before something is noted here."""

    append = __setitem__ = interrupt


def test_ctrl_c_is_heard_behind_an_error_of_a_device() -> None:
    class Failing(MemoryDevice):
        def __init__(self, error: BaseException) -> None:
            super().__init__(MIB)
            self.error = error

        def flush(self) -> None:
            raise self.error

    devices = [Failing(DeviceTimeout("no answer")), Failing(KeyboardInterrupt()), Failing(DeviceTimeout("no answer"))]
    with pytest.raises(KeyboardInterrupt):
        flush_all(devices)
    with pytest.raises(DeviceTimeout):
        flush_all([devices[0], devices[2]])


def test_a_buffer_is_the_callers_again_when_all_reads_into_it_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of small objects whose blobs have checksum blocks of two sizes, each of which is a transfer."""
    volume = Volume.create([f"file:{tmp_path / 'member'}?create=8MiB"], stripe_bytes=STRIPE)
    with volume:
        with writing(volume) as session, session.transaction() as tx:
            tx.put("small", b"1" * 5000, checksum_block_bytes=4096)
            tx.put("large", b"2" * 5000, checksum_block_bytes=8192)
        begun: list[Any] = []
        ended: list[Any] = []

        class Interrupts:
            """A transfer whose first wait is interrupted."""

            def __init__(self, transfer: Any) -> None:
                self._transfer = transfer
                self._waits = 0
                begun.append(self)

            def wait(self) -> None:
                self._waits += 1
                if begun[0] is self and self._waits == 1:
                    raise KeyboardInterrupt
                self._transfer.wait()
                ended.append(self)

        submit = many.submit_ranges
        monkeypatch.setattr(many, "submit_ranges", lambda *arguments: Interrupts(submit(*arguments)))
        buffer = np.zeros(10_000, np.uint8)
        with pytest.raises(KeyboardInterrupt):
            many.read_many(volume, [volume.stat("small"), volume.stat("large")], [0, 5000], buffer)
        assert len(begun) == 2 and set(ended) == set(begun)
        assert buffer.tobytes() == b"1" * 5000 + b"2" * 5000
