"""Records: tars and files into a volume, found again by number and key, byte for byte; hostile tars and indexes."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.dataset.ingestion import archives
from headrace.dataset.ingestion import records as ingestion_records
from headrace.dataset.ingestion.records import RecordsReport, ingest_records, open_records
from headrace.dataset.ingestion.run import WorkOptions
from headrace.dataset.records.index import bucket_bits, buckets_of
from headrace.dataset.records.records import Records
from headrace.errors import CorpusUnreadable, DatasetError, ObjectNotFound, UsageError
from headrace.volume import Volume
from tests.dataset.corpora import memory_volume, native_volume
from tests.dataset.test_ingest_workers import interrupt

Sample = tuple[str, dict[str, bytes]]


def samples(count: int, seed: int = 1, prefix: str = "") -> list[Sample]:
    chance = random.Random(seed)
    result = []
    for number in range(count):
        fields = {"jpg": chance.randbytes(chance.choice([0, 1, 700, 5000, 30_000]))}
        if number % 3:
            fields["cls"] = str(number).encode()
        if number % 7 == 0:
            fields["seg.png"] = chance.randbytes(100)
        result.append((f"{prefix}{number // 10}/{number:06}", fields))
    return result


def write_tar(path: Path, found: Sequence[Sample], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        folder = tarfile.TarInfo("0")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for key, fields in found:
            for kind, data in fields.items():
                member = tarfile.TarInfo(f"{key}.{kind}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path


def keep(volume: Volume, path: Path, *, bad: str = "fail", **options: object) -> RecordsReport:
    with volume.session(run_id="test") as session:
        return ingest_records(open_records(path, bad=bad), session, "a", WorkOptions(**options))  # type: ignore[arg-type]


def all_of(volume: Volume) -> list[Sample]:
    records = Records.open(volume, "a")
    found = records.read(np.arange(len(records)))
    return [
        (key, {kind: bytes(data) for kind, data in record.items()})
        for key, record in zip(records.keys(np.arange(len(records))), found, strict=True)
    ]


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Sample]]:
    folder = tmp_path_factory.mktemp("tars")
    expected = []
    for number, (suffix, mode) in enumerate((("tar", "w"), ("tar.gz", "w:gz"), ("tgz", "w:gz"), ("tar", "w"))):
        found = samples(40, number, f"{number}/")
        write_tar(folder / f"{number}.{suffix}", found, mode)
        expected += found
    (folder / "index.json").write_text("{}")
    return folder, expected


@pytest.mark.parametrize("workers", [1, 2])
def test_tars_are_kept_byte_for_byte(tars: tuple[Path, list[Sample]], tmp_path: Path, workers: int) -> None:
    folder, expected = tars
    Volume.create([f"file:{tmp_path}/a.img?create=64MiB"]).close()
    with Volume.open([f"file:{tmp_path}/a.img"], write=True) as volume:
        report = keep(volume, folder, workers=workers, slice_bytes=1000, part_bytes=64 << 10)
        assert (report.slices, report.workers, report.ignored_files) == (4, workers, 1)
        assert all_of(volume) == expected
        assert report.manifest["records"] == 160
        assert report.manifest["kinds"] == {
            kind: sum(kind in fields for _, fields in expected) for kind in ("jpg", "seg.png", "cls")
        }
        assert json.loads(volume.read("a.json")) == report.manifest
        assert [info.name for info in volume.list()] == ["a.json", "a.records", "a.records.idx"]


@pytest.mark.parametrize("make", [memory_volume, native_volume])
def test_batches_in_any_order_and_keys(tars: tuple[Path, list[Sample]], make: object) -> None:
    folder, expected = tars
    with make() as volume:  # type: ignore[operator]
        keep(volume, folder)
        records = Records.open(volume, "a")
        chance = random.Random(2)
        for _ in range(5):
            numbers = [chance.randrange(160) for _ in range(20)]
            found = records.submit(numbers, ["cls", "jpg"]).wait()
            for number, record in zip(numbers, found, strict=True):
                fields = expected[number][1]
                assert {kind: bytes(data) for kind, data in record.items()} == {
                    kind: fields[kind] for kind in ("jpg", "cls") if kind in fields
                }
        for number in (0, 77, 159):
            assert records.find(expected[number][0]) == number
        assert records.find("nowhere") is None and records.find("") is None
        assert records[5] == records.__getitems__([5])[0]
        assert records.read([]) == []
        for wrong in ([160], [-1], [0.5], [[1]]):
            with pytest.raises(UsageError):
                records.read(wrong)
        with pytest.raises(UsageError, match="no record has a field 'txt'"):
            records.read([0], ["txt"])
        with pytest.raises(DatasetError, match=r"too long.*fewer records"):
            records.submit(np.arange(160), most_bytes=1000)
        with pytest.raises(ObjectNotFound):
            Records.open(volume, "b")


def test_little_of_the_index_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(f"{number:07}", {"x": b"1"}) for number in range(5000)]
    with memory_volume() as volume:
        keep(volume, write_tar(tmp_path / "a.tar", found))
        whole = volume.stat("a.records.idx").length_bytes
        asked: list[int] = []
        submit = Volume.submit_read

        def counted(
            self: Volume, what: object, offsets: object, lengths: object, *rest: object, **more: object
        ) -> object:
            asked.append(int(np.sum(lengths)))  # type: ignore[arg-type]
            return submit(self, what, offsets, lengths, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(Volume, "submit_read", counted)
        records = Records.open(volume, "a")
        assert [records.find(f"{number:07}") for number in range(0, 5000, 500)] == list(range(0, 5000, 500))
        assert whole > 300_000 and max(asked) < 4096 and sum(asked) < 40_000


def test_files_of_any_kind(tmp_path: Path) -> None:
    expected = sorted(samples(30), key=lambda sample: sample[0])
    for key, fields in expected:
        (tmp_path / "in" / key).parent.mkdir(parents=True, exist_ok=True)
        for kind, data in fields.items():
            (tmp_path / "in" / f"{key}.{kind}").write_bytes(data)
    (tmp_path / "in" / "no suffix").write_bytes(b"x")
    for size in (None, 1, 40_000):
        with memory_volume() as volume:
            keep(volume, tmp_path / "in", workers=1, slice_bytes=size)
            assert dict(all_of(volume)) == dict([*expected, ("no suffix", {"": b"x"})])


def test_goes_on_where_it_was(tars: tuple[Path, list[Sample]]) -> None:
    folder, expected = tars
    with memory_volume() as volume, volume.session(run_id="test") as session:
        kept: list[str] = []

        def told(_: object) -> None:
            if not kept and volume.any("a.ingest/"):
                kept.append("one")
                interrupt()

        options = WorkOptions(workers=1, slice_bytes=1000)
        with pytest.raises(KeyboardInterrupt):
            ingest_records(folder, session, "a", options, progress=told)
        report = ingest_records(folder, session, "a", options)
        assert report.resumed == 1
        assert all_of(volume) == expected


# ---- bad ones ------------------------------------------------------------------------------------------------------


def _member(name: str, data: bytes = b"x", **more: object) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in more.items():
        setattr(member, key, value)
    return member.tobuf() + data + bytes(-len(data) % 512)


def _header(kind: bytes, size: int = 0) -> bytes:
    member = tarfile.TarInfo("x")
    member.type, member.size = kind, size
    return member.tobuf()


END = bytes(1024)
GOOD = _member("good.txt", b"good")


def _cases() -> dict[str, tuple[bytes, str, list[str]]]:
    """Name -> the tar, what the error must say, and keys that are left when what is bad is left out."""
    huge = tarfile.TarInfo("x")
    huge.type, huge.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    long = tarfile.TarInfo("x")
    long.type, long.size = tarfile.GNUTYPE_LONGNAME, 2 << 20
    negative = bytearray(_member("n.txt"))
    negative[124:136] = b"\xff" * 12
    negative[148:156] = b"%06o\0 " % sum((*negative[:148], *b" " * 8, *negative[156:512]))
    sparse = bytearray(_header(tarfile.GNUTYPE_SPARSE))
    # More of it follows, it says.
    sparse[482] = 1
    sparse[148:156] = b"%06o\0 " % sum((*sparse[:148], *b" " * 8, *sparse[156:512]))
    garbage = bytes(range(256)) * 2
    # Blocks of a map, each of which says that another one follows.
    endless = bytes(sparse) + (bytes(504) + b"\1" + bytes(7)) * 3000
    rules = b"%d k=" % (600 << 10) + b"v" * ((600 << 10) - 10) + b"\n"
    rule = _header(tarfile.XGLTYPE, len(rules)) + rules + bytes(-len(rules) % 512)
    # It has no number at all in its map.
    said = b"".join(b"%d %s\n" % (len(each) + 4, each) for each in (b"GNU.sparse.major=1", b"GNU.sparse.minor=0"))
    mapped = _header(tarfile.XHDTYPE, len(said)) + said + bytes(512 - len(said)) + _member("m.txt", b"no map")
    return {
        "cut in a member": (GOOD + _member("cut.txt", b"y" * 4000)[:2000], "damaged or cut off", ["good"]),
        "cut between members": (GOOD, "damaged or cut off", []),
        "garbage behind": (GOOD + garbage + END, "damaged or cut off", []),
        "no tar": (garbage * 4, "damaged or cut off", []),
        "empty": (b"", "damaged or cut off", []),
        "a link": (GOOD + _member("l.txt", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd") + END, "plain", ["good"]),
        "sparse": (GOOD + _member("s.txt", b"", type=tarfile.GNUTYPE_SPARSE) + END, "plain|damaged", []),
        "sparse, cut off": (GOOD + bytes(sparse), "damaged", []),
        "a sparse map without an end": (GOOD + endless + END, "bytes of headers", []),
        "a sparse map in the data": (GOOD + mapped + _member("b.txt") + END, "plain", ["good", "b"]),
        "rules for all members, again and again": ((GOOD + rule) * 3 + END, "bytes of headers|twice", []),
        "twice": (GOOD + GOOD + END, "name twice", ["good"]),
        "twice, apart": (GOOD + _member("b.txt") + GOOD + END, "one key.*good|good.*one key", ["good", "b"]),
        "a long name": (GOOD + huge.tobuf() + END, "damaged", []),
        "a long name that is there": (GOOD + long.tobuf() + b"n" * long.size + _member("x") + END, "damaged", []),
        "ever more headers": (GOOD + _header(tarfile.XHDTYPE) * 5000 + END, "more than 64 headers", []),
        "negative": (GOOD + bytes(negative) + END, "damaged", []),
        "a kind that is too long": (GOOD + _member("k." + "k" * 80) + END, "not a name", ["good"]),
    }


@pytest.mark.parametrize("case", list(_cases()))
def test_hostile_tars(tmp_path: Path, case: str) -> None:
    content, say, left = _cases()[case]
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    with memory_volume() as volume:
        with pytest.raises(DatasetError, match=say) as caught:
            keep(volume, path)
        assert "\n" not in str(caught.value) and ("a.tar" in str(caught.value) or "good" in str(caught.value))
        assert not [info for info in volume.list() if not info.name.startswith("a.ingest/")]
        write_tar(tmp_path / "b.tar", [("z", {"txt": b"z"})])
        report = keep(volume, tmp_path, bad="skip", restart=True)
        assert report.manifest["corpus"]["bad_records"] >= 1
        found = all_of(volume)
        assert found[-1] == ("z", {"txt": b"z"})
        keys = [key for key, _ in found[:-1]]
        assert keys == left or (not left and keys in ([], ["good"])), keys


def test_a_record_of_one_kind_too_many_leaves_the_others_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingestion_records, "MOST_KINDS", 2)
    good: list[Sample] = [("a", {"x": b"ax", "y": b"ay"}), ("c", {"y": b"cy"}), ("d", {"x": b"dx", "y": b"dy"})]
    path = write_tar(tmp_path / "a.tar", [good[0], ("b", {"x": b"bx", "z": b"bz"}), *good[1:]])
    with memory_volume() as volume:
        with pytest.raises(DatasetError, match="too many kinds of fields at b"):
            keep(volume, path, workers=1)
        report = keep(volume, path, bad="skip", workers=1, restart=True)
        assert report.manifest["corpus"]["bad_records"] == 1
        assert all_of(volume) == good


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tar.zst", "a.txt"])
def test_a_file_that_cannot_be_had_is_never_left_out(tmp_path: Path, name: str) -> None:
    for each in (name, name.replace("a", "b", 1)):
        write_tar(tmp_path / each, [("z", {"txt": b"z"})])
    corpus = open_records(tmp_path, bad="skip")
    (tmp_path / name).unlink()
    with memory_volume() as volume, volume.session(run_id="test") as session:
        with pytest.raises(CorpusUnreadable, match="No such file"):
            ingest_records(corpus, session, "a", WorkOptions(workers=1))
        assert volume.list() == []


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    """Checksums would find it first; here it was written so."""
    path = write_tar(tmp_path / "a.tar", samples(30))
    with native_volume() as volume, volume.session(run_id="test") as session:
        ingest_records(path, session, "a")
        whole = volume.read("a.records.idx")
        chance = random.Random(3)
        for number in range(40):
            damaged = bytearray(whole)
            if number < 20:
                place = chance.randrange(64)
                damaged[place] ^= 1 << chance.randrange(8)
            else:
                start = chance.randrange(64, len(damaged) - 200)
                damaged[start : start + 200] = b"\xff" * 200
            with session.transaction() as transaction:
                transaction.delete("a.records.idx")
                transaction.put("a.records.idx", bytes(damaged))
            try:
                records = Records.open(volume, "a")
                records.read(np.arange(len(records)))
                records.keys(np.arange(len(records)))
                for key in ("0/000001", "x"):
                    records.find(key)
            except (DatasetError, UsageError) as error:
                assert "\n" not in str(error)


def test_members_are_not_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "a.tar", [(f"{number}", {"x": b""}) for number in range(50)])
    most: list[int] = []
    plain = tarfile.TarFile.next

    def counted(self: tarfile.TarFile) -> object:
        most.append(len(self.members))
        return plain(self)

    monkeypatch.setattr(archives.tarfile.TarFile, "next", counted)
    with memory_volume() as volume:
        keep(volume, path)
    assert len(most) > 50 and max(most) <= 1


@pytest.mark.parametrize("count", [0, 1, 63, 64, 1000, 5000])
def test_buckets(count: int) -> None:
    hashes = np.sort(np.random.default_rng(1).integers(0, 1 << 64, count, np.uint64))
    bits = bucket_bits(count)
    buckets = buckets_of(hashes, bits)
    assert len(buckets) == (1 << bits) + 1 and buckets[0] == 0 and buckets[-1] == count
    for place, value in enumerate(hashes.tolist()):
        bucket = value >> (64 - bits) if bits else 0
        assert buckets[bucket] <= place < buckets[bucket + 1]
