"""Files and folders in and out of a volume: the rules of `cp -r`, everything or nothing, one clear line a problem."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import CopyFailed, UsageError, VolumeDamaged, VolumeFull
from headrace.units import MIB
from headrace.volume import Session, Volume
from headrace.volume.copy import CopyOptions, Problem, Progress, copy_between, copy_in, copy_out, files, run
from headrace.volume.writing import transaction
from headrace.volume.writing.compose import Composition
from tests.volume.support import STRIPE

ALL = CopyOptions(recursive=True)
KEEP = CopyOptions(recursive=True, keep_going=True)


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    members = [f"file:{tmp_path}/{name}.img?create=96MiB" for name in "ab"]
    with Volume.create(members, stripe_bytes=STRIPE) as made:
        yield made


@pytest.fixture
def session(volume: Volume) -> Iterator[Session]:
    with volume.session(run_id="test") as opened:
        yield opened


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs and pieces so small that a few files are many of them."""
    monkeypatch.setattr(run, "PACKED_BYTES", 100_000)
    monkeypatch.setattr(run, "PIECE_BYTES", 4 * STRIPE)
    monkeypatch.setattr(run, "PACK_FILES", 3)


def folder_of(where: Path, sizes: dict[str, int]) -> Path:
    for seed, (name, size) in enumerate(sizes.items()):
        path = where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.Random(seed).randbytes(size))
    return where


def names(volume: Volume) -> list[str]:
    return [info.name for info in volume.list()]


def same(a: Path, b: Path) -> bool:
    return subprocess.run(["diff", "-r", str(a), str(b)], check=False, capture_output=True).returncode == 0


SIZES = {
    "empty": 0,
    "one": 1,
    "sub/block": 65536,
    "sub/deeper/odd": 99_999,
    "sub/piece": 4 * STRIPE,
    "large": 2_000_001,
    "Ünï cödé": 5000,
    **{f"many/{i}": 17 * i for i in range(20)},
}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("workers", [1, 3])
def test_after_ctrl_c_no_thread_is_left(
    tmp_path: Path, volume: Volume, session: Session, small_pieces: None, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    source = folder_of(tmp_path / "source", SIZES)
    begun, work, at_work = threading.Event(), run._Copy.work, set()

    def slowly(self: Any) -> None:
        at_work.add(threading.current_thread())
        begun.set()
        self.stopping.wait(60)
        time.sleep(0.1)
        work(self)
        at_work.remove(threading.current_thread())

    def interrupt() -> None:
        begun.wait()
        # So that it is met in its wait; where it is not, nothing is shown.
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run._Copy, "work", slowly)
    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        copy_in(session, [source], "archive", CopyOptions(recursive=True, workers=workers))
        time.sleep(60)
    assert not at_work and names(volume) == []
    other.join()
    monkeypatch.setattr(run._Copy, "work", work)
    copy_in(session, [source], "archive", ALL)


@pytest.mark.parametrize(
    "options", [ALL, KEEP, CopyOptions(recursive=True, verify=True), CopyOptions(recursive=True, workers=1)]
)
def test_a_folder_goes_in_and_comes_out_the_same(
    tmp_path: Path, volume: Volume, session: Session, options: CopyOptions
) -> None:
    source = folder_of(tmp_path / "source", SIZES)
    told: list[Progress] = []
    report = copy_in(session, [source], "archive", options, progress=told.append)
    assert (report.files, report.bytes, report.problems) == (len(SIZES), sum(SIZES.values()), [])
    assert {name.removeprefix("archive/") for name in names(volume)} == set(SIZES)
    assert (len(report.sequences) == 1) == (not options.keep_going)
    assert told and told[-1].done_files <= len(SIZES) and told[-1].total_bytes == report.bytes
    back = copy_out(volume, ["archive"], tmp_path / "back", options)
    assert (back.files, back.problems) == (len(SIZES), [])
    assert same(source, tmp_path / "back")
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.usefixtures("small_pieces")
def test_from_volume_to_volume(tmp_path: Path, volume: Volume, session: Session) -> None:
    source = folder_of(tmp_path / "source", SIZES)
    copy_in(session, [source], "a", ALL)
    with (
        Volume.create([f"file:{tmp_path}/other.img?create=64MiB"], stripe_bytes=2 * STRIPE) as other,
        other.session(run_id="test") as theirs,
    ):
        report = copy_between(volume, theirs, ["a"], "b", CopyOptions(recursive=True, verify=True))
        assert (report.files, len(report.sequences)) == (len(SIZES), 1)
        assert all(other.read("b/" + name) == (source / name).read_bytes() for name in SIZES)


