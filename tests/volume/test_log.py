"""The log: the marker rule, two copies, areas."""

from __future__ import annotations

import pytest

from headrace.device.protocol import Buffer
from headrace.errors import (
    CommandFailed,
    DeviceTimeout,
    HeadraceError,
    ObjectNotFound,
    SessionLost,
    VolumeDamaged,
    VolumeError,
    VolumeFull,
)
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Volume
from headrace.volume.catalog import commit, log
from headrace.volume.catalog.commit import LogWriter
from headrace.volume.layout import ALIGN, RECORD_BYTES, RecordHead
from headrace.volume.repair.scrub import scrub
from tests.volume.fenced import World, stopped
from tests.volume.support import KIB, STRIPE, Model, content, crash_volume, open_read, state_of, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")


def vanished_commits() -> int:
    """A reader looks during every command, whose effect is visible before it is durable; then the power fails.

    How many commits that it saw does the next session not find?
    """
    timeline, volume = crash_volume(2)
    timeline.begin()
    seen: list[tuple[int, dict[str, bytes]]] = []

    def look(index: int) -> None:
        live = []
        for device in timeline.devices:
            copy = MemoryDevice(device.size_bytes)
            copy.data[:] = device.data
            live.append(copy)
        seen.append((index, open_read(live)))

    timeline.after_event = look
    with writing(volume) as session:
        for i in range(3):
            with session.transaction() as tx:
                tx.put(f"object {i}", content(i, 5 * KIB))
    timeline.after_event = None
    vanished = 0
    for index, state in seen:
        left = Volume.open(timeline.crash(index).nothing(), write=True)
        with writing(left, "next"):
            vanished += len(state) > len(left.list())
    return vanished


def test_no_commit_vanishes_from_a_readers_eyes() -> None:
    assert vanished_commits() == 0


def test_without_the_marker_commits_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "believed", lambda record, durable: True)
    assert vanished_commits() > 0


def devices_of(count: int, size: int = 4 * MIB) -> list[MemoryDevice]:
    return [MemoryDevice(size) for _ in range(count)]


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("copy", [0, 1])
def test_one_damaged_log_copy_is_read_around_reported_and_mended(members: int, copy: int) -> None:
    devices = devices_of(members)
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE)
    model = Model()
    with writing(volume) as session:
        for i in range(5):
            with model.transaction(session) as tx:
                model.put(tx, f"{i}", content(i, 9000))
    block = volume.superblock
    device = devices[block.log_member[copy]]
    start, length = block.log_offset[copy], 64 * KIB + block.area_count * block.area_bytes
    device.data[start : start + length] = bytes(length)
    damaged = Volume.open(devices, write=True)
    assert state_of(damaged) == model.states[-1]
    assert any(f"log copy {copy}" in warning for warning in damaged.info().warnings)
    with writing(damaged):
        pass
    # Now the other copy may go.
    other = devices[block.log_member[1 - copy]]
    start = block.log_offset[1 - copy]
    other.data[start : start + length] = bytes(length)
    assert open_read(devices) == model.states[-1]


@pytest.mark.parametrize("copy", [0, 1])
def test_a_log_copy_that_cannot_be_read_is_read_around(copy: int) -> None:
    class Deaf(MemoryDevice):
        def read_into(self, offset: int, buffer: Buffer) -> None:
            if deaf and 64 * KIB <= offset < volume.superblock.members[copy].data_offset:
                raise CommandFailed("unrecovered read error", where=self.uri)
            super().read_into(offset, buffer)

    deaf = False
    devices = [Deaf(4 * MIB) if member == copy else MemoryDevice(4 * MIB) for member in (0, 1)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE)
    with writing(volume) as session, session.transaction() as tx:
        tx.put("x", content(1, 300 * KIB))
    deaf = True
    reader = Volume.open(devices)
    assert state_of(reader) == {"x": content(1, 300 * KIB)} and not reader.refresh()
    devices.reverse()
    assert open_read(devices) == state_of(reader)


def test_no_log_copy_can_be_read() -> None:
    class Deaf(MemoryDevice):
        def read_into(self, offset: int, buffer: Buffer) -> None:
            if deaf and offset > 64 * KIB:
                raise CommandFailed("unrecovered read error", where=self.uri)
            super().read_into(offset, buffer)

    deaf = False
    devices = [Deaf(4 * MIB), Deaf(4 * MIB)]
    reader = Volume.create(devices=devices, stripe_bytes=STRIPE)
    deaf = True
    with pytest.raises(CommandFailed):
        reader.refresh()
    with pytest.raises(CommandFailed):
        Volume.open(devices)


