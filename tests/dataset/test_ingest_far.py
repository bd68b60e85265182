"""Workers that see something else under the names that the ingest gives them: real ones, told that they are far."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import pytest

from headrace.dataset import IngestOptions, IngestProgress, ingest, open_corpus
from headrace.dataset.ingestion import ray_hire
from headrace.dataset.ingestion.channel import encode
from headrace.dataset.ingestion.hire import Local, LocalHire
from headrace.dataset.ingestion.ray_hire import RayHire, check_address
from headrace.dataset.ingestion.run import Run
from headrace.errors import DatasetError, DeviceError, UsageError
from headrace.volume import Volume
from tests.dataset.corpora import memory_volume, texts, write_folder


class Elsewhere(LocalHire):
    far = True

    def one(self) -> Local:
        found = super().one()
        found.node = "elsewhere"  # type: ignore[misc]
        return found


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "_hire", lambda self: Elsewhere())


OPTIONS = IngestOptions(vocab_size=300, workers=2, slice_bytes=1)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "a.img"
    Volume.create([f"file:{path}?create=16MiB"]).close()
    return path


def test_relative_names_mean_the_same_everywhere(
    far: None, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "texts", texts(4))
    with Volume.open(["file:a.img"], write=True) as volume, volume.session(run_id="test") as session:
        report = ingest("texts", session, "a", OPTIONS)
        assert (report.manifest.documents, report.slices, report.direct) == (4, 4, True)


@pytest.mark.parametrize("change", ["gone", "longer", "later"])
def test_other_files_are_named(far: None, image: Path, tmp_path: Path, change: str) -> None:
    folder = write_folder(tmp_path / "texts", texts(2))
    corpus, path = open_corpus(folder), folder / "00001.txt"

    def changed(now: IngestProgress) -> None:
        if now.phase == "tokenizer":
            return
        if change == "gone":
            path.unlink(missing_ok=True)
        elif change == "longer":
            path.write_text("x" * 5000)
        else:
            os.utime(path, ns=(1, 1))

    with Volume.open([f"file:{image}"], write=True) as volume, volume.session(run_id="test") as session:
        found = "is not there" if change == "gone" else "is another one, or was changed"
        with pytest.raises(DatasetError, match=rf"{found} at .*00001\.txt, seen from elsewhere.*all machines"):
            ingest(corpus, session, "a", OPTIONS, progress=changed)


def test_a_volume_that_is_not_reached(far: None, image: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "texts", texts(2))
    with Volume.open([f"file:{image}"], write=True) as volume, volume.session(run_id="test") as session:
        image.rename(tmp_path / "b.img")
        with pytest.raises(DeviceError, match=r"a\.img.*seen from elsewhere"):
            ingest(folder, session, "a", OPTIONS)
    with memory_volume() as volume, volume.session(run_id="test") as session:
        with pytest.raises(DatasetError, match="other machines cannot reach the volume"):
            ingest(folder, session, "a", OPTIONS)
        assert not [info for info in volume.list() if not info.name.startswith("a.ingest/")]


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("", "somewhere", "a:0", "a:65536", "a:x", "http://a:1", "a:1/", "local"):
        with pytest.raises(UsageError, match="auto, or HOST:PORT"):
            check_address(wrong)
    monkeypatch.setattr("headrace.dataset.ingestion.ray_hire.find_spec", lambda name: None)
    for right in ("auto", "10.0.0.1:6379", "head.example:6379", "[::1]:6379"):
        with pytest.raises(DatasetError, match=r"needs Ray.*pip install 'headrace\[ray\]'"):
            check_address(right)


def test_more_workers_than_files_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_hire, "find_spec", lambda name: name)
    hire = RayHire("auto", None, 1)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    hire._control = ours
    with ours, theirs:
        socket.send_fds(theirs, [encode(("ready", "0.1", "node"))], [theirs.fileno()])
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(theirs.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            with pytest.raises(DatasetError, match="ulimit -n"):
                hire.hear()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
