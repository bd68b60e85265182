"""Commits so large that they are tables of their own: what they delete must be gone, whatever was there before."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from headrace.errors import ObjectExists, ObjectNotFound, UsageError, VolumeDamaged, VolumeFull
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Volume, layout
from headrace.volume.catalog import commit, compact
from headrace.volume.catalog.catalog import Catalog
from headrace.volume.catalog.tables.merge import Batch
from headrace.volume.repair.scrub import scrub
from headrace.volume.writing import names as writing_names
from headrace.volume.writing.session import Session
from tests.volume.support import KIB, STRIPE, content, state_of, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")


@pytest.fixture
def volume(monkeypatch: pytest.MonkeyPatch) -> Volume:
    """Commits of 3 KiB are tables; what is recent stays in the log for long."""
    monkeypatch.setattr(commit, "BULK_BYTES", 3 * KIB)
    devices = [MemoryDevice(8 * MIB) for _ in range(2)]
    return Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=256 * KIB)


def names(count: int) -> list[str]:
    return [f"{i:03d}/" + "x" * 200 for i in range(count)]


def put_few_at_a_time(session: Session, count: int) -> None:
    for name in names(count):
        with session.transaction() as tx:
            tx.put(name, name.encode())


def check(volume: Volume, expected: dict[str, bytes]) -> None:
    assert state_of(volume) == expected
    assert state_of(Volume.open(volume.devices)) == expected
    assert scrub(volume.devices).clean


def test_deleting_all_there_is_before_any_table(volume: Volume) -> None:
    """The table of the commit has nothing to say; the objects must be gone nevertheless, since their space is."""
    with writing(volume) as session:
        put_few_at_a_time(session, 16)
        assert not session.catalog.tables
        with session.transaction() as tx:
            assert tx.delete_prefix("0") == 16
        check(volume, {})
    check(volume, {})


def test_a_deletion_of_what_a_move_writes_as_a_table_meanwhile(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window for the table of a commit may need the log to move, and the move writes what is recent as a table."""
    with writing(volume) as session:
        put_few_at_a_time(session, 16)
        writer = session._writer
        assert not session.catalog.tables and session._allocator._free[0].total
        take, moved = writer._space.take, []  # type: ignore[union-attr]

        def window(size: int, least: int) -> object:
            if not moved and not writer._moving:
                # As `Allocator._extend` has it where the log has grown just so long.
                moved.append(True)
                writer._recent_bytes = 0
                writer.move(say_so=True)
            return take(size, least)

        monkeypatch.setattr(writer._space, "take", window)
        with session.transaction() as tx:
            for name in names(15):
                tx.delete(name)
        assert moved
        check(volume, {names(16)[15]: names(16)[15].encode()})