def test_both_log_copies_damaged_says_so() -> None:
    devices = devices_of(2)
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE)
    for copy in (0, 1):
        start = volume.superblock.area_offset(copy, 0)
        devices[copy].data[start : start + 2 * ALIGN] = bytes(2 * ALIGN)
    with pytest.raises(VolumeDamaged, match="no copy of the log"):
        Volume.open(devices)


@pytest.mark.parametrize("commits_behind", [1, 10])
def test_a_record_destroyed_on_both_copies_is_no_torn_tail(commits_behind: int) -> None:
    """Acknowledged commits behind it must not vanish in silence, nor be overwritten by the next session."""
    devices = devices_of(2)
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=512 * KIB)
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put("first", b"1")
        block = session._writer.cursor.block
        for i in range(commits_behind):
            with session.transaction() as tx:
                tx.put(f"behind {i}", b"2")
    assert scrub(devices).clean
    superblock = volume.superblock
    for copy in range(2):
        offset = superblock.area_offset(copy, 0) + block * ALIGN
        devices[superblock.log_member[copy]].data[offset + 20] ^= 1
    with pytest.raises(VolumeDamaged, match=f"later ones.*block {block}"):
        Volume.open(devices)
    assert [finding for finding in scrub(devices).findings if finding.fatal]


def test_a_session_looks_for_later_records_in_the_whole_area(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_BEHIND_BLOCKS", 2)
    devices = devices_of(2)
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=512 * KIB)
    with writing(volume) as session:
        block = session._writer.cursor.block
        with session.transaction() as tx:
            for i in range(40):
                tx.put(f"a long record {i} " + "x" * 500, b"")
        assert session._writer.cursor.block > block + log._BEHIND_BLOCKS
    superblock = volume.superblock
    for copy in range(2):
        offset = superblock.area_offset(copy, 0) + block * ALIGN
        devices[superblock.log_member[copy]].data[offset + 20] ^= 1
    assert not Volume.open(devices).list()  # A reader does not look that far.
    with pytest.raises(VolumeDamaged, match="later ones"), writing(Volume.open(devices, write=True)):
        pass


def test_a_log_that_moved_to_a_lost_area_is_not_rolled_back_silently() -> None:
    devices = devices_of(2)
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB)
    with writing(volume) as session:
        while volume.log.start().area == 0:
            with session.transaction() as tx:
                tx.put(f"{volume.sequence}", b"x")
    for copy in (0, 1):
        start = volume.superblock.area_offset(copy, 1)
        devices[copy].data[start : start + ALIGN] = bytes(ALIGN)
    with pytest.raises(VolumeDamaged, match="moved"):
        Volume.open(devices)


def test_a_reader_follows_through_many_moves_of_the_log() -> None:
    devices = devices_of(2)
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB)
    reader, sleeper = Volume.open(devices), Volume.open(devices)
    assert not reader.refresh()
    with writing(volume) as session:
        for i in range(80):
            with session.transaction() as tx:
                tx.put(f"{i}", content(i, 100))
                if i >= 3:
                    tx.delete(f"{i - 3}")
            assert reader.refresh()
            assert reader.sequence == tx.sequence
            assert [info.name for info in reader.list()] == sorted(f"{k}" for k in range(max(0, i - 2), i + 1))
    assert volume.log.start().header.generation > 3
    assert sleeper.refresh()
    assert state_of(sleeper) == state_of(reader) == state_of(volume)


def test_the_catalog_outgrows_its_area_and_ends_with_the_space() -> None:
    devices = devices_of(2, 2 * MIB)
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB)
    count = 0
    with writing(volume) as session:
        with pytest.raises(VolumeFull):
            while True:
                with session.transaction() as tx:
                    for _ in range(50):
                        tx.put(f"object number {count:06}", b"")
                        count += 1
        committed = [info.name for info in volume.list()]
        assert len(committed) >= 4000
        # What is full can still be emptied.
        for start in range(0, len(committed) - 100, 100):
            with session.transaction() as tx:
                for name in committed[start : start + 100]:
                    tx.delete(name)
        left = volume.list()
        with session.transaction() as tx:
            tx.put("room again", b"")
    assert len(Volume.open(devices).list()) == len(left) + 1
    assert scrub(devices).clean


def test_a_commit_that_is_larger_than_the_log_is_a_table() -> None:
    devices = devices_of(2, 16 * MIB)
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB)
    names = [f"object number {i:06}" for i in range(20_000)]
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put("small", b"1")
        with session.transaction() as tx:
            tx.put_many(names, b"x" * len(names), 1)
        assert session._writer.catalog.recent == {} and session._writer.cursor.block < 20
    reader = Volume.open(devices)
    assert [info.name for info in reader.list()] == [*names, "small"]
    assert reader.read("small") == b"1" and reader.read(names[777]) == b"x"
    assert scrub(devices).clean


