"""Structures: what is encoded is decoded; whatever else is decoded is refused, never misread, never a traceback."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import VolumeDamaged
from headrace.volume import layout
from headrace.volume.extents import make_runs
from headrace.volume.layout import ALIGN, AreaHeader, Entry, Heartbeat, Record, RecordHead, SessionEntry

ID = bytes(range(16))


def entry(name: str = "a/ö", operation: int = layout.PUT) -> Entry:
    runs, columns = make_runs([(8192, [(0, 4096), (1, 8192)]), (100, [(1, 0)])])
    table_runs, table_columns = make_runs([(12, [(2, 65536)])])
    return Entry(
        name=name,
        operation=operation,
        length_bytes=8292,
        birth=7,
        sequence=9,
        created_ns=11,
        checksum_block_bytes=4096,
        table_page_bytes=16384,
        runs=runs,
        columns=columns,
        table_runs=table_runs,
        table_columns=table_columns,
        roots=np.array([5], np.uint32),
    )


def same(one: Entry, other: Entry) -> bool:
    return all(np.array_equal(value, getattr(other, key)) for key, value in vars(one).items())


def test_entries() -> None:
    entries = [entry(), entry("b" * 1024), entry("c", layout.DELETE)]
    payload = layout.encode_entries([layout.number_entry(e.encode(), 9) for e in entries], 42)
    sequence, decoded = layout.decode_entries(payload, "here")
    assert sequence == 42 and all(same(a, b) for a, b in zip(entries, decoded, strict=True))
    assert [len(e.encode()) for e in entries] == [e.encoded_bytes for e in entries]
    for cut in range(len(payload)):
        with pytest.raises(VolumeDamaged):
            layout.decode_entries(payload[:cut], "here")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_entry_decodes_or_is_damage(data: st.DataObject) -> None:
    payload = bytearray(layout.encode_entries([entry().encode()], 42))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with suppress(VolumeDamaged):
        layout.decode_entries(bytes(payload), "here")


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