def test_many_objects_are_looked_up_together(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all of their names were deleted before, and where a few are put among many that were."""
    looks = 0
    get, batches = Catalog.get, Catalog.batches

    def counting(catalog: Catalog, key: bytes) -> bytes | None:
        nonlocal looks
        looks += 1
        return get(catalog, key)

    def every(catalog: Catalog, first: bytes, end: bytes | None = None) -> Iterator[Batch]:
        nonlocal looks
        for keys, values in batches(catalog, first, end):
            looks += len(keys) // 4
            yield keys, values

    many = [f"{i:05}" for i in range(2000)]
    data = b"x" * 2000
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put_many(many, data, 1)
        monkeypatch.setattr(Catalog, "get", counting)
        monkeypatch.setattr(Catalog, "batches", every)
        with session.transaction() as tx:
            assert tx.delete_prefix("0") == 2000
        with session.transaction() as tx:
            tx.put_many(many, data, 1)
        with session.transaction() as tx:
            assert tx.delete_prefix("0") == 2000
            tx.put_many(many, data, 1)
        with session.transaction() as tx:
            assert tx.delete_prefix("0") == 2000
        assert looks < 8000, "in each of five transactions less than one for an object"
        looks = 0
        with session.transaction() as tx:
            tx.put_many(["00000", "00001", "01999"], data, 1)
        assert looks < 200, "not one for each that was deleted"
        with pytest.raises(ObjectExists), session.transaction() as tx:
            tx.put_many(["00001", "00002"], data, 1)
    monkeypatch.undo()
    check(volume, {"00000": b"x", "00001": b"x", "01999": b"x"})


def test_space_that_has_two_owners_is_no_session(volume: Volume) -> None:
    """Deleting one of them would hand out the bytes of the other."""
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put("one", b"1" * 9000)
            tx.put("other", b"2" * 9000)
        one, other = (
            layout.ObjectValue.decode(session.catalog.get(layout.object_key(name)) or b"", name)
            for name in ("one", "other")
        )
        assert one.blob is not None and other.blob is not None
        twice = replace(other, blob=replace(other.blob, columns=one.blob.columns))
        writer = session._writer
        put = layout.Operation(layout.PUT, layout.object_key("other"), twice.encode())
        writer.commit(layout.encode_operations([put], twice.sequence, session.catalog.totals), session.number)
    again = Volume.open(volume.devices, write=True)
    with pytest.raises(VolumeDamaged, match="two owners"), writing(again):
        pass
    assert again.read("one") == b"1" * 9000


def test_a_merge_that_the_log_has_no_room_for_fails_no_commit(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "LEAST_BYTES", 64 * KIB)
    refused = []
    with writing(volume) as session:
        ensure_room = session._writer.ensure_room

        def full(blocks: int) -> None:
            if sys._getframe(1).f_code.co_name == "_replace":
                refused.append(blocks)
                raise VolumeFull("the volume's catalog is full")
            ensure_room(blocks)

        monkeypatch.setattr(session._writer, "ensure_room", full)
        for i in range(8):
            with session.transaction() as tx:
                for name in names(20):
                    tx.put(f"{i}/{name}", b"")
        # What it had taken is free again.
        assert refused and session._writer._compaction is not None
        out = sum(space.total for space in session._allocator._out)
        assert out == session._writer._compaction.space_bytes
        expected = {f"{i}/{name}": b"" for i in range(8) for name in names(20)}
        check(volume, expected)


def test_bytes_that_no_object_has_take_no_space(volume: Volume) -> None:
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put("first", b"")
        before = session.free_bytes
        with session.transaction() as tx:
            tx.put_many(["a", "b"], bytes(100_000), 0)
        assert session.free_bytes == before
        check(volume, {"first": b"", "a": b"", "b": b""})


def test_a_pack_that_finds_no_room_leaves_the_transaction_as_it_was(volume: Volume) -> None:
    many = names(40_000)
    with writing(volume) as session:
        with session.transaction() as tx:
            before = tx._record_bytes
            with pytest.raises(VolumeFull):
                tx.put_many(many, b"", 0)
            assert tx._record_bytes == before
            tx.put_many(many[:2], b"ab", 1)
        check(volume, {many[0]: b"a", many[1]: b"b"})


@pytest.mark.parametrize("members", [1, 2])
def test_tables_leave_what_was_deleted_to_its_readers(members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as there is other space: on one member, too, where both copies of a table stand."""
    monkeypatch.setattr(commit, "BULK_BYTES", 3 * KIB)
    devices = [MemoryDevice(16 * MIB) for _ in range(members)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=256 * KIB)
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put("read", content(1, 100_000))
        reader = Volume.open(devices)
        read = reader.stored("read")
        with session.transaction() as tx:
            tx.delete("read")
        freed = list(session._allocator._freed)
        for i in range(6):
            with session.transaction() as tx:
                tx.put_many([f"{i}/{name}" for name in names(20)], b"", 0)
        assert session.catalog.tables and freed
        assert set(freed) <= set(session._allocator._freed)
        assert reader.read("read") == content(1, 100_000) and read.length_bytes == 100_000


def test_a_reader_that_learns_of_a_deletion_between_an_object_and_its_blob(volume: Volume) -> None:
    """That is no damage: the object is not there any more."""
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put_many(["a", "b"], content(1, 2000), 1000)
        reader = Volume.open(volume.devices)
        value = reader._value

        def deleted_meanwhile(name: str) -> bytes:
            found = value(name)
            reader._value = value  # type: ignore[method-assign]
            with session.transaction() as tx:
                tx.delete_prefix("a")
                tx.delete_prefix("b")
            # As a look into a table that was replaced does.
            assert reader.refresh()
            return found

        reader._value = deleted_meanwhile  # type: ignore[method-assign]
        with pytest.raises(ObjectNotFound):
            reader.stored("a")


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("again", [False, True])
def test_a_volume_that_small_objects_filled_can_be_used_when_they_are_deleted(members: int, again: bool) -> None:
    volume = Volume.create(
        devices=[MemoryDevice(2 * MIB // members) for _ in range(members)], stripe_bytes=STRIPE, log_bytes=128 * KIB
    )
    session = volume.session("test", heartbeat_s=60.0)
    rounds = 0
    with session.transaction() as tx:
        tx.put("kept", b"1")
    with suppress(VolumeFull):
        while True:
            with session.transaction() as tx:
                tx.put_many([f"old/{rounds}/{i:03}" for i in range(500)], bytes(500), 1)
            rounds += 1
    assert rounds > 1
    with session.transaction() as tx:
        assert tx.delete_prefix("old/") == 500 * rounds
    if again:
        # Another session finds the tables that nobody needs, too.
        session.close()
        session = volume.session("test", heartbeat_s=60.0)
    with session:
        with session.transaction() as tx:
            tx.put("half", bytes(session.free_bytes * 3 // 4))
        info = volume.info()
        assert info.used_bytes + info.free_bytes == info.capacity_bytes
    assert sorted(state_of(Volume.open(volume.devices))) == ["half", "kept"]
    assert scrub(volume.devices).clean


@pytest.mark.parametrize("seed", [26, 31, 39])
def test_in_a_full_volume_deletions_work_and_their_space_comes_back(seed: int) -> None:
    chance = random.Random(seed)
    members, tail = chance.choice((1, 2)), "x" * chance.choice((1, 300, 1000))
    devices = [MemoryDevice(2 * MIB // members) for _ in range(members)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB)
    there: list[str] = []
    with volume.session("test", heartbeat_s=60.0) as session:
        for _ in range(2):
            count = 200
            while count:
                new = [f"{chance.randrange(10**9)}/{tail}" for _ in range(count)]
                try:
                    with session.transaction() as tx:
                        tx.put_many(new, bytes(count), 1)
                    there += new
                except VolumeFull:
                    count //= 4
            chance.shuffle(there)
            left = int(len(there) * chance.choice((0.0, 0.1, 0.5)))
            while len(there) > left:
                with session.transaction() as tx:
                    for name in there[-chance.choice((1, 30, 300)) :]:
                        tx.delete(name)
                        there.remove(name)
        with session.transaction() as tx:
            for name in there:
                tx.delete(name)
        assert volume.info().quarantined_bytes == 0
        with session.transaction() as tx:
            tx.put("all", bytes(volume.info().capacity_bytes * 9 // 10))
    assert scrub(devices).clean


@pytest.mark.parametrize("large", [8192, 1000])
def test_packed_objects_among_others_in_one_commit(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that is a table: loose changes before, between and behind the packed ones, and what was recent. Names of
    a large pack are looked for in another way."""
    monkeypatch.setattr(writing_names, "_MANY", large)
    devices = [MemoryDevice(32 * MIB) for _ in range(2)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE)
    expected: dict[str, bytes] = {}
    with writing(volume) as session:
        for name in ("a", "p/0500", "p/0700x", "z"):
            with session.transaction() as tx:
                tx.put(name, name.encode())
            expected[name] = name.encode()
        with session.transaction() as tx:
            tx.delete("p/0500")
            tx.delete("a")
            tx.put("p/0333x", b"between")
            tx.put("zz", b"behind")
            lengths = [0 if i % 7 == 0 else i % 50 for i in range(2000)]
            names = [f"p/{i:04}" for i in range(2000)]
            data = content(1, sum(lengths))
            with pytest.raises(VolumeFull):
                tx.put_many(names, bytes(100 * MIB), 1)
            tx.put_many(names, data, lengths)
            tx.put_many(["more/1", "more/0"], b"10", 1)
            with pytest.raises(UsageError, match="already"):
                tx.put("p/0001", b"")
            more = [f"p/{i:04}" for i in range(2000, 4000)]
            for again in (["p/1999", "x"], ["x", *more[:500], "p/0333x"], ["p/1999", *more], [*more, "zz"]):
                with pytest.raises(UsageError, match="already"):
                    tx.put_many(again, b"", 0)
        del expected["a"]
        expected |= {"p/0333x": b"between", "zz": b"behind", "more/0": b"0", "more/1": b"1"}
        at = 0
        for name, length in zip(names, lengths, strict=True):
            expected[name] = data[at : at + length]
            at += length
        with pytest.raises(ObjectExists), session.transaction() as tx:
            tx.put_many([f"q/{i:04}" for i in range(2000)] + ["p/1999"], b"", 0)
        assert state_of(volume) == expected
    assert volume._catalog.tables and state_of(Volume.open(devices)) == expected
    assert scrub(devices).clean


@pytest.mark.parametrize("bad", ["", "/", "/a", "a/", "a//b", "a\0b", "\ud800", "x" * 1025, "a/\0", "\0"])
def test_names_that_no_object_of_many_can_have(bad: str, volume: Volume) -> None:
    with writing(volume) as session, session.transaction() as tx:
        for names in ([bad], ["a", bad, "z"], [bad, "z"], ["a", bad]):
            with pytest.raises(UsageError, match="not a name"):
                tx.put_many(names, b"", 0)
        tx.put_many(["n", "nn", "n/n", "x" * 1024, "é/0", "0"], b"", 0)
