"""What is left of volumes that do not open: found, verified, and nothing invented."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from headrace.errors import HeadraceError, NotAVolume
from headrace.testing import MemoryDevice
from headrace.volume import Volume, layout
from headrace.volume.catalog import commit
from headrace.volume.catalog.usage import usage_of
from headrace.volume.repair import salvage_log
from headrace.volume.repair.salvage import Salvage, look
from headrace.volume.repair.salvage_media import Lost, Media
from headrace.volume.space.allocator import count_space
from tests.volume.support import KIB, STRIPE, State, content, writing

ALIGN = layout.ALIGN


def make(members: int) -> tuple[list[MemoryDevice], State]:
    devices = [MemoryDevice(12 << 20) for _ in range(members)]
    # So long that the log does not move.
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=1024 * KIB)
    state: State = {}
    with writing(volume) as session:
        for number, size in enumerate((0, 1, 5000, 64 * KIB, 300_001, 900_000)):
            state[f"o/{number}"] = content(number, size)
            with session.transaction() as tx:
                tx.put(f"o/{number}", state[f"o/{number}"], checksum_block_bytes=16 * KIB if number == 4 else 4096)
        with session.transaction() as tx:
            tx.delete("o/1")
        del state["o/1"]
    return devices, state


def taken(found: Salvage) -> dict[str, bytes | None]:
    """Every object; None where a part of it is lost."""
    result: dict[str, bytes | None] = {}
    for one in found.objects:
        parts = [piece.data for piece in found.pieces(one.name)]
        whole = [part for part in parts if part is not None]
        result[one.name] = b"".join(whole) if len(whole) == len(parts) else None
    return result


def wipe(device: MemoryDevice, offset: int, length: int = ALIGN) -> None:
    device.data[offset : offset + length] = bytes(length)


def opens(devices: Sequence[MemoryDevice]) -> bool:
    try:
        Volume.open(devices)
    except HeadraceError:
        return False
    return True


@pytest.mark.parametrize("members", [1, 2, 3])
def test_a_good_volume_is_salvaged_whole(members: int) -> None:
    devices, state = make(members)
    before = [bytes(device.data) for device in devices]
    found = look(devices[::-1])
    assert (found.lost, taken(found)) == ([], state)
    assert not any(one.doubtful for one in found.objects)
    assert [bytes(device.data) for device in devices] == before


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_member_without_superblocks_is_known_by_what_it_holds(index: int) -> None:
    devices, state = make(3)
    for offset in layout.superblock_offsets(devices[index].size_bytes):
        wipe(devices[index], offset)
    assert not opens(devices)
    found = look(devices)
    assert taken(found) == state
    assert any(f"member {index}" in line and "superblock" in line for line in found.lost)


def test_all_superblocks_but_one_copy() -> None:
    devices, state = make(2)
    for device, offset in [(devices[0], 0), (devices[1], 0), (devices[1], devices[1].size_bytes - ALIGN)]:
        wipe(device, offset)
    assert not opens(devices)
    assert taken(look(devices)) == state


def test_a_superblock_is_found_where_a_device_ended_before_it_grew() -> None:
    devices, state = make(1)
    wipe(devices[0], 0)
    grown = MemoryDevice(devices[0].size_bytes + 1024 * KIB)
    grown.data[: devices[0].size_bytes] = devices[0].data
    assert not opens([grown])
    told: list[str] = []
    assert taken(look([grown], searching=told.append)) == state
    assert told


def test_nothing_to_go_by() -> None:
    with pytest.raises(NotAVolume, match="none of these devices"):
        look([MemoryDevice(1024 * KIB)])


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_missing_member_takes_only_its_stripes(index: int) -> None:
    devices, state = make(3)
    left = [device for place, device in enumerate(devices) if place != index]
    assert not opens(left)
    found = look(left)
    assert f"member {index}: it is missing" in found.lost
    assert {one.name for one in found.objects} == set(state)
    for one in found.objects:
        data = state[one.name]
        position = 0
        for piece in found.pieces(one.name):
            assert piece.offset == position
            position += piece.length
            if piece.data is None:
                assert f"member {index}" in piece.why
            else:
                assert piece.data == data[piece.offset : piece.offset + piece.length]
        assert position == len(data)
    assert any(data is None for data in taken(found).values())


def record_places(devices: Sequence[MemoryDevice]) -> list[int]:
    """Blocks of the area in force at which commits begin."""
    block = Volume.open(devices).superblock
    found = []
    for index in range(1, block.area_blocks):
        at = block.area_offset(0, 0) + index * ALIGN
        head = layout.RecordHead.decode(bytes(devices[0].data[at : at + 64]), block.volume_id, index)
        if head is not None and head.kind == layout.COMMIT:
            found.append(index)
    return found


def test_a_record_that_is_destroyed_on_every_copy_costs_what_it_said() -> None:
    devices, state = make(2)
    block = Volume.open(devices).superblock
    commits = record_places(devices)
    assert len(commits) == 7
    for copy in range(layout.LOG_COPIES):
        wipe(devices[block.log_member[copy]], block.area_offset(copy, 0) + commits[3] * ALIGN)
    assert not opens(devices)
    found = look(devices)
    assert any("the log" in line for line in found.lost)
    del state["o/3"]
    assert taken(found) == state
    assert all(one.doubtful for one in found.objects if one.name in ("o/0", "o/2"))


def test_headers_of_the_log_are_not_needed() -> None:
    devices, state = make(2)
    block = Volume.open(devices).superblock
    for copy in range(layout.LOG_COPIES):
        for area in range(block.area_count):
            wipe(devices[block.log_member[copy]], block.area_offset(copy, area))
    assert not opens(devices)
    assert taken(look(devices)) == state


def moved(commits: int) -> tuple[list[MemoryDevice], State, int]:
    """Each object is deleted five commits later. Also: the area of the log that is in force."""
    devices = [MemoryDevice(4096 * KIB) for _ in range(2)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB)
    state: State = {}
    with writing(volume) as session:
        for number in range(commits):
            with session.transaction() as tx:
                if number >= 5:
                    tx.delete(f"o/{number - 5}")
                    del state[f"o/{number - 5}"]
                state[f"o/{number}"] = content(number, 3000)
                tx.put(f"o/{number}", state[f"o/{number}"])
        return devices, state, session._writer.cursor.area


def test_after_many_moves_of_the_log() -> None:
    """What was deleted long ago is not brought back."""
    devices, state, _ = moved(60)
    found = look(devices)
    assert (found.lost, taken(found)) == ([], state)


def test_of_too_many_records_the_newest_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever area they are in. Of one generation that is too large alone: what comes first, so its snapshot."""
    areas = set()
    for commits in (60, 77, 94):
        devices, state, area = moved(commits)
        areas.add(area)
        records = salvage_log._records(Volume.open(devices).superblock, _media(devices), (0, 1), Lost())
        newest = max(records)
        sizes = {one: sum(len(record.payload) for record in records[one].values()) for one in records}
        assert len(sizes) > 2
        monkeypatch.setattr(salvage_log, "_HELD_BYTES", sizes[newest] + min(sizes.values()) // 2)
        found = look(devices)
        assert taken(found) == state and not any(one.doubtful for one in found.objects)
        assert any("the oldest are left out" in line for line in found.lost)
        monkeypatch.setattr(salvage_log, "_HELD_BYTES", sizes[newest] - 1)
        found = look(devices)
        known = taken(found)
        assert known and all(state.get(name, data) == data for name, data in known.items())
        monkeypatch.undo()
    assert len(areas) > 1


def _media(devices: Sequence[MemoryDevice]) -> Media:
    return Media(dict(enumerate(devices)))


def test_damage_is_never_wrong_bytes() -> None:
    devices, state = make(2)
    chance = random.Random(3)
    for _ in range(25):
        media = [MemoryDevice(device.size_bytes) for device in devices]
        for medium, device in zip(media, devices, strict=True):
            medium.data[:] = device.data
            for _ in range(12):
                start = chance.randrange(medium.size_bytes)
                wipe(medium, min(start, medium.size_bytes - 9000), chance.randrange(1, 9000))
        try:
            found = look(media)
        except HeadraceError:
            continue
        for one in found.objects:
            if one.name in state:
                for piece in found.pieces(one.name):
                    assert piece.data in (None, state[one.name][piece.offset : piece.offset + piece.length])


def with_tables() -> tuple[list[MemoryDevice], dict[str, bytes], Volume]:
    devices = [MemoryDevice(24 << 20) for _ in range(2)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=1024 * KIB)
    state = {f"many/{number:05}": number.to_bytes(4, "little") for number in range(6000)}
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put_many([*state], b"".join(state.values()), 4)
        with session.transaction() as tx:
            tx.delete("many/00007")
            tx.put("late", b"late")
    del state["many/00007"]
    state["late"] = b"late"
    return devices, state, Volume.open(devices)


def test_a_catalogue_in_tables() -> None:
    devices, state, volume = with_tables()
    assert volume._catalog.tables
    found = look(devices)
    assert (found.lost, taken(found)) == ([], state)


def test_a_node_that_is_destroyed_on_both_copies_costs_its_entries() -> None:
    devices, state, volume = with_tables()
    table = max(volume._catalog.tables, key=lambda table: table.root.entry_count)
    root = table.node(table.root.top)
    assert root.level == 1 and root.count > 2
    for copy in range(2):
        for member, offset, length in table._pieces(copy, root.child(1).place, 1):
            wipe(devices[member], offset, length)
    found = look(devices)
    assert any("of the catalogue" in line for line in found.lost)
    got = taken(found)
    first, after = root.key(1), root.key(2)
    gone = {name for name in state if first <= layout.object_key(name) < after}
    assert 0 < len(gone) < 4000
    assert got == {name: data for name, data in state.items() if name not in gone}


def with_merges(monkeypatch: pytest.MonkeyPatch) -> tuple[list[MemoryDevice], dict[str, bytes], Volume]:
    """Each commit is a table, and most of them became one with others, in one generation of the log."""
    monkeypatch.setattr(commit, "BULK_BYTES", 3 * KIB)
    monkeypatch.setattr(commit, "LOG_BYTES", 1024 * KIB)
    devices = [MemoryDevice(24 << 20) for _ in range(2)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=1024 * KIB)
    state: dict[str, bytes] = {}
    with writing(volume) as session:
        for number in range(20):
            new = {f"{number:02}/{i:02}": bytes([number, i]) for i in range(60)}
            with session.transaction() as tx:
                tx.put_many([*new], b"".join(new.values()), 2)
                if number:
                    tx.delete_prefix(f"{number - 1:02}/1")
            state = {name: data for name, data in state.items() if not name.startswith(f"{number - 1:02}/1")} | new
    volume = Volume.open(devices)
    block, cursor = volume.superblock, volume._cursor
    heads = []
    for index in range(1, block.area_blocks):
        at = block.area_offset(0, cursor.area) + index * ALIGN
        heads.append(layout.RecordHead.decode(bytes(devices[0].data[at : at + 64]), block.volume_id, index))
    kinds = [head.kind for head in heads if head is not None and head.generation == cursor.header.generation]
    assert kinds.count(layout.TABLES_CHANGED) > 2 and len(volume._catalog.tables) < 10
    return devices, state, volume


def test_tables_that_became_one_are_needed_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, state, volume = with_merges(monkeypatch)
    used = usage_of(volume._catalog, STRIPE).ranges()
    spaces, _ = count_space(volume.superblock, used, [], volume._catalog.table_space())
    for device, space in zip(devices, spaces, strict=True):
        for start, end in space.ranges():
            wipe(device, start, end - start)
    found = look(devices)
    assert (found.lost, taken(found)) == ([], state)
    assert not any(one.doubtful for one in found.objects)


def test_where_a_table_is_destroyed_what_it_was_made_of_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, state, volume = with_merges(monkeypatch)
    table = max(volume._catalog.tables, key=lambda table: table.root.entry_count)
    for copy in range(2):
        for member, offset, length in table._pieces(copy, table.root.top.place, table.root.top.blocks):
            wipe(devices[member], offset, length)
    found = look(devices)
    assert any("of the catalogue" in line for line in found.lost)
    assert {name: data for name, data in taken(found).items() if name in state} == state
    assert any(one.doubtful for one in found.objects)


def test_a_member_that_is_missing_takes_no_table_along() -> None:
    """Each table is on two members."""
    devices, state, _ = with_tables()
    for left in (devices[:1], devices[1:]):
        assert {one.name for one in look(left).objects} == set(state)


def test_where_the_newest_snapshot_is_destroyed_the_older_log_stands_in() -> None:
    devices = [MemoryDevice(12 << 20) for _ in range(2)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB)
    state: State = {}
    with writing(volume) as session:
        for number in range(12):
            with session.transaction() as tx:
                state[f"o/{number}"] = content(number, 3000)
                tx.put(f"o/{number}", state[f"o/{number}"])
    cursor = Volume.open(devices)._cursor
    assert cursor.header.generation > 1
    block = volume.superblock
    for copy in range(layout.LOG_COPIES):
        # Its header, and its snapshot.
        start = block.area_offset(copy, cursor.area)
        wipe(devices[block.log_member[copy]], start, 3 * ALIGN)
    found = look(devices)
    assert {name: data for name, data in taken(found).items() if data is not None} == state
    assert any("snapshot" in line for line in found.lost)
    assert any(one.doubtful for one in found.objects)
