"""The file of a black box: what was written is read, and what is damaged, foreign or too long is one clear error."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.device.events import EVENT, EventKind, status_text
from headrace.errors import UsageError
from headrace.measure.blackbox import (
    Clocks,
    Dump,
    DumpedDevice,
    DumpedPath,
    DumpedStep,
    dump_name,
    read_dump,
    write_dump,
)
from headrace.measure.blackbox import dump as module
from headrace.measure.blackbox.dump import DUMPED, DumpUnreadable


def a_dump() -> Dump:
    events = np.zeros(3, DUMPED)
    events["started_ns"], events["ended_ns"] = [10, 20, 30], [15, 29, 0]
    events["offset"], events["bytes"], events["device"] = [0, 1 << 60, 4096], [4096, 2**32 - 1, 4096], [0, 0, 1]
    events["kind"] = [EventKind.READ, EventKind.WRITE, EventKind.READ]
    path = DumpedPath(name="10.0.0.1:4420", address="10.0.0.1:4420", target="nqn.2024-01.lab:a", usable=False, why="é")
    return Dump(
        rank=3, world=4, host="node-1", pid=77, why="watchdog", detail="step 5 took 9 s",
        started=Clocks(monotonic_ns=1, realtime_ns=10**9), dumped=Clocks(monotonic_ns=40, realtime_ns=2 * 10**9),
        devices=(
            DumpedDevice(uri="nvme+tcp://10.0.0.1/nqn.2024-01.lab:a", paths=(path,), recorded=5, lost=3),
            DumpedDevice(uri="file:/a", why_not="it records none"),
        ),
        events=events,
        steps=(DumpedStep(step=4, started_ns=5, ended_ns=12, spent={"fetch": 1e-9, "compute": 6e-9}),),
        under_way=DumpedStep(
            step=5, started_ns=12, ended_ns=None, spent={"fetch": 2.5}, cause="fetch", cause_since_ns=13
        ),
        threads={"MainThread (1)": ["train.py:3 main"]},
    )  # fmt: skip


def test_what_was_written_is_read(tmp_path: Path) -> None:
    dump, path = a_dump(), tmp_path / dump_name(3)
    assert path.name == "rank-00003.blackbox"
    assert write_dump(path, dump) == path.stat().st_size
    found = read_dump(path)
    assert found.events.tobytes() == dump.events.tobytes() and found.events.dtype == DUMPED
    # All else: arrays do not compare to a truth value.
    assert vars(found) | {"events": None} == vars(dump) | {"events": None}
    assert len(found.events_of(0)) == 2 and found.realtime_ns(39) == 2 * 10**9 - 1
    write_dump(path, replace(dump, under_way=None, steps=(), events=dump.events[:0], devices=()))
    assert read_dump(path).under_way is None
    # Nothing but the dump is left.
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_dump_that_is_cut_anywhere_or_damaged_is_one_error(tmp_path: Path) -> None:
    path, cut = tmp_path / "whole", tmp_path / "cut"
    write_dump(path, a_dump())
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        cut.write_bytes(data[:length])
        with pytest.raises(DumpUnreadable, match="no dump that can be read"):
            read_dump(cut)
    original = read_dump(path)
    for at in range(0, len(data), 11):
        flipped = bytearray(data)
        flipped[at] ^= 0x55
        cut.write_bytes(flipped)
        try:
            found = read_dump(cut)
        except DumpUnreadable:
            continue
        # Of what no checksum covers, nothing is data.
        assert found.events.tobytes() == original.events.tobytes() and found.steps == original.steps


def _replace_members(path: Path, others: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for entry, data in (members | others).items():
            archive.writestr(entry, data)


class Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("it was unpickled",))


@pytest.mark.parametrize(
    "name",
    [
        "text",
        "pickle",
        "garbled",
        "object",
        "shape",
        "dtype",
        "version",
        "names",
        "device",
        "steps",
        "nan",
        "list",
        "zip",
    ],
)
def test_foreign_files_are_refused_without_being_carried_out(name: str, tmp_path: Path) -> None:
    path = tmp_path / "foreign"
    header, events, steps = _arrays(tmp_path)
    said = json.loads(header.tobytes())
    arrays = {"header": header, "events": events, "steps": steps}
    if name == "text":
        path.write_text("rank 3\n")
    elif name == "pickle":
        path.write_bytes(pickle.dumps(Trap()))
    else:
        match name:
            case "garbled":
                pass
            case "object":
                arrays["events"] = np.array([Trap()], object)
            case "shape":
                arrays["events"] = events.reshape(1, -1)
            case "dtype":
                arrays["events"] = np.zeros(3, EVENT)
            case "version":
                arrays["header"] = _bytes({**said, "version": 2})
            case "names":
                arrays["more"] = header
            case "device":
                arrays["header"] = _bytes({**said, "devices": said["devices"][:1]})
            case "steps":
                arrays["steps"] = np.frombuffer(steps.tobytes() * (module.MOST_STEPS + 2), np.uint8)
            case "nan":
                arrays["steps"] = np.frombuffer(steps.tobytes().replace(b"2.5", b"NaN"), np.uint8)
            case "list":
                arrays["header"] = _bytes([1])
        (np.savez_compressed if name == "zip" else np.savez)(path, allow_pickle=True, **arrays)
        path.with_suffix(".npz").rename(path)
        if name == "garbled":
            _replace_members(path, {f"{each}.npy": b"\x93NUMPY\x01\x00\x05\x00((((\n" for each in arrays})
    with pytest.raises(DumpUnreadable, match="no dump that can be read"):
        read_dump(path)


def test_an_array_that_claims_to_be_huge_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    write_dump(path, a_dump())
    claim = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        claim, {"descr": np.lib.format.dtype_to_descr(DUMPED), "fortran_order": False, "shape": (1 << 50,)}
    )
    _replace_members(path, {"events.npy": claim.getvalue()})
    with pytest.raises(DumpUnreadable, match="one column"):
        read_dump(path)
    path.write_bytes(b"")
    with path.open("r+b") as file:
        file.truncate(module.MOST_BYTES + 1)
    with pytest.raises(DumpUnreadable, match="at most"):
        read_dump(path)
    with pytest.raises(UsageError, match="cannot read a dump"):
        read_dump(tmp_path / "absent")


@pytest.mark.parametrize("name", ["entries", "directory", "zip64", "values", "lines"])
def test_what_would_take_much_memory_is_refused_before_it_does(name: str, tmp_path: Path) -> None:
    path = tmp_path / "crafted"
    write_dump(path, a_dump())
    data = path.read_bytes()
    end, many = module._END.unpack(data[-module._END.size :]), 100_000
    place = end[6]
    if name in ("entries", "directory"):
        # As many members as one likes, of 46 bytes each, whether or not the end says so.
        entry = data[place : place + 46 + 10]
        claimed = [3, 3] if name == "directory" else [0xFFFF, 0xFFFF]
        counts = module._END.pack(*end[:3], *claimed, many * len(entry), place, 0)
        path.write_bytes(data[:place] + entry * many + counts)
    elif name == "zip64":
        # A second end counts instead, if there is one.
        entry = data[place : place + 46 + 10]
        directory = entry * many
        second = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, many, many, len(directory), place)
        locator = struct.pack("<4sIQI", b"PK\6\7", 0, place + len(directory), 1)
        counts = module._END.pack(*end[:5], len(second) + len(locator), place + len(directory), 0)
        path.write_bytes(data[:place] + directory + second + locator + counts)
    else:
        header, events, steps = _arrays(tmp_path)
        if name == "values":
            header = _bytes({**json.loads(header.tobytes()), "threads": {"a": [[] for _ in range(20 * many)]}})
        else:
            steps = np.full(40 * many, ord("\n"), np.uint8)
        np.savez(path, header=header, events=events, steps=steps)
        path.with_suffix(".npz").rename(path)
    tracemalloc.start()
    try:
        with pytest.raises(DumpUnreadable, match="no dump that can be read"):
            read_dump(path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Its bytes, twice: as they are in the file, and as an array.
    assert most < 2 * path.stat().st_size + 1_000_000


def test_a_dump_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_dump(path, a_dump())
    before = path.read_bytes()
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError):
        write_dump(folder, a_dump())
    assert path.read_bytes() == before and sorted(each.name for each in tmp_path.iterdir()) == ["a", "folder"]


def test_statuses_have_words() -> None:
    assert status_text(0) == "success" and "in time" in status_text(0x8002)
    assert status_text(2 << 8 | 0x81) == "status type 2, code 0x81"


def _arrays(tmp_path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    write_dump(tmp_path / "own", a_dump())
    with np.load(tmp_path / "own") as found:
        return found["header"], found["events"], found["steps"]


def _bytes(said: object) -> np.ndarray:
    return np.frombuffer(json.dumps(said).encode(), np.uint8)
