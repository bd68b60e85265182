"""The checker beside a job that writes, in parts, and in bounded memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.device.protocol import Buffer
from headrace.testing import MemoryDevice
from headrace.volume import Volume, layout
from headrace.volume.repair import findings, scrub_data
from headrace.volume.repair import scrub as checker
from headrace.volume.repair.findings import Finding
from headrace.volume.repair.mend import mend
from headrace.volume.repair.scrub import ScrubProgress, scrub
from tests.volume.support import KIB, STRIPE, content, writing


def volume_of(members: int = 2, objects: int = 6) -> tuple[list[MemoryDevice], Volume]:
    devices = [MemoryDevice(4096 * KIB) for _ in range(members)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB)
    with writing(volume) as session, session.transaction() as tx:
        for number in range(objects):
            tx.put(f"o/{number}", content(number, 100_000))
    return devices, volume


def test_a_job_that_writes_meanwhile_is_no_damage(tmp_path: Path) -> None:
    """Objects end, their space is used again, the log moves, while the checker goes round and round."""
    members = [f"file:{tmp_path}/{name}.img?create=8MiB" for name in "ab"]
    stop = threading.Event()
    commits = 0
    with Volume.create(members, stripe_bytes=STRIPE, log_bytes=128 * KIB) as volume, writing(volume) as session:

        def job() -> None:
            nonlocal commits
            while not stop.is_set():
                with session.transaction() as tx:
                    if commits >= 8:
                        tx.delete(f"o/{commits - 8}")
                    tx.put(f"o/{commits}", content(commits, 600_000))
                commits += 1

        thread = threading.Thread(target=job)
        thread.start()
        try:
            checked = 0
            while checked < 12 or commits < 150:
                assert thread.is_alive()
                report = scrub(volume.devices, bytes_per_s=64 << 20)
                assert [str(finding) for finding in report.findings] == []
                checked += 1
        finally:
            stop.set()
            thread.join()


def test_real_damage_is_named_beside_a_job_that_writes() -> None:
    devices, volume = volume_of()
    (blob,) = volume.stored("o/3").blobs
    member, offset, _ = blob.data.used()[0]
    devices[member].data[offset] ^= 1
    told: list[Finding] = []
    with writing(volume) as session, session.transaction() as tx:
        tx.put("later", b"1")
        report = scrub(devices, on_finding=told.append)
    (finding,) = report.findings
    assert (finding.object_name, finding.object_offset, finding.member, finding.offset) == ("o/3", 0, member, offset)
    assert told == [finding]


def test_it_goes_on_where_it_was() -> None:
    devices, volume = volume_of()
    for name in ("o/1", "o/4"):
        member, offset, _ = volume.stored(name).blobs[0].data.used()[0]
        devices[member].data[offset] ^= 1
    seen: list[ScrubProgress] = []
    whole = scrub(devices, progress=seen.append)
    assert [finding.object_name for finding in whole.findings] == ["o/1", "o/4"]
    assert (seen[-1].objects_done, seen[-1].object_count) == (6, 6)
    assert seen[-1].bytes_done == seen[-1].total_bytes == 600_000
    rest: list[str] = []
    part = scrub(devices, start="o/2", on_object=rest.append)
    assert rest == ["o/2", "o/3", "o/4", "o/5"]
    assert [finding.object_name for finding in part.findings] == ["o/4"]


@pytest.mark.parametrize("copy", [0, 1])
def test_each_copy_of_each_structure_is_named(copy: int) -> None:
    devices, volume = volume_of()
    block = volume.superblock
    places = {
        "superblock": layout.superblock_offsets(devices[1].size_bytes)[copy],
        "heartbeat": block.log_offset[copy],
        "record": block.area_offset(copy, 0) + layout.ALIGN,
    }
    for what, offset in places.items():
        member = 1 if what == "superblock" else block.log_member[copy]
        devices[member].data[offset + 20] ^= 1
        (finding,) = scrub(devices).findings
        assert (finding.member, finding.offset, finding.fatal) == (member, offset, False), what
        assert what in finding.what
        devices[member].data[offset + 20] ^= 1
    assert scrub(devices).clean


def test_a_long_run_on_one_member_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, _ = volume_of(members=1)
    longest = 0

    class Counting(MemoryDevice):
        def read_into(self, offset: int, buffer: Buffer) -> None:
            nonlocal longest
            longest = max(longest, np.asarray(buffer).nbytes)
            super().read_into(offset, buffer)

    device = Counting(devices[0].size_bytes)
    device.data[:] = devices[0].data
    monkeypatch.setattr(scrub_data, "PIECE_BYTES", 4096)
    assert scrub([device]).clean
    assert longest == 64 * KIB, "a checksum block"


def test_what_is_deleted_meanwhile_and_used_again_is_no_damage() -> None:
    devices, volume = volume_of()
    member, offset, length = volume.stored("o/3").blobs[0].data.used()[0]

    def used_again(name: str) -> None:
        if name == "o/3":
            with writing(volume) as session, session.transaction() as tx:
                tx.delete("o/3")
            devices[member].data[offset : offset + length] = bytes(length)

    assert [str(finding) for finding in scrub(devices, on_object=used_again).findings] == []


def test_whether_damaged_blobs_are_still_there_is_asked_once_for_all_and_at_the_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices, volume = volume_of(objects=20)
    for info in volume.list():
        member, offset, _ = volume.stored(info.name).blobs[0].data.used()[0]
        devices[member].data[offset] ^= 1
    looks = 0
    paid: list[int] = []
    read_log = checker.read_log

    def counted(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return read_log(*args)

    monkeypatch.setattr(checker, "read_log", counted)
    monkeypatch.setattr(findings._Pace, "pay", lambda self, length: paid.append(length))
    told: list[Finding] = []
    seen: list[ScrubProgress] = []
    report = scrub(devices, bytes_per_s=1e9, on_finding=told.append, progress=seen.append)
    assert [finding.object_name for finding in report.findings] == sorted(info.name for info in volume.list())
    assert told == report.findings and seen[-1].bytes_done == seen[-1].total_bytes == 2_000_000
    assert looks < 5 and sum(paid) == report.bytes_read


@pytest.mark.usefixtures("quick")
def test_a_page_of_bytes_that_no_object_has_is_mended() -> None:
    devices = [MemoryDevice(64 << 20) for _ in range(2)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE)
    with writing(volume) as session, session.transaction() as tx:
        tx.put_many(["a"], bytes(17 << 20), 4096)
    (blob,) = volume.stored("a").blobs
    place = blob.tables[0].pieces(np.array([blob.entry.table_page_bytes]), np.array([1]))
    devices[int(place.member[0])].data[int(place.offset[0])] ^= 1
    (finding,) = scrub(devices).findings
    assert (finding.page, finding.fatal) == (1, False)
    with writing(volume) as session:
        assert mend(session, [finding]) == []
    assert scrub(devices).clean