def test_what_was_not_copied_is_not_verified(tmp_path: Path, volume: Volume, session: Session) -> None:
    copy_in(session, [folder_of(tmp_path / "source", {"x": 10, "y": 20})], "a", ALL)
    options = CopyOptions(recursive=True, keep_going=True, verify=True)
    with (
        Volume.create([f"file:{tmp_path}/other.img?create=64MiB"], stripe_bytes=STRIPE) as other,
        other.session(run_id="test") as theirs,
    ):
        plan = run.plan_between(volume, other, ["a"], "b", options)
        with session.transaction() as tx:
            tx.delete("a/x")
        report = copy_between(volume, theirs, ["a"], "b", options, plan=plan)
        assert [problem.source for problem in report.problems] == ["a/x"]
        assert names(other) == ["b/y"]


def where_it_goes(tree: list[str], arguments: list[str], tmp_path: Path) -> set[str]:
    """What `cp -r` makes of it: the files below its working folder afterwards."""
    root = tmp_path / "cp"
    for name in tree:
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    subprocess.run(["cp", "-r", *arguments], cwd=root, check=True, capture_output=True)
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} - {
        name for name in tree if not name.endswith("/")
    }


@pytest.mark.parametrize(
    ("there", "sources", "destination"),
    [
        ([], ["src/f"], "out"),
        (["out/x"], ["src/f"], "out"),
        (["out/x"], ["src/f"], "out/"),
        (["out/x"], ["src/f"], "out/new"),
        ([], ["src"], "out"),
        ([], ["src"], "out/"),
        (["out/x"], ["src"], "out"),
        (["out/x"], ["src/"], "out/"),
        (["out/x"], ["src/."], "out"),
        ([], ["src/."], "out"),
        (["out/x"], ["src/f", "src/sub"], "out"),
        (["out/x"], ["src/sub", "src/f"], "out/"),
        (["out/deep/x"], ["src/sub"], "out/deep"),
    ],
)
def test_destinations_are_those_of_cp(
    tmp_path: Path, volume: Volume, session: Session, there: list[str], sources: list[str], destination: str
) -> None:
    tree = ["src/f", "src/sub/g", "src/sub/h/i"]
    expected = where_it_goes([*tree, *there], [*sources, destination], tmp_path)
    root = tmp_path / "mine"
    for name in tree:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    with session.transaction() as transaction:
        for name in [*tree, *there]:
            transaction.put("v/" + name, name.encode())
    before = set(names(volume))

    def given(source: str) -> str:
        # A Path would drop the "/." and the "/".
        return f"{root}/{source}"

    # In: the destination is a name of the volume.
    copy_in(session, [given(source) for source in sources], "v/" + destination, ALL)
    assert {name.removeprefix("v/") for name in set(names(volume)) - before} == expected
    # From the volume to files.
    for name in there:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    files = {path for path in root.rglob("*") if path.is_file()}
    copy_out(volume, ["v/" + source for source in sources], given(destination), ALL)
    assert {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path not in files} == expected


