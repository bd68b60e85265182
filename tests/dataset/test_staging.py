"""A staged dataset gives the same batches, however much of it is there and whatever became of it."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from headrace.dataset import (
    PackOptions,
    Records,
    StageOptions,
    StageProgress,
    Staging,
    drop_stage,
    ingest_records,
    open_records,
    pack_stream,
    stage,
    stages,
)
from headrace.device import BlockAddress, FileAddress
from headrace.errors import UsageError, VolumeFull
from headrace.testing.loop import LoopDevice
from headrace.volume import Volume
from headrace.volume.stage import layout, plan
from headrace.volume.stage import read as stage_read
from headrace.volume.stage.store import Held, Stage, address_of
from tests.dataset.corpora import put_stream, some_lengths
from tests.dataset.staged import LENGTH, all_records, epoch, feed, file_of, flip

#: Of a stage, in these tests.
CHUNK = 64 << 10
KINDS = ("windows", "packed", "padded")


@dataclass(frozen=True)
class Source:
    uri: str
    volume: Volume
    #: Of an epoch of each kind, without a stage.
    hashes: dict[str, str]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that little data has many."""
    monkeypatch.setattr(layout, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(plan, "CHUNK_BYTES", CHUNK)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    folder = tmp_path_factory.mktemp("source")
    uris = [f"file:{folder}/{name}.img" for name in ("a", "b")]
    files = folder / "files"
    files.mkdir()
    chance = np.random.default_rng(4)
    for number in range(120):
        (files / f"{number:04}.bin").write_bytes(chance.bytes(int(chance.integers(0, 30_000))))
    with Volume.create([f"{uri}?create=64MiB" for uri in uris]) as volume:
        put_stream(volume, "corpus", some_lengths(2500, 200))
        with volume.session(run_id="test") as session:
            for each in ("packed", "padded"):
                pack_stream(session, "corpus", PackOptions(sequence_length=LENGTH, layout=each))
            ingest_records(open_records(files), session, "images")
        hashes = {kind: epoch(feed(volume, "corpus", None, kind)) for kind in KINDS}
        hashes["records"] = all_records(Records.open(volume, "images"))
        yield Source(",".join(uris), volume, hashes)


def hash_of(source: Source, kind: str, where: Path) -> tuple[str, dict[str, object]]:
    if kind == "records":
        records = Records.open(source.volume, "images", stage=str(where))
        found = all_records(records)
        assert records.near is not None
        return found, records.near.describe()
    each = feed(source.volume, "corpus", where, kind)
    return epoch(each), each.describe()["corpus"]["stage"]


def half(source: Source, name: str, where: Path) -> None:
    """Stage some of it, in whatever order."""
    with pytest.raises(VolumeFull):
        stage(source.volume, name, where, StageOptions(most_bytes=1 << 20))
    assert not list(where.glob("*"))
    options = StageOptions(most_bytes=1 << 20, partial=True)
    report = stage(source.volume, name, where, options)
    assert not report.complete and 0 < report.wanted_bytes < report.dataset_bytes
    (status,) = stages(where)
    assert not status.complete and status.there_chunks == status.wanted_chunks < status.dataset_chunks
    assert status.dataset_bytes == report.dataset_bytes


@pytest.mark.parametrize("kind", [*KINDS, "records"])
def test_batches_are_the_same_whatever_is_staged(
    source: Source, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stage_read, "MOST_BAD", 1)
    name, where, good = "images" if kind == "records" else "corpus", tmp_path / "nvme", source.hashes[kind]
    found, said = hash_of(source, kind, where)
    assert found == good and said["state"] == "none yet" and said["stage_bytes"] == 0

    half(source, name, where)
    found, said = hash_of(source, kind, where)
    assert found == good and said["state"] == "a part" and 0.1 < said["stage_share"] < 1

    report = stage(source.volume, name, where)
    assert report.complete and 0 < report.copied_bytes < report.wanted_bytes
    found, said = hash_of(source, kind, where)
    assert found == good and said["volume_bytes"] == 0 and said["stage_share"] == 1
    assert not caplog.records

    path, size = file_of(where), file_of(where).stat().st_size
    flip(path, size - 5000)
    found, said = hash_of(source, kind, where)
    assert found == good and said["bad_chunks"] == 1 and 0 < said["stage_share"] < 1
    assert len(caplog.records) == 1 and str(path) in caplog.text and "checksum" in caplog.text
    flip(path, size - 5000 - CHUNK)
    found, said = hash_of(source, kind, where)
    assert found == good and said["state"] == "given up"

    caplog.clear()
    os.truncate(path, size // 2 // 4096 * 4096)
    found, said = hash_of(source, kind, where)
    assert found == good and said["state"] == "given up" and len(caplog.records) == 1
    report = stage(source.volume, name, where, StageOptions(verify=True))
    assert report.complete and hash_of(source, kind, where)[1]["stage_share"] == 1


def test_verify_copies_again_what_is_not_good(source: Source, tmp_path: Path) -> None:
    where = tmp_path / "nvme"
    stage(source.volume, "corpus", where)
    path = file_of(where)
    flip(path, path.stat().st_size - 5000, path.stat().st_size - 5000 - CHUNK)
    assert stage(source.volume, "corpus", where).copied_bytes == 0
    assert stage(source.volume, "corpus", where, StageOptions(verify=True)).mended_chunks == 2
    assert stage(source.volume, "corpus", where, StageOptions(verify=True)).mended_chunks == 0
    found, said = hash_of(source, "windows", where)
    assert found == source.hashes["windows"] and said["volume_bytes"] == 0


def test_verify_reads_past_what_the_kernel_keeps_in_memory(source: Source, tmp_path: Path) -> None:
    where = tmp_path / "nvme"
    stage(source.volume, "corpus", where)
    path, kept = file_of(where), []

    def is_kept(place: int) -> bool:
        with path.open("rb") as file:
            try:
                return bool(os.preadv(file.fileno(), [bytearray(1)], place, os.RWF_NOWAIT))
            except BlockingIOError:
                return False
            except OSError:
                # A file system that does not say, as one in memory.
                return True

    def shown(now: StageProgress) -> None:
        if now.doing == "verifying" and not kept:
            kept.append(is_kept(path.stat().st_size - 4096))

    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        lets_go = not is_kept(path.stat().st_size - 4096)
    except OSError:
        lets_go = False
    path.read_bytes()
    report = stage(source.volume, "corpus", where, StageOptions(verify=True), progress=shown)
    assert report.verified == ("medium" if lets_go else "memory")
    assert kept == [not lets_go] or not lets_go
    assert stage(source.volume, "corpus", where).verified is None


def test_verify_mends_a_page_of_a_checksum_table(tmp_path: Path) -> None:
    """Of which other pages are good, and chunks that are verified by those."""
    where = tmp_path / "nvme"
    with Volume.create(f"file:{tmp_path}/a.img?create=64MiB") as volume:
        put_stream(volume, "corpus", some_lengths(2500, 2500))
        stage(volume, "corpus", where)
        with Stage.open(next(stages(where)).where) as found:
            blobs = found.facts.blobs
            (row,) = blobs[blobs["table_bytes"] > 16384]
            place = found.facts.base + int(row["table_at"]) + 100
        flip(file_of(where), place)
        assert stage(volume, "corpus", where, StageOptions(verify=True)).mended_chunks > 0
        assert stage(volume, "corpus", where, StageOptions(verify=True)).mended_chunks == 0


def test_a_stager_that_verifies_can_be_stopped(source: Source, tmp_path: Path) -> None:
    seen: list[int] = []
    stop = threading.Event()

    def shown(now: StageProgress) -> None:
        if now.doing == "verifying":
            seen.append(now.done_bytes)
            stop.set()

    report = stage(source.volume, "corpus", tmp_path, StageOptions(verify=True), progress=shown, stop=stop)
    assert seen == [1] and report.complete and report.mended_chunks == 0


@pytest.mark.parametrize("workers", [1, 3])
def test_after_ctrl_c_nothing_is_written_any_more(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    write, begun, under_way = Held.write, threading.Event(), set()

    def slowly(self: Held, place: int, data: np.ndarray) -> None:
        under_way.add(place)
        begun.set()
        # So that it is met in the middle; where it is not, nothing is shown.
        time.sleep(0.2)
        write(self, place, data)
        under_way.remove(place)

    def interrupt() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Held, "write", slowly)
    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        stage(source.volume, "corpus", tmp_path, StageOptions(workers=workers))
        other.join()
        time.sleep(60)
    assert not under_way
    other.join()
    monkeypatch.setattr(Held, "write", write)
    assert stage(source.volume, "corpus", tmp_path).complete


def test_a_running_loader_uses_what_comes(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage is made, grows, is damaged and is dropped while an epoch is under way."""
    monkeypatch.setattr(stage_read, "LOOK_S", 0.0)
    where = tmp_path / "nvme"
    each = feed(source.volume, "corpus", where)
    shares: list[float] = []

    def between(step: int) -> None:
        shares.append(each.describe()["corpus"]["stage"]["stage_share"])
        if step == 20:
            stage(source.volume, "corpus", where, StageOptions(most_bytes=1 << 20, partial=True))
        elif step == 60:
            drop_stage(next(stages(where)).where)
            stage(source.volume, "corpus", where)
        elif step == 140:
            flip(file_of(where), *range(1 << 20, file_of(where).stat().st_size, 4096))
        elif step == 160:
            drop_stage(next(stages(where)).where)

    assert epoch(each, between) == source.hashes["windows"]
    assert shares[18] == 0 and 0 < shares[58] < shares[138]
    assert each.describe()["corpus"]["stage"]["state"] == "given up"


def test_a_dataset_that_was_replaced_is_not_read_from_its_old_stage(tmp_path: Path) -> None:
    where, uri = tmp_path / "nvme", f"file:{tmp_path}/a.img"
    with Volume.create(f"{uri}?create=64MiB") as volume:
        put_stream(volume, "corpus", some_lengths(5000, 200))
        stage(volume, "corpus", where)
        # The same lengths and name; other tokens.
        put_stream(volume, "corpus", some_lengths(5000, 200), vocabulary=400)
        good = epoch(feed(volume, "corpus", None))
        each = feed(volume, "corpus", where)
        assert epoch(each) == good
        said = each.describe()["corpus"]["stage"]
        assert said["stage_bytes"] == 0 and said["trouble"] is None
        assert stage(volume, "corpus", where).copied_bytes > 0
        each = feed(volume, "corpus", where)
        assert epoch(each) == good and each.describe()["corpus"]["stage"]["stage_share"] == 1


def test_the_stage_of_another_volume_is_never_read(tmp_path: Path) -> None:
    """Also where it says that it is of this one, and has the same birth numbers at the same places."""
    volumes = [Volume.create(f"file:{tmp_path}/{name}.img?create=32MiB") for name in "ab"]
    for number, volume in enumerate(volumes):
        put_stream(volume, "corpus", some_lengths(3000, 200), vocabulary=400 + number)
        stage(volume, "corpus", tmp_path / f"nvme-{number}")
    paths = [file_of(tmp_path / f"nvme-{number}") for number in range(2)]
    good = epoch(feed(volumes[0], "corpus", None))
    paths[0].write_bytes(paths[1].read_bytes())
    each = feed(volumes[0], "corpus", tmp_path / "nvme-0")
    assert epoch(each) == good and each.describe()["corpus"]["stage"]["stage_bytes"] == 0

    stage(volumes[0], "corpus", tmp_path / "nvme-0")
    data_at = 64 * 1024  # Behind head, facts and map.
    paths[0].write_bytes(paths[0].read_bytes()[:data_at] + paths[1].read_bytes()[data_at:])
    each = feed(volumes[0], "corpus", tmp_path / "nvme-0", verify=False)
    assert epoch(each) == good
    assert each.describe()["corpus"]["stage"]["stage_bytes"] == 0 and each.describe()["corpus"]["stage"]["trouble"]
    for volume in volumes:
        volume.close()


@pytest.mark.skipif(bool(LoopDevice.problem()), reason=LoopDevice.problem() or "there are loop devices")
def test_a_block_device(source: Source, tmp_path: Path) -> None:
    with LoopDevice(tmp_path / "loop", 64 << 20) as device:
        where = device.path
        part = stage(source.volume, "corpus", where, StageOptions(most_bytes=1 << 20, partial=True))
        assert not part.complete
        report = stage(source.volume, "corpus", where, StageOptions(verify=True))
        assert report.complete and 0 < report.copied_bytes < report.wanted_bytes
        assert report.verified == "medium" and report.mended_chunks == 0
        (status,) = stages(where)
        assert status.complete and not status.busy and status.where == f"block:{where}"
        each = feed(source.volume, "corpus", where)
        assert epoch(each) == source.hashes["windows"] and each.describe()["corpus"]["stage"]["volume_bytes"] == 0
        with pytest.raises(UsageError, match="another dataset is there"):
            stage(source.volume, "images", where)
        drop_stage(status.where)
        assert not next(stages(where)).dataset
        assert stage(source.volume, "images", where).complete
    with LoopDevice(tmp_path / "small", 1 << 20) as device, pytest.raises(VolumeFull, match="no room"):
        stage(source.volume, "corpus", device.path)


def test_staging_behind_a_loader(source: Source, tmp_path: Path) -> None:
    with Staging(source.volume, "corpus", tmp_path, StageOptions(limit_bytes_s=1.0)) as staging:
        assert not staging.done()
    assert staging.done() and not staging.wait().complete
    with Staging(source.volume, "corpus", tmp_path) as staging:
        assert staging.wait(60).complete
    with Staging(source.volume, "nobody", tmp_path) as staging, pytest.raises(Exception, match="nobody"):
        staging.wait(60)


def test_staging_is_waited_for_also_after_ctrl_c(source: Source, tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def shown(now: StageProgress) -> None:
        begun.set()
        go_on.wait(60)

    def interrupt() -> None:
        begun.wait()
        # So that it is met in its wait; where it is not, nothing is shown.
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    with Staging(source.volume, "corpus", tmp_path, progress=shown) as staging:
        other.start()
        with pytest.raises(KeyboardInterrupt):
            staging.wait(60)
            time.sleep(60)
        done = staging.done()
        go_on.set()
        assert not done and staging.wait(60).complete
    other.join()


def test_what_cannot_be_meant(source: Source, tmp_path: Path) -> None:
    for wrong in ({"share": 0.0}, {"limit_bytes_s": 0}, {"workers": 0}, {"most_bytes": 0}, {"patience_s": 0}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            StageOptions(**wrong)
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UsageError, match="something else"):
        stage(source.volume, "corpus", f"file:{tmp_path}/mine")
    with pytest.raises(UsageError, match="no stage"):
        drop_stage(f"file:{tmp_path}/mine")
    assert (tmp_path / "mine").read_text() == "precious"
    # Much begins with zeros: images of disks, tensors.
    zeros = bytes(8192) + b"precious"
    (tmp_path / "zeros").write_bytes(zeros)
    with pytest.raises(UsageError, match="something else"):
        stage(source.volume, "corpus", f"file:{tmp_path}/zeros")
    with pytest.raises(UsageError, match="no stage"):
        drop_stage(f"file:{tmp_path}/zeros")
    assert (tmp_path / "zeros").read_bytes() == zeros
    with Volume.create(f"file:{tmp_path}/other.img?create=16MiB", name="mine"):
        pass
    with pytest.raises(UsageError, match="something else"):
        stage(source.volume, "corpus", f"file:{tmp_path}/other.img")
    for where in ("nvme+tcp://127.0.0.1:4420/nqn", "", f"{tmp_path}/no/such/folder"):
        with pytest.raises(UsageError, match="no place"):
            stage(source.volume, "corpus", where)
    assert stage(source.volume, "corpus", f"file:{tmp_path}/mine", StageOptions(force=True)).complete
    assert isinstance(address_of("/dev/shm/mine", source.volume.id, "corpus"), FileAddress)
    assert isinstance(address_of("/dev/nvme7n1", source.volume.id, "corpus"), BlockAddress)


def test_a_file_that_is_the_stage_of_another_dataset_is_left_alone(source: Source, tmp_path: Path) -> None:
    where = f"file:{tmp_path}/one"
    stage(source.volume, "images", where)
    kept = (tmp_path / "one").read_bytes()
    with pytest.raises(UsageError, match="another dataset is there") as refused:
        stage(source.volume, "corpus", where)
    assert "'images'" in str(refused.value) and "--force" in str(refused.value)
    # Also of another volume, where it has the same name.
    with Volume.create(f"file:{tmp_path}/a.img?create=32MiB") as other:
        put_stream(other, "images", some_lengths(100, 20))
        with pytest.raises(UsageError, match=source.volume.id):
            stage(other, "images", where)
    assert (tmp_path / "one").read_bytes() == kept and stage(source.volume, "images", where).copied_bytes == 0
    assert stage(source.volume, "corpus", where, StageOptions(force=True)).complete
    assert [each.dataset for each in stages(where)] == ["corpus"]


def test_records_and_streams_of_a_stage_pickle(source: Source, tmp_path: Path) -> None:
    stage(source.volume, "images", tmp_path)
    records = pickle.loads(pickle.dumps(Records.open(source.volume, "images", stage=str(tmp_path))))
    with records.volume:
        assert all_records(records) == source.hashes["records"]
        assert records.near.describe()["stage_share"] == 1
