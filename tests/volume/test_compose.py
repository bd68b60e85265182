"""Objects as slices of blobs: composed, packed, renamed; what keeps bytes alive, and what frees them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from headrace.errors import ChecksumMismatch, ObjectExists, ObjectNotFound, UsageError, VolumeDamaged, VolumeFull
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Session, Volume
from headrace.volume.catalog import changes
from headrace.volume.catalog.tables import Table
from headrace.volume.repair.scrub import scrub
from tests.volume.support import KIB, STRIPE, content, state_of, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")
A, B = content(1, 150 * KIB), content(2, 10_000)


def small() -> tuple[list[MemoryDevice], Volume]:
    devices = [MemoryDevice(2 * MIB) for _ in range(2)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB)
    with writing(volume) as session, session.transaction() as tx:
        tx.put("a", A)
        tx.put("b", B, checksum_block_bytes=4096)
    return devices, volume


def kinds(volume: Volume) -> dict[str, bool]:
    """Name -> does it lie in its own entry."""
    return {info.name: info.birth != 0 for info in volume.list()}


def test_a_composed_object_takes_space_for_new_bytes_only() -> None:
    devices, volume = small()
    used = volume.info().used_bytes
    parts = [b"head" * 10, ("a", 1000, 100_000), ("b", 1, None), ("a", 0, 0), b"", bytearray(b"tail")]
    expected = b"head" * 10 + A[1000:101_000] + B[1:] + b"tail"
    with writing(volume) as session, session.transaction() as tx:
        assert tx.compose("c", parts, checksum_block_bytes=4096) == len(expected)
    assert volume.info().used_bytes == used + 4096
    # The sources are what they were, and no longer the only users of their bytes.
    assert kinds(volume) == {"a": False, "b": False, "c": False}
    reader = Volume.open(devices)
    assert state_of(reader) == {"a": A, "b": B, "c": expected}
    assert reader.stat("a").sequence < reader.stat("c").sequence
    assert reader.read("c", 39, 3) == expected[39:42]
    # Ranges in any order, over parts with checksum blocks of two sizes, into one buffer.
    starts, lengths = [100_000, 0, 40, 109_990], [5, 41, 1, 40]
    buffer = bytearray(200)
    reader.submit_read("c", starts, lengths, [buffer], np.cumsum([0, *lengths[:-1]])).wait()
    assert buffer[: sum(lengths)] == b"".join(expected[s : s + n] for s, n in zip(starts, lengths, strict=True))
    assert scrub(devices).clean


def test_bytes_live_until_the_last_object_that_has_them_is_deleted() -> None:
    devices, volume = small()
    with writing(volume) as session:
        free = session.free_bytes
        with session.transaction() as tx:
            tx.compose("c", [("a", 5, 10)])
            tx.compose("d", [("a", 100, 5)])
        with session.transaction() as tx:
            tx.delete("a")
            tx.delete("b")
        assert volume.read("c") == A[5:15] and session.free_bytes < free + 150 * KIB
        with session.transaction() as tx:
            tx.compose("e", [("c", 1, 3), ("d", 0, 2)])
            tx.delete("c")
        assert Volume.open(devices).read("e") == A[6:9] + A[100:102]
        with session.transaction() as tx:
            tx.delete("d")
        assert session.free_bytes < free + 150 * KIB and scrub(devices).clean
        with session.transaction() as tx:
            assert tx.delete_prefix("e") == 1
        info = volume.info()
        assert (info.object_count, info.used_bytes) == (0, 0)
        assert session.free_bytes == info.free_bytes == info.capacity_bytes
    assert scrub(devices).clean


def test_without_counting_shared_bytes_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    original = changes.Changes.finish

    def careless(self: changes.Changes) -> changes.Outcome:
        for birth, delta in self._delta.items():
            if delta < 0:
                self._delta[birth] = -self._counts.get(birth, 0)
        return original(self)

    def run() -> None:
        devices, volume = small()
        with writing(volume) as session:
            with session.transaction() as tx:
                tx.compose("c", [("a", 5, 100_000)])
            with session.transaction() as tx:
                tx.delete("a")
        assert Volume.open(devices).read("c") == A[5:100_005] and scrub(devices).clean

    run()
    monkeypatch.setattr(changes.Changes, "finish", careless)
    with pytest.raises(VolumeDamaged, match="missing"):
        run()


def two_at_once(session: Session, volume: Volume) -> None:
    """A transaction refers to bytes; another deletes the object meanwhile, and the space is wanted."""
    one = session.transaction()
    one.compose("c", [("a", 5, 100_000), b"new"])
    with session.transaction() as other:
        other.delete("a")
    for i in range(40):
        with session.transaction() as tx:
            if i:
                tx.delete("x")
            tx.put("x", content(9 + i, 400 * KIB))
    one.commit()
    assert volume.read("c") == A[5:100_005] + b"new"


def test_space_that_an_open_transaction_refers_to_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, volume = small()
    with writing(volume) as session:
        two_at_once(session, volume)
        assert scrub(devices).clean
        used = volume.info().used_bytes
        # And one that is aborted lets go of it.
        aborted = session.transaction()
        aborted.compose("d", [("c", 0, 10), ("b", 0, 10)])
        with session.transaction() as tx:
            tx.delete("c")
            tx.delete("x")
        free = session.free_bytes
        aborted.abort()
        assert session.free_bytes > free
        assert session.free_bytes == volume.info().free_bytes and volume.info().used_bytes < used
    monkeypatch.setattr(Session, "pin", lambda self, blobs: None)
    monkeypatch.setattr(Session, "_unpin", lambda self, births: None)
    devices, volume = small()
    with writing(volume) as session, pytest.raises(ChecksumMismatch):
        two_at_once(session, volume)


def test_an_object_that_another_transaction_renames_is_shared_all_the_same() -> None:
    devices, volume = small()
    with writing(volume) as session:
        one = session.transaction()
        one.compose("c", [("a", 5, 10)])
        with session.transaction() as other:
            other.rename("a", "z")
        one.commit()
        with session.transaction() as tx:
            tx.delete("z")
    assert state_of(Volume.open(devices)) == {"b": B, "c": A[5:15]}
    assert scrub(devices).clean


def test_rename_moves_a_name_and_nothing_else() -> None:
    devices, volume = small()
    reader = Volume.open(devices)
    info = reader.stat("a")
    before = bytes(devices[0].data), bytes(devices[1].data)
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.rename("a", "dir/a")
            with pytest.raises(ObjectNotFound):
                tx.rename("a", "q")
            with pytest.raises(ObjectExists):
                tx.rename("b", "b")
            with pytest.raises(ObjectExists):
                tx.put("b", b"")
        with session.transaction() as tx:
            # Two names change places.
            tx.delete("b")
            tx.rename("dir/a", "b")
            tx.put("dir/a", b"1")
        with pytest.raises(ObjectNotFound), session.transaction() as tx:
            tx.rename("nothing", "n")
    data = volume.superblock.members[0].data_offset, volume.superblock.members[0].data_end
    assert bytes(devices[0].data[data[0] : data[0] + 64 * KIB]) == before[0][data[0] : data[0] + 64 * KIB]
    assert state_of(Volume.open(devices)) == {"b": A, "dir/a": b"1"}
    reader.refresh()
    with pytest.raises(ObjectNotFound):
        reader.submit_read(info, [0], [1], [bytearray(1)], [0])
    assert kinds(reader) == {"b": True, "dir/a": True}
    assert scrub(devices).clean


def test_damage_of_shared_bytes_names_every_object_that_has_them() -> None:
    devices, volume = small()
    with writing(volume) as session, session.transaction() as tx:
        tx.compose("c", [b"x", ("b", 4000, 200)])
        tx.compose("d", [("b", 9000, None)])
    member, offset, _ = volume.stored("b").blobs[0].data.used()[0]
    devices[member].data[offset + 4096] ^= 1
    findings = {(f.object_name, f.object_offset) for f in scrub(devices).findings}
    # Of "c", the 96 bytes before the damaged block are good.
    assert findings == {("b", 4096), ("c", 97)}
    with pytest.raises(ChecksumMismatch, match="object 'c'"):
        volume.read("c")
    assert volume.read("c", 0, 97) == b"x" + B[4000:4096] and volume.read("d") == B[9000:]


def test_what_cannot_be_composed() -> None:
    devices, volume = small()
    with writing(volume) as session:
        before = session.free_bytes
        for parts, error in (
            ([("a", 0, len(A) + 1)], UsageError),
            ([("a", len(A) + 1, None)], UsageError),
            ([("a", -1, 5)], UsageError),
            ([("a", 0.5, 5)], UsageError),
            ([("a", 1 << 64, 1)], UsageError),
            ([("a", 0)], UsageError),
            ([("nothing", 0, 1)], ObjectNotFound),
            ([b"new", np.zeros((4, 4))[:, 1]], UsageError),
            ([5], UsageError),
        ):
            with pytest.raises(error), session.transaction() as tx:
                tx.compose("c", parts)  # type: ignore[arg-type]
        with pytest.raises(ObjectExists), session.transaction() as tx:
            tx.compose("b", [("a", 0, 1)])
        with session.transaction() as tx:
            tx.compose("nothing", [])
            # A name again after a failure; and append, which is a replacement by itself and more.
            with pytest.raises(ObjectNotFound):
                tx.compose("c", [("nowhere", 0, 1)])
            tx.compose("c", [("b", 0, 1)])
            tx.delete("b")
            tx.compose("b", [("b", 0, None), b"more"])
        assert session.free_bytes >= before - 8192
    assert volume.read("b") == B + b"more" and volume.read("nothing") == b""
    assert scrub(devices).clean


def test_an_object_with_too_many_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.volume.writing import compose

    monkeypatch.setattr(compose, "MAX_SLICES", 10)
    _, volume = small()
    with writing(volume) as session:
        with session.transaction() as tx:
            # What goes on where the part before ended is one slice.
            tx.compose("c", [("a", i, 1) for i in range(1000)])
        with pytest.raises(UsageError, match="too many parts"), session.transaction() as tx:
            tx.compose("d", [("a", 2 * i, 1) for i in range(11)])
    assert volume.read("c") == A[:1000]


# ---- many at once ----------------------------------------------------------------------------------------------------


def test_many_objects_are_one_blob() -> None:
    devices, volume = small()
    used = volume.info().used_bytes
    names = [f"n/{i:03}" for i in range(100)]
    data = np.frombuffer(content(3, 100 * 100), np.uint8).reshape(100, 100)
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put_many(reversed(names), data, 100)
            tx.put_many(["empty", "overlap", "rest"], data, [0, 50, 30], offsets=[7, 10, 9970])
            tx.put_many([], b"", [])
        assert volume.info().used_bytes == used + 2 * 12 * KIB
        expected = {name: data[99 - i].tobytes() for i, name in enumerate(names)}
        expected |= {"empty": b"", "overlap": data.tobytes()[10:60], "rest": data.tobytes()[-30:], "a": A, "b": B}
        assert state_of(Volume.open(devices)) == expected
        assert scrub(devices).clean
        with session.transaction() as tx:
            assert tx.delete_prefix("n/0") == 100
        assert volume.info().used_bytes == used + 12 * KIB
    assert scrub(devices).clean


def test_what_cannot_be_many() -> None:
    _, volume = small()
    with writing(volume) as session:
        before = session.free_bytes
        for names, data, lengths, offsets, error in (
            (["x", "y"], b"123", [1], None, UsageError),
            (["x"], b"123", [4], None, UsageError),
            (["x"], b"123", [-1], None, UsageError),
            (["x"], b"123", [1], [3], UsageError),
            (["x"], b"123", [1.0], None, UsageError),
            (["x"], b"123", [2**63], None, UsageError),
            (["x", "x"], b"123", [1, 1], None, UsageError),
            (["x", "y/"], b"123", [1, 1], None, UsageError),
            (["x", "a//b"], b"123", [1, 1], None, UsageError),
            (["x", "/y"], b"123", [1, 1], None, UsageError),
            (["x\0y"], b"123", [1], None, UsageError),
            (["x", ""], b"123", [1, 1], None, UsageError),
            (["x", "\udcff"], b"123", [1, 1], None, UsageError),
            (["x", "n" * 1025], b"123", [1, 1], None, UsageError),
            (["x", 5], b"123", [1, 1], None, UsageError),
            (["x"], np.zeros((4, 4))[:, 1], [1], None, UsageError),
            (["x", "b"], b"123", [1, 1], None, ObjectExists),
            (["x"], bytes(8 * MIB), [1], None, VolumeFull),
        ):
            with pytest.raises(error), session.transaction() as tx:
                tx.put_many(names, data, lengths, offsets)  # type: ignore[arg-type]
            assert session.free_bytes == before
        with session.transaction() as tx:
            # What did not fit leaves the transaction as it was.
            for name in ("x", "b/c"):
                with pytest.raises(VolumeFull):
                    tx.put_many([name], bytes(8 * MIB), 1)
                with pytest.raises(VolumeFull):
                    tx.put(name, bytes(8 * MIB))
            tx.delete("b")
            tx.put_many(["x", "b"], b"123", [1, 2])
            with pytest.raises(UsageError, match="already"):
                tx.put_many(["y", "b"], b"123", [1, 2])
            with pytest.raises(UsageError, match="already"):
                tx.put("x", b"")
    assert volume.read("b") == b"23"


def test_a_buffer_in_pieces_is_refused_before_space_is_taken() -> None:
    _, volume = small()
    pieces = np.zeros((64, 64), np.uint8)
    with writing(volume) as session:
        before = session.free_bytes
        for bad in (pieces[:, 1], pieces.T[:5], memoryview(bytes(100))[::2]):
            with pytest.raises(UsageError, match="one piece"), session.transaction() as tx:
                tx.put("x", bad)
            assert session.free_bytes == before
        with session.transaction() as tx:
            tx.put("x", memoryview(np.zeros((0, 5))))
            tx.put("y", np.array(7, "<u2"))
    assert volume.read("x") == b"" and volume.read("y") == b"\x07\0"


def test_a_closed_volume_says_so() -> None:
    _, volume = small()
    volume.close()
    for what in (
        volume.list,
        lambda: volume.stat("a"),
        lambda: volume.read("a"),
        lambda: "a" in volume,
        lambda: volume.refresh(),
    ):
        with pytest.raises(UsageError, match="the volume is closed"):
            what()


def test_many_objects_are_shared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kind, by one look at the catalogue, or nothing of it."""
    devices = [MemoryDevice(8 * MIB) for _ in range(2)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=256 * KIB)
    packed = {f"from/p/{number:04}": b"%d" % number for number in range(1000)}
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put_many([*packed], b"".join(packed.values()), [len(data) for data in packed.values()])
            for name, data in (("from/whole", A), ("from/empty", b"")):
                tx.put(name, data)
        with session.transaction() as tx:
            tx.compose("from/composed", [("from/whole", 5, 70_000), ("from/p/0100", 0, None), b"new"])
            tx.put("to/composed", b"gives way")
        made = packed | {"from/whole": A, "from/empty": b"", "from/composed": A[5:70_005] + b"100new"}
        used = volume.info().used_bytes
        infos = volume.list("from/")
        names = [info.name.replace("from/", "to/") for info in infos]
        other = dataclasses.replace(infos[7], sequence=99)
        missing = dataclasses.replace(infos[7], name="from/nothing")
        tx = session.transaction()
        for some, error in (
            ((infos, names), ObjectExists),
            ((infos, names[:-1]), UsageError),
            ((infos, [*names[:-1], names[0]]), UsageError),
            (([other, *infos[1:]], names), ObjectNotFound),
            (([missing, *infos[1:]], names), ObjectNotFound),
        ):
            with pytest.raises(error):
                tx.compose_whole(*some, replace=() if error is ObjectExists else {"to/composed"})
            assert tx._record_bytes == 0 and not session._pins
        looks = 0
        decode = Table._decode

        def counted(self: Table, data: bytes, child: Any) -> Any:
            nonlocal looks
            looks += 1
            return decode(self, data, child)

        monkeypatch.setattr(Table, "_decode", counted)
        tx.compose_whole(infos, names, replace={"to/composed"})
        tx.commit()
        # Not one for each object: of each table the leaves with these keys, some times over.
        assert 0 < looks < len(infos) // 4
        with pytest.raises(ObjectExists), session.transaction() as tx:
            tx.compose_whole(infos[:1], ["to/whole"])
        assert [info.name for info in volume.list()] == sorted([*made, *names])
        assert volume.info().used_bytes - used < 512 * KIB, "but for the catalogue, which is larger"
        with session.transaction() as tx:
            tx.delete_prefix("from/")
        assert [info.name for info in volume.list()] == sorted(names)
        for old in sorted(made)[::50] + sorted(made)[-3:]:
            assert volume.read(old.replace("from/", "to/")) == made[old]
    assert scrub(devices).clean