def test_what_is_there_already(tmp_path: Path, volume: Volume, session: Session) -> None:
    source = folder_of(tmp_path / "source", {"a": 10, "b": 20})
    copy_in(session, [source], "x", ALL)
    (source / "a").write_bytes(b"new")
    folder_of(source, {"c": 30})
    again = f"{source}/."
    with pytest.raises(CopyFailed, match=r"2 of 3 .*x/a.* nothing was written"):
        copy_in(session, [again], "x", ALL)
    assert names(volume) == ["x/a", "x/b"]
    report = copy_in(session, [again], "x", CopyOptions(recursive=True, existing="skip"))
    assert (report.files, report.skipped, len(volume.read("x/a"))) == (1, 2, 10)
    report = copy_in(session, [again], "x", CopyOptions(recursive=True, existing="replace"))
    assert (report.files, report.skipped, volume.read("x/a"), len(report.sequences)) == (3, 0, b"new", 1)

    out = tmp_path / "out"
    copy_out(volume, ["x"], out, ALL)
    (out / "b").write_bytes(b"mine")
    with pytest.raises(CopyFailed, match="is there already"):
        copy_out(volume, ["x/."], out, ALL)
    assert copy_out(volume, ["x/."], out, CopyOptions(recursive=True, existing="skip")).skipped == 3
    assert (out / "b").read_bytes() == b"mine"
    copy_out(volume, ["x/."], out, CopyOptions(recursive=True, existing="replace"))
    assert same(source, out)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("size", [100, 3 * STRIPE])
def test_what_is_there_already_is_compared(tmp_path: Path, volume: Volume, session: Session, size: int) -> None:
    """So a copy that was interrupted goes on: what is there with the same bytes stays."""
    update = CopyOptions(recursive=True, existing="update")
    source = folder_of(tmp_path / "source", {"same": size, "other": size, "longer": size, "new": size})
    (source / "empty").touch()
    copy_in(session, [source], "x", ALL)
    before = {info.name: info.sequence for info in volume.list()}
    (source / "other").write_bytes(bytes(size))
    (source / "longer").write_bytes(bytes(size + 1))
    with session.transaction() as transaction:
        transaction.delete("x/new")
    report = copy_in(session, [f"{source}/."], "x", update)
    assert (report.files, report.skipped, report.problems) == (3, 2, [])
    changed = {info.name for info in volume.list() if before[info.name] != info.sequence}
    assert changed == {"x/other", "x/longer", "x/new"}
    assert volume.read("x/other") == bytes(size)

    out = tmp_path / "out"
    copy_out(volume, ["x"], out, ALL)
    kept = (out / "same").stat()
    (out / "other").write_bytes(b"1" * size)
    (out / "longer").write_bytes(b"")
    (out / "new").unlink()
    report = copy_out(volume, ["x/."], out, update)
    assert (report.files, report.skipped, report.problems) == (3, 2, [])
    assert same(source, out) and (out / "same").stat().st_ino == kept.st_ino

    with (
        Volume.create([f"file:{tmp_path}/other.img?create=64MiB"], stripe_bytes=STRIPE) as other,
        other.session(run_id="test") as theirs,
    ):
        with theirs.transaction() as transaction:
            transaction.put("x/other", b"2" * size)
            transaction.put("x/same", volume.read("x/same"))
        report = copy_between(volume, theirs, ["x/."], "x", update)
        assert (report.files, report.skipped) == (4, 1)
        assert all(other.read(name) == volume.read(name) for name in names(volume))


def test_a_copy_within_a_volume_moves_no_data(tmp_path: Path, volume: Volume, session: Session) -> None:
    copy_in(session, [folder_of(tmp_path / "source", SIZES)], "a", ALL)
    used = volume.info().used_bytes
    report = copy_between(volume, session, ["a"], "b", CopyOptions(recursive=True, verify=True))
    assert (report.shared, report.files, len(report.sequences)) == (True, len(SIZES), 1)
    assert volume.info().used_bytes == used, "their bytes are shared"
    assert all(volume.read(f"b/{name}") == volume.read(f"a/{name}") for name in SIZES)
    with pytest.raises(CopyFailed, match="is there already"):
        copy_between(volume, session, ["a/."], "b", ALL)
    again = copy_between(volume, session, ["a/."], "b", CopyOptions(recursive=True, existing="replace"))
    assert (again.files, volume.info().used_bytes) == (len(SIZES), used)
    with session.transaction() as transaction:
        transaction.delete_prefix("a/")
    assert all(volume.read(f"b/{name}") == (tmp_path / "source" / name).read_bytes() for name in SIZES)


