"""Structures: what is encoded is decoded; whatever else is decoded is refused, never misread, never a traceback."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import VolumeDamaged
from headrace.volume import layout
from headrace.volume.data.extents import make_runs
from headrace.volume.layout import (
    ALIGN,
    AreaHeader,
    Blob,
    Heartbeat,
    ObjectValue,
    Operation,
    Record,
    RecordHead,
    SessionEntry,
    Totals,
)

ID = bytes(range(16))


def blob(birth: int = 7) -> Blob:
    runs, columns = make_runs([(8192, [(0, 4096), (1, 8192)]), (100, [(1, 0)])])
    table_runs, table_columns = make_runs([(12, [(2, 65536)])])
    return Blob(
        birth=birth,
        length_bytes=8292,
        checksum_block_bytes=4096,
        table_page_bytes=16384,
        runs=runs,
        columns=columns,
        table_runs=table_runs,
        table_columns=table_columns,
        roots=np.array([5], np.uint32),
    )


def paired() -> Blob:
    """With two copies of its table: of two runs each, one of them over two members."""
    one = blob()
    runs, columns = make_runs([(8, [(0, 4096), (1, 4096)]), (4, [(1, 0)]), (8, [(2, 0)]), (4, [(0, 9 << 12)])])
    return replace(one, table_runs=runs, table_columns=columns, table_copies=2)


def slices() -> ObjectValue:
    rows = np.array([(7, 4096, 10), (8, 0, 1), (7, 0, 4096)], layout.SLICE)
    return ObjectValue(sequence=9, created_ns=11, length_bytes=4107, slices=rows)


def same(one: object, other: object) -> bool:
    pairs = [(value, getattr(other, key)) for key, value in vars(one).items()]
    return all(same(a, b) if isinstance(a, Blob) else np.array_equal(a, b) for a, b in pairs)


def inline() -> ObjectValue:
    return ObjectValue(sequence=9, created_ns=11, length_bytes=8292, blob=blob())


def operations() -> list[Operation]:
    return [
        Operation(layout.PUT, layout.object_key("a/ö"), inline().encode()),
        Operation(layout.PUT, layout.object_key("b" * 1024), slices().encode()),
        Operation(layout.DELETE, layout.object_key("c"), b""),
        Operation(layout.PUT, layout.blob_key(7), blob().encode()),
    ]


def test_values() -> None:
    assert same(layout.decode_blob(blob().encode(), 7), blob()) and len(blob().encode()) == blob().encoded_bytes
    assert same(layout.decode_blob(paired().encode(), 7), paired()) and paired().encode()[18:20] == b"\1\0"
    assert blob().encode()[18:20] == b"\0\0", "as it always was"
    cut = [(runs.tolist(), columns.tolist()) for runs, columns in paired().tables]
    assert cut == [
        ([(8, 2, 0), (4, 1, 0)], [(0, 0, 4096), (1, 0, 4096), (1, 0, 0)]),
        ([(8, 1, 0), (4, 1, 0)], [(2, 0, 0), (0, 0, 9 << 12)]),
    ]
    for at, value in ((18, 2), (17, 0)):
        broken = bytearray(paired().encode())
        broken[at] = value
        with pytest.raises(VolumeDamaged, match="copies of a checksum table"):
            layout.decode_blob(bytes(broken), 7)
    with pytest.raises(VolumeDamaged, match="blob 0x8"):
        layout.decode_blob(blob().encode(), 8)
    for value in (inline(), slices()):
        encoded = value.encode()
        assert same(ObjectValue.decode(encoded, "x"), value)
        assert layout.ObjectHead.decode(encoded, "x").length_bytes == value.length_bytes
        for cut in range(len(encoded)):
            with pytest.raises(VolumeDamaged, match="'x'"):
                ObjectValue.decode(encoded[:cut], "x")
    assert layout.peek_blob(inline().encode()) == (7, 4096, 8192 + 4096 + 4096)
    # Bounded before anything is allocated for it: the counts of runs, the size of a page.
    for at in (24, 32):
        hostile = bytearray(inline().encode())
        hostile[layout.OBJECT_BYTES + at : layout.OBJECT_BYTES + at + 4] = (300_000_000).to_bytes(4, "little")
        with pytest.raises(VolumeDamaged, match="300000000"):
            layout.peek_blob(bytes(hostile))
    with pytest.raises(VolumeDamaged, match=r"pages of 2\^25"):
        layout.decode_blob(replace(blob(), table_page_bytes=1 << 25).encode(), 7)
    # The sum of the slices is the object, also where it would wrap round.
    rows = np.array([(1, 0, 1 << 63), (1, 0, 1 << 63), (1, 0, 5)], layout.SLICE)
    for length, bad in ((4106, slices().slices), (5, rows), (0, np.zeros(1, layout.SLICE))):
        with pytest.raises(VolumeDamaged):
            ObjectValue.decode(ObjectValue(sequence=1, created_ns=1, length_bytes=length, slices=bad).encode(), "x")


def test_keys_are_in_the_order_of_names_and_births() -> None:
    names = ["", "a", "a/b", "b", "é", "\U0010ffff"]
    assert sorted(map(layout.object_key, reversed(names))) == [layout.object_key(name) for name in names]
    assert layout.blob_key(255) < layout.blob_key(256) < layout.object_key("")
    assert [layout.name_of(layout.object_key(name)) for name in names] == names
    for key in (layout.blob_key(1), layout.object_key("\udcff")):
        with pytest.raises(VolumeDamaged):
            layout.name_of(key)


def test_operations() -> None:
    payload = layout.encode_operations(operations(), 42, Totals(2, 5))
    assert layout.decode_operations(payload, "here") == (42, Totals(2, 5), operations())
    assert len(payload) == layout.PAYLOAD_BYTES + sum(operation.encoded_bytes for operation in operations())
    for cut in range(len(payload)):
        with pytest.raises(VolumeDamaged):
            layout.decode_operations(payload[:cut], "here")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_payload_decodes_or_is_damage(data: st.DataObject) -> None:
    payload = bytearray(layout.encode_operations(operations(), 42, Totals(2, 5)))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with suppress(VolumeDamaged):
        for operation in layout.decode_operations(bytes(payload), "here")[2]:
            with suppress(VolumeDamaged):
                ObjectValue.decode(operation.value, layout.name_of(operation.key))
            with suppress(VolumeDamaged):
                layout.decode_blob(operation.value, 7)


def test_records_belong_to_one_place_of_one_generation_of_one_volume() -> None:
    record = Record(layout.COMMIT, 5, 4, 3, 2, 1, b"payload" * 1000)
    data, crc = record.encode(ID, 17)
    assert len(data) == 2 * ALIGN
    head = RecordHead.decode(data, ID, 17)
    assert head is not None and head.blocks == 2
    assert head.with_payload(record.payload) == record._replace(crc=crc)
    assert head.with_payload(record.payload[:-1] + b"x") is None
    assert RecordHead.decode(data, ID, 18) is None
    assert RecordHead.decode(data, bytes(16), 17) is None
    for at in range(layout.RECORD_BYTES):
        changed = bytearray(data)
        changed[at] ^= 0x10
        assert RecordHead.decode(bytes(changed), ID, 17) is None


def test_area_headers_and_heartbeats() -> None:
    header = AreaHeader(1, 2, 3, 4, 5, 6)
    data = header.encode(ID, 1)
    assert AreaHeader.decode(data, ID, 1) == header and AreaHeader.decode(data, ID, 0) is None
    beat = Heartbeat(layout.ACTIVE, 1, bytes(16), 2, 3, 4, 5, "läuft " * 60, "host")
    data = beat.encode(ID)
    decoded = Heartbeat.decode(data, ID)
    assert len(data) == ALIGN and not any(data[512:])
    assert decoded is not None and decoded._replace(run_id="") == beat._replace(run_id="")
    assert beat.run_id.startswith(decoded.run_id) and len(decoded.run_id.encode()) in (183, 184)
    assert Heartbeat.decode(data, bytes(16)) is None


def test_session_entries() -> None:
    session = SessionEntry(1, 1, bytes(16), 2, "run ü", "host")
    assert SessionEntry.decode(session.encode(), "here") == session
    for bad in (b"", session.encode()[:20], session.encode()[:48] + b"\xff" * 20):
        with pytest.raises(VolumeDamaged):
            SessionEntry.decode(bad, "here")
    with pytest.raises(VolumeDamaged):
        layout.decode_extents(b"x" * 25, "here")
