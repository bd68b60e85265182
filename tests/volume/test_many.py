"""Many objects in one read, and what is wrong with one of them."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import ChecksumMismatch, ObjectNotFound
from headrace.testing import MemoryDevice
from headrace.volume import Volume
from headrace.volume.data.objects import StoredBlob
from headrace.volume.many import read_many
from headrace.volume.repair.check import verify_objects
from tests.volume.support import KIB, STRIPE, State, content, writing


def volume_of() -> tuple[list[MemoryDevice], Volume, State]:
    """Objects of every kind: packed, whole blobs, composed, empty."""
    devices = [MemoryDevice(8192 * KIB) for _ in range(2)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=512 * KIB)
    state: State = {f"p/{number:03}": content(number, 37 * number) for number in range(200)}
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put_many([*state], b"".join(state.values()), [len(data) for data in state.values()])
            for name, size, block in (("w/a", 300_000, 64 * KIB), ("w/b", 5000, 4096), ("w/empty", 0, 4096)):
                state[name] = content(size, size)
                tx.put(name, state[name], checksum_block_bytes=block)
        with session.transaction() as tx:
            tx.compose("c", [("w/a", 100, 70_000), b"new bytes", ("p/150", 3, 1000)])
    state["c"] = state["w/a"][100:70_100] + b"new bytes" + state["p/150"][3:1003]
    return devices, volume, state


@pytest.mark.parametrize("gap", [0, 100])
def test_every_object_in_its_place(gap: int) -> None:
    _, volume, state = volume_of()
    infos = volume.list()
    offsets, end = [], 0
    for info in infos:
        offsets.append(end)
        end += info.length_bytes + gap
    buffer = np.zeros(end, np.uint8)
    read_many(volume, infos, offsets, buffer)
    for info, offset in zip(infos, offsets, strict=True):
        assert buffer[offset : offset + info.length_bytes].tobytes() == state[info.name]
        assert not buffer[offset + info.length_bytes : offset + info.length_bytes + gap].any()


def test_the_damaged_one_is_found() -> None:
    devices, volume, state = volume_of()
    start = int(volume.stored("p/120").value.slices["start"][0])
    piece = volume.stored("p/120").blobs[0].data.pieces(np.array([start]), np.array([1]))
    devices[int(piece.member[0])].data[int(piece.offset[0] + piece.skip[0])] ^= 1
    buffer = np.zeros(1 << 20, np.uint8)
    with pytest.raises(ChecksumMismatch):
        read_many(volume, [volume.stat("p/120")], [0], buffer)
    verdicts = list(verify_objects(volume, volume.list()))
    assert sum(length for _, length, _ in verdicts) == sum(map(len, state.values()))
    # Those that share its checksum block, and nothing else.
    bad = {info.name for info, _, error in verdicts if error is not None}
    block = start // 4096
    touching = set()
    for info in volume.list("p/"):
        rows = volume.stored(info).value.slices.tolist()
        if any(first // 4096 <= block <= (first + length - 1) // 4096 for _, first, length in rows):
            touching.add(info.name)
    assert "p/120" in bad and bad == touching


def test_one_that_was_replaced() -> None:
    _, volume, _ = volume_of()
    old = volume.stat("p/007")
    with writing(volume) as session, session.transaction() as tx:
        tx.delete("p/007")
        tx.put("p/007", b"other")
    with pytest.raises(ObjectNotFound, match="replaced"):
        read_many(volume, [old], [0], np.zeros(1000, np.uint8))


def test_one_that_is_deleted_while_it_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object's value, and then its blob: neither out of a state that the other is not of."""
    devices, volume, _ = volume_of()
    reader = Volume.open(devices)
    info = reader.stat("p/120")
    look, looks = Volume._blob, []

    def deleted_before(self: Volume, birth: int) -> StoredBlob:
        if self is reader and not looks:
            looks.append(birth)
            with writing(volume) as session, session.transaction() as tx:
                tx.delete_prefix("p/")
                tx.delete("c")
            reader.refresh()
        return look(self, birth)

    monkeypatch.setattr(Volume, "_blob", deleted_before)
    with pytest.raises(ObjectNotFound, match="p/120"):
        read_many(reader, [info], [0], np.zeros(10_000, np.uint8))
    assert looks