def test_what_cannot_be_shared_costs_nothing_that_is_there(
    tmp_path: Path, volume: Volume, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_in(session, [folder_of(tmp_path / "a", {"x": 10, "y": 20})], "a", ALL)
    copy_in(session, [folder_of(tmp_path / "b", {"x": 30, "y": 40})], "b", ALL)
    before = volume.read("b/x")
    resolve = Composition.resolve

    def fails(self: Composition, parts: Any) -> Any:
        if self._name == "b/x":
            raise VolumeDamaged("a node is damaged")
        return resolve(self, parts)

    def damaged(*_: object) -> Any:
        raise VolumeDamaged("a node is damaged")

    monkeypatch.setattr(Composition, "resolve", fails)
    monkeypatch.setattr(transaction, "whole_objects", damaged)
    options = CopyOptions(recursive=True, existing="replace", keep_going=True)
    report = copy_between(volume, session, ["a/."], "b", options)
    assert [(problem.source, report.files) for problem in report.problems] == [("a/x", 1)]
    assert (volume.read("b/x"), volume.read("b/y")) == (before, volume.read("a/y"))


def test_a_file_system_without_nameless_files(
    tmp_path: Path, volume: Volume, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.NewFile, "_named_only", {""})
    source = folder_of(tmp_path / "source", SIZES)
    copy_in(session, [source], "x", ALL)
    copy_out(volume, ["x"], tmp_path / "out", ALL)
    copy_out(volume, ["x/."], tmp_path / "out", CopyOptions(recursive=True, existing="replace"))
    assert same(source, tmp_path / "out")


def test_one_line_for_each_that_cannot_be_copied(tmp_path: Path, volume: Volume, session: Session) -> None:
    source = folder_of(tmp_path / "source", {"good": 10, "in/here": 5})
    (source / "link").symlink_to("good")
    (source / "dangling").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(source / "socket"))
    listener.close()
    Path(os.fsdecode(os.fsencode(source) + b"/caf\xe9")).write_text("latin 1")
    deep = source / "/".join(["d" * 200] * 6)
    deep.mkdir(parents=True)
    (deep / "file").write_text("a name of more than 1024 bytes")
    told: list[Problem] = []
    with pytest.raises(CopyFailed, match=r"6 of 8 .*nothing was written"):
        copy_in(session, [source], "x", ALL, problem=told.append)
    assert names(volume) == []
    words = {problem.source.rpartition("/")[2]: problem.why for problem in told}
    assert "symbolic link" in words["link"] and "symbolic link" in words["dangling"]
    assert "a pipe" in words["pipe"] and "a socket" in words["socket"]
    assert "not UTF-8" in words["caf\\xe9"] and "1024" in words["file"]
    report = copy_in(session, [source], "x", KEEP)
    assert (names(volume), len(report.problems)) == (["x/good", "x/in/here"], 6)
    report = copy_in(session, [source], "y", CopyOptions(recursive=True, keep_going=True, follow_links=True))
    assert "y/link" in names(volume) and len(report.problems) == 5


def test_a_circle_of_links_ends(tmp_path: Path, volume: Volume, session: Session) -> None:
    source = folder_of(tmp_path / "source", {"in/file": 10})
    (source / "in" / "up").symlink_to("..")
    report = copy_in(session, [source], "x", CopyOptions(recursive=True, keep_going=True, follow_links=True))
    assert names(volume) == ["x/in/file"]
    assert "a folder that it is in" in report.problems[0].why


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_what_may_not_be_read(tmp_path: Path, volume: Volume, session: Session) -> None:
    source = folder_of(tmp_path / "source", {"a": 10, "b": 200_000, "closed/c": 1})
    (source / "b").chmod(0)
    (source / "closed").chmod(0)
    with pytest.raises(CopyFailed, match="Permission denied"):
        copy_in(session, [source], "x", ALL)
    assert names(volume) == []
    assert len(copy_in(session, [source], "x", KEEP).problems) == 2
    (source / "closed").chmod(0o700)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("options", [ALL, KEEP, CopyOptions(recursive=True, keep_going=True, verify=True)])