def test_a_record_that_makes_no_sense_is_damage() -> None:
    volume = Volume.create(devices=devices_of(2), stripe_bytes=STRIPE)
    with writing(volume) as session:
        session._writer.commit(b"\xff" * 100, session.number)
    with pytest.raises(VolumeDamaged, match="makes no sense"):
        Volume.open(volume.devices)


def test_a_reader_of_reused_space_is_told_that_the_object_was_deleted() -> None:
    volume = Volume.create(devices=devices_of(2), stripe_bytes=STRIPE)
    data = content(1, 400 * KIB)
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put("old", data)
        reader = Volume.open(volume.devices)
        with session.transaction() as tx:
            tx.delete("old")
        # Still there for the reader: its space is reused last.
        assert reader.read("old") == data
        with pytest.raises(VolumeFull):
            for i in range(1000):
                with session.transaction() as tx:
                    tx.put(f"{i}", content(i, 300 * KIB))
        with pytest.raises(ObjectNotFound, match="deleted while"):
            reader.read("old")
        assert reader.read("0") == content(0, 300 * KIB)


def test_a_volume_is_created_whole_or_not_at_all() -> None:
    from headrace.testing import CrashDevice, Timeline

    timeline = Timeline()
    devices = [CrashDevice(timeline, 2 * MIB) for _ in range(2)]
    timeline.begin()
    Volume.create(devices=devices, stripe_bytes=STRIPE)
    opened = 0
    for crash in timeline.crashes():
        for media in (crash.nothing(), crash.everything()):
            try:
                assert open_read(media) == {}
                opened += 1
            except HeadraceError as error:
                assert "not a headrace volume" in str(error)
    assert opened


def test_an_area_that_lost_its_header_is_looked_through_in_pieces() -> None:
    class Counting(MemoryDevice):
        def read_into(self, offset: int, buffer: Buffer) -> None:
            longest[0] = max(longest[0], memoryview(buffer).nbytes)
            super().read_into(offset, buffer)

    longest = [0]
    devices = [Counting(64 * MIB) for _ in range(2)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=5 * MIB)
    with writing(volume) as session:
        session._writer.move(say_so=False)
        newest = session._writer.cursor.area
        with session.transaction() as tx:
            tx.put("x", b"1")
    for copy in (0, 1):
        devices[copy].data[volume.superblock.area_offset(copy, newest)] ^= 1
    longest[0] = 0
    with pytest.raises(VolumeDamaged, match="newest area is damaged"):
        Volume.open(devices)
    assert longest[0] <= MIB


def test_no_two_records_of_one_generation_have_one_place(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where a move fails and is tried again, nor where the session ends then and the next one moves: records of the
    first attempt stand there, and are no part of what comes after."""
    volume = world.open()
    written: dict[tuple[int, int, int], bytes] = {}
    again = 0
    write = LogWriter._write

    def noted(self: LogWriter, area: int, block: int, data: bytes) -> None:
        nonlocal again
        head = RecordHead.decode(data[:RECORD_BYTES], volume.superblock.volume_id, block)
        if head is not None:
            again += (area, block) in {place[:2] for place in written}
            assert written.setdefault((area, block, head.generation), data) == data
        write(self, area, block, data)

    def unreachable() -> None:
        raise DeviceTimeout("no answer")

    monkeypatch.setattr(LogWriter, "_write", noted)
    expected: set[str] = set()
    for number in range(3):
        session = volume.session("run", takeover="now", heartbeat_s=60)
        for step in range(3):
            with session.transaction() as tx:
                tx.put(f"{number}.{step}", content(step, 5000))
            expected.add(f"{number}.{step}")
            for _ in range(2):
                with monkeypatch.context() as patch, pytest.raises(DeviceTimeout):
                    patch.setattr(session._writer, "look", unreachable)
                    session._writer.move(say_so=True)
            assert set(state_of(world.open())) == expected
            if step == 1:
                session._writer.move(say_so=True)
        # It dies with a move that it had begun, and the targets confirm that: the next one stays in these areas.
        stopped(session)
        volume = world.open()
    assert again >= 6 and set(state_of(volume)) == expected
    assert scrub(volume.devices).clean


def test_a_move_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "GENERATIONS", 2)
    volume = Volume.create(devices=devices_of(2), stripe_bytes=STRIPE)
    with writing(volume) as session:
        looks = session._writer.look
        session._writer.look = lambda: (_ for _ in ()).throw(DeviceTimeout("no answer"))
        for error in (DeviceTimeout, DeviceTimeout, VolumeError):
            with pytest.raises(error):
                session._writer.move(say_so=True)
        session._writer.look = looks
        with pytest.raises(SessionLost, match="could not be moved"), session.transaction() as tx:
            tx.put("x", b"1")