def test_a_file_that_changes_its_length(
    tmp_path: Path, volume: Volume, session: Session, large: bool, options: CopyOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_of(tmp_path / "source", {"a": 10, "b": 1_000_000 if large else 1000, "c": 10})
    wait = run._stop_at_problems

    def shrink(plan: object, so: str) -> None:
        wait(plan, so)  # type: ignore[arg-type]
        os.truncate(source / "b", 900)

    monkeypatch.setattr(run, "_stop_at_problems", shrink)
    if options.keep_going:
        report = copy_in(session, [source], "x", options)
        assert [problem.source for problem in report.problems] == [str(source / "b")]
        assert names(volume) == ["x/a", "x/c"]
    else:
        with pytest.raises(CopyFailed, match="while it was copied; nothing was written"):
            copy_in(session, [source], "x", options)
        assert names(volume) == []
    free = session.free_bytes
    assert session.quarantined_bytes == 0, "every write was answered"
    with session.transaction() as transaction:
        transaction.put("after", b"1")
    assert free - session.free_bytes == 4096


def test_a_file_that_changes_its_bytes_is_found_by_verify(
    tmp_path: Path, volume: Volume, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_of(tmp_path / "source", {"a": 10, "b": 3_000_000})
    look = run._read_back

    def change(*arguments: object) -> None:
        with (source / "b").open("r+b") as file:
            file.seek(2_000_000)
            file.write(b"changed")
        look(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "_read_back", change)
    with pytest.raises(CopyFailed, match=r"everything was copied, but .*not what was to be copied"):
        copy_in(session, [source], "x", CopyOptions(recursive=True, verify=True))


def test_names_that_no_file_can_have(tmp_path: Path, volume: Volume, session: Session) -> None:
    with session.transaction() as transaction:
        for name in ("a/../../escape", "a/./b", "a/c", "a/c/d", "a/" + "n" * 300):
            transaction.put(name, name.encode())
    told: list[Problem] = []
    report = copy_out(volume, ["a"], tmp_path / "out", KEEP, problem=told.append)
    assert {problem.source for problem in report.problems} == {
        "'a/../../escape'", "'a/./b'", "a/c", "a/" + "n" * 300,
    }  # fmt: skip
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["d"]
    assert not (tmp_path / "escape").exists()


def test_no_room(tmp_path: Path, volume: Volume, session: Session) -> None:
    source = tmp_path / "sparse"
    source.touch()
    os.truncate(source, 300 * MIB)
    with pytest.raises(VolumeFull, match="300"):
        copy_in(session, [source], "x")
    assert names(volume) == []


def test_folders_want_to_be_asked_for(tmp_path: Path, volume: Volume, session: Session) -> None:
    source = folder_of(tmp_path / "source", {"a": 1})
    with pytest.raises(CopyFailed, match="is a folder"):
        copy_in(session, [source], "x")
    copy_in(session, [source], "x", ALL)
    with pytest.raises(CopyFailed, match="is a folder"):
        copy_out(volume, ["x"], tmp_path / "out")
    with pytest.raises(CopyFailed, match="no such object"):
        copy_out(volume, ["y"], tmp_path / "out", ALL)
    with pytest.raises(CopyFailed, match="No such file"):
        copy_in(session, [tmp_path / "nothing"], "x", ALL)
    with pytest.raises(UsageError, match="not a folder"):
        copy_out(volume, ["x/a", "x"], tmp_path / "nothing", ALL)


def test_an_interrupted_copy_leaves_nothing(
    tmp_path: Path, volume: Volume, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As many that the copy does not end before somebody looks at it.
    source = folder_of(tmp_path / "source", SIZES | {f"more/{number}": 65536 for number in range(200)})
    copy_in(session, [source], "kept", ALL)
    before = set(threading.enumerate())

    def interrupt(now: Progress) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_TICK_S", 0.001)
    with pytest.raises(KeyboardInterrupt):
        copy_in(session, [source], "x", ALL, progress=interrupt)
    assert all(name.startswith("kept/") for name in names(volume))
    assert session.quarantined_bytes == 0
    with pytest.raises(KeyboardInterrupt):
        copy_out(volume, ["kept"], tmp_path / "out", ALL, progress=interrupt)
    assert not list((tmp_path / "out").rglob("*.partial"))
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or path.read_bytes() == (source / path.relative_to(tmp_path / "out")).read_bytes()
    assert set(threading.enumerate()) <= before
