"""What fsspec promises its callers, kept by a volume of immutable objects."""

from __future__ import annotations

import errno
import gc
import io
import os
import pickle
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest

from headrace.errors import UsageError, WriterActive
from headrace.filesystem import HeadraceFileSystem
from headrace.units import KIB
from headrace.volume import Volume


def _bytes(length: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(length)


def test_a_file_is_there_once_it_is_closed(fs: HeadraceFileSystem, addresses: str) -> None:
    data = _bytes(10_000_000)
    with Volume.open(addresses) as reader:
        file = fs.open("a/b.bin", "wb", block_size=1 << 20)
        for start in range(0, len(data), 300_001):
            file.write(data[start : start + 300_001])
        reader.refresh()
        assert "a/b.bin" not in reader
        file.close()
        reader.refresh()
        assert reader.read("a/b.bin") == data
    assert fs.cat_file("a/b.bin") == data
    assert fs.size("headrace://a/b.bin") == len(data)


def test_reading_anywhere(fs: HeadraceFileSystem) -> None:
    data = _bytes(3_000_000)
    fs.pipe_file("x", data)
    with fs.open("x", "rb", block_size=65536) as file:
        file.seek(1_234_567)
        assert file.read(70_000) == data[1_234_567:1_304_567]
        file.seek(-5, os.SEEK_END)
        assert file.read() == data[-5:]
        assert file.read(1) == b""
    with fs.open("x", "rb") as file:
        copy = pickle.loads(pickle.dumps(file))
        assert copy.read(9) == data[:9]
        copy.fs.close()


@pytest.mark.parametrize(("start", "end"), [(0, 10), (-10, None), (None, -3), (5, 5), (9, 2), (2_999_990, 4_000_000)])
def test_ranges_are_those_of_slices(fs: HeadraceFileSystem, start: int | None, end: int | None) -> None:
    data = _bytes(3_000_000)
    fs.pipe_file("x", data)
    assert fs.cat_file("x", start, end) == data[start:end]


def test_many_ranges_at_once_and_one_that_is_missing(fs: HeadraceFileSystem) -> None:
    data = {f"d/{i}": _bytes(200_000, i) for i in range(4)}
    fs.pipe(data)
    paths = ["d/1", "nowhere", "d/3", "d/1"]
    found = fs.cat_ranges(paths, [5, 0, 100_000, -7], [50_000, 1, 150_000, None])
    assert isinstance(found[1], FileNotFoundError)
    assert found[0] == data["d/1"][5:50_000] and found[2] == data["d/3"][100_000:150_000]
    assert found[3] == data["d/1"][-7:]
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(paths, 0, 1, on_error="raise")
    assert fs.cat(list(data)) == data


def test_directories_are_names(fs: HeadraceFileSystem) -> None:
    fs.pipe({"a/x": b"1", "a/b/y": b"22", "a/b/c/z": b"333", "top": b""})
    assert fs.ls("", detail=False) == ["a", "top"]
    assert fs.ls("headrace://a/", detail=False) == ["a/b", "a/x"]
    assert fs.ls("a/x", detail=False) == ["a/x"]
    assert fs.find("a") == ["a/b/c/z", "a/b/y", "a/x"]
    assert fs.find("", maxdepth=1) == ["top"]
    assert fs.glob("a/**/z") == ["a/b/c/z"] and fs.glob("a/*") == ["a/b", "a/x"]
    assert fs.isdir("a/b") and fs.isfile("a/x") and not fs.exists("a/b/nothing")
    assert fs.info("a")["type"] == "directory" and fs.info("")["type"] == "directory"
    assert fs.du("a") == 6
    with pytest.raises(FileNotFoundError):
        fs.ls("nowhere")
    fs.makedirs("new/one")
    with pytest.raises(OSError, match="not empty"):
        fs.rmdir("a")


def test_to_know_a_directory_nothing_is_listed(fs: HeadraceFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    fs.pipe({"a/x": b"1", "a/y": b"2", "ab": b"3"})
    monkeypatch.setattr(Volume, "list", lambda *_: pytest.fail("all of it was listed"))
    assert fs.isdir("a") and fs.isdir("") and not fs.isdir("ab") and not fs.exists("b")


def test_files_go_in_and_out(fs: HeadraceFileSystem, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    content = {"one": _bytes(5), "sub/two": _bytes(20_000_001, 2), "sub/three": b""}
    for name, data in content.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    before = fs.volume.sequence
    fs.put(str(source), "folder", recursive=True)
    after = fs.volume.sequence
    assert {info["sequence"] for info in fs.find("folder", detail=True).values()} == {after}, "one commit"
    assert after > before
    fs.get("folder", str(target), recursive=True)
    assert {str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()} == content


def test_moving_and_removing_are_one_commit_each(fs: HeadraceFileSystem) -> None:
    fs.pipe({"old/a": b"a", "old/deep/b": b"bb", "c": b"c", "new/a": b"was here"})
    births = {name: info["birth"] for name, info in fs.find("old", detail=True).items()}
    fs.mv("old", "new", recursive=True)
    found = fs.find("new", detail=True)
    assert set(found) == {"new/a", "new/deep/b"} and fs.cat_file("new/a") == b"a"
    assert found["new/deep/b"]["birth"] == births["old/deep/b"], "the bytes stayed where they were"
    assert len({info["sequence"] for info in found.values()}) == 1
    assert not fs.exists("old")
    fs.mv("c", "new/deep/")
    assert fs.cat_file("new/deep/c") == b"c"
    with pytest.raises(IsADirectoryError):
        fs.rm("new")
    fs.rm("new", recursive=True)
    assert fs.ls("") == [fs.info("")] or fs.find("") == []
    with pytest.raises(FileNotFoundError):
        fs.rm("new/a")
    with pytest.raises(FileNotFoundError):
        fs.mv("nothing", "somewhere")


def test_a_copy_shares_its_bytes(fs: HeadraceFileSystem) -> None:
    data = _bytes(5_000_000)
    fs.pipe_file("a", data)
    free = fs.volume.info().free_bytes
    fs.cp_file("a", "b")
    assert free - fs.volume.info().free_bytes < 1 << 20
    fs.rm("a")
    assert fs.cat_file("b") == data


def test_what_was_committed_last(fs: HeadraceFileSystem) -> None:
    names = ["d/a/1", "d/b", "d/a/2"]
    for name in names:
        fs.pipe_file(name, b"x")
    first, second, third = (fs.modified(name) for name in names)
    assert len({first, second, third}) == 3
    assert fs.modified("d") == max(first, second, third) and fs.modified("d/a") == max(first, third)
    with pytest.raises(FileNotFoundError):
        fs.modified("elsewhere")


def test_replaced_and_exclusive(fs: HeadraceFileSystem) -> None:
    fs.pipe_file("x", b"first")
    birth = fs.ukey("x")
    with fs.open("x", "rb") as old:
        with fs.open("x", "wb") as file:
            file.write(b"second")
        assert fs.ukey("x") != birth
        with pytest.raises(FileNotFoundError, match="replaced"):
            old.read()
    assert fs.cat_file("x") == b"second"
    with pytest.raises(FileExistsError):
        fs.open("x", "xb")
    with pytest.raises(FileExistsError):
        fs.pipe_file("x", b"", mode="create")
    assert fs.cat_file("x") == b"second"
    fs.touch("x", truncate=False)
    assert fs.size("x") == 6
    fs.touch("x")
    assert fs.size("x") == 0


@pytest.mark.parametrize("mode", ["ab", "r+b", "a"])
def test_what_it_cannot_do_is_said(fs: HeadraceFileSystem, mode: str) -> None:
    with pytest.raises(io.UnsupportedOperation, match="never change"):
        fs.open("x", mode)


def test_a_block_that_fails_leaves_nothing(fs: HeadraceFileSystem) -> None:
    with pytest.raises(RuntimeError), fs.open("x", "wb", block_size=4096) as file:
        file.write(_bytes(100_000))
        raise RuntimeError
    assert not fs.exists("x")
    file = fs.open("y", "wb", block_size=4096)
    file.write(_bytes(100_000))
    del file
    assert not fs.exists("y")


@pytest.mark.parametrize("length", [100, 100_000])
def test_a_file_is_dropped_on_a_thread_that_may_wait_for_nothing(fs: HeadraceFileSystem, length: int) -> None:
    """The garbage collector comes on any thread, whatever that one holds and others want."""
    fs.pipe_file("x", b"x")
    session = fs.writing.session()
    free = session.free_bytes
    file = fs.open("y", "wb", block_size=4096)
    file.write(_bytes(length))
    held, go, dropped = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        with session.lock:
            held.set()
            assert go.wait(120)

    def drop() -> None:
        nonlocal file
        with session.volume.lock:
            del file
            gc.collect()
        dropped.set()

    holder, dropper = threading.Thread(target=hold), threading.Thread(target=drop)
    holder.start()
    assert held.wait(60)
    dropper.start()
    try:
        assert dropped.wait(60)
    finally:
        go.set()
        holder.join()
        dropper.join()
    # Nobody ends it but the next call.
    fs.pipe_file("z", b"z")
    deadline = time.monotonic() + 60
    while session.open_transactions and time.monotonic() < deadline:
        time.sleep(0.01)
    assert session.open_transactions == [] and fs.find("") == ["x", "z"]
    assert session.quarantined_bytes == 0 and free - session.free_bytes < 64 * KIB


def test_a_transaction_is_one_commit_or_none(fs: HeadraceFileSystem) -> None:
    fs.pipe_file("gone", b"")
    with fs.transaction:
        with fs.open("t/a", "wb") as file:
            file.write(b"a")
        fs.pipe_file("t/b", b"b")
        fs.rm("gone")
        assert not fs.exists("t/a") and fs.exists("gone")
    assert fs.find("") == ["t/a", "t/b"]
    assert len({info["sequence"] for info in fs.find("t", detail=True).values()}) == 1
    with pytest.raises(RuntimeError), fs.transaction:
        with fs.open("t/c", "wb") as file:
            file.write(b"c")
        raise RuntimeError
    assert fs.find("") == ["t/a", "t/b"]
    with pytest.raises(UsageError, match="still open"), fs.transaction:
        unfinished = fs.open("t/d", "wb")
    unfinished.discard()
    fs.pipe_file("t/e", b"works again")


def test_a_full_volume_is_enospc(fs: HeadraceFileSystem) -> None:
    with pytest.raises(OSError) as caught, fs.open("big", "wb") as file:
        for _ in range(40):
            file.write(bytes(4 << 20))
    assert caught.value.errno == errno.ENOSPC
    assert not fs.exists("big")


def test_one_writer_at_a_time(fs: HeadraceFileSystem, addresses: str) -> None:
    fs.pipe_file("x", b"x")
    other = HeadraceFileSystem(
        addresses, session_options={"heartbeat_s": 0.05, "missed_beats": 2}, skip_instance_cache=True
    )
    assert other.cat_file("x") == b"x"
    with pytest.raises(WriterActive):
        other.pipe_file("y", b"y")
    fs.close()
    other.pipe_file("y", b"y")
    assert fs.cat_file("y") == b"y"
    other.close()


def test_a_session_that_is_given_is_used(addresses: str) -> None:
    with Volume.open(addresses, write=True) as volume, volume.session() as session:
        fs = HeadraceFileSystem(session=session, skip_instance_cache=True)
        fs.pipe_file("x", b"x")
        fs.close()
        with session.transaction() as transaction:
            transaction.put("y", b"y")
        assert fs.find("") == ["x", "y"]


def test_children_of_a_fork_read_and_do_not_write(fs: HeadraceFileSystem) -> None:
    data = _bytes(2_000_000)
    fs.pipe_file("x", data)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if fs.cat_file("x") == data:
                status = 2
                fs.pipe_file("y", b"")
        except WriterActive:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    fs.pipe_file("z", b"the parent still writes")
    assert fs.find("") == ["x", "z"]


def test_it_pickles_and_is_found_by_its_scheme(addresses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, path = fsspec.url_to_fs("headrace://a/b", volume=addresses)
    assert isinstance(fs, HeadraceFileSystem) and path == "a/b"
    fs.pipe_file(path, b"b")
    fs.close()
    again = pickle.loads(pickle.dumps(fs))
    assert again.cat_file(path) == b"b"
    monkeypatch.setenv("HEADRACE_VOLUME", addresses)
    with fsspec.open("headrace://a/b", "rt", skip_instance_cache=True) as file:
        assert file.read() == "b"
    monkeypatch.delenv("HEADRACE_VOLUME")
    with pytest.raises(UsageError, match="HEADRACE_VOLUME"):
        fsspec.filesystem("headrace", skip_instance_cache=True)


def test_file_systems_of_one_process_write_with_one_session(addresses: str) -> None:
    """fsspec keeps one for each set of options, and a caller does not know which it has."""
    first = HeadraceFileSystem(volume=addresses, skip_instance_cache=True)
    second = HeadraceFileSystem(volume=[addresses], verify=False, skip_instance_cache=True)
    first.pipe("a", b"1")
    with second.transaction:
        second.pipe("b", b"2")
        first.pipe("c", b"3")
        assert not second.exists("b") and second.exists("c"), "each has transactions of its own"
    errors: list[BaseException] = []

    def write(fs: HeadraceFileSystem, name: str) -> None:
        try:
            for number in range(5):
                with fs.open(f"{name}/{number}", "wb") as file:
                    file.write(name.encode() * 100_000)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(fs, name)) for fs, name in ((first, "x"), (second, "y"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(first.find("x")) == len(second.find("y")) == 5
    first.close()
    second.pipe("d", b"4")
    assert first.cat("d") == b"4", "who closed reads on"
    with pytest.raises(WriterActive), Volume.open(addresses, write=True) as other:
        other.session()
    second.close()
    with Volume.open(addresses, write=True) as other, other.session():
        pass
    first.close()


def test_the_key_of_shared_bytes_changes_with_them(fs: HeadraceFileSystem) -> None:
    """As caches of files need it: an object of slices has no blob of its own to tell it by."""
    fs.pipe({"one": b"1", "two": b"2"})
    keys = []
    for source in ("one", "two"):
        fs.cp_file(source, "copy")
        assert fs.info("copy")["birth"] == 0
        keys.append(fs.ukey("copy"))
    assert keys[0] != keys[1] == fs.checksum("copy")


@pytest.mark.parametrize("url", ["headrace://d/a", "simplecache::headrace://d/a"])
def test_forms_of_a_url(fs: HeadraceFileSystem, addresses: str, url: str, tmp_path: Path) -> None:
    fs.pipe("d/a", b"hello")
    simple = url.startswith("headrace")
    options = {"volume": addresses} if simple else {
        "headrace": {"volume": addresses}, "simplecache": {"cache_storage": str(tmp_path)}
    }  # fmt: skip
    with fsspec.open(url, "rt", **options) as file:
        assert file.read() == "hello"
    if simple:
        assert [file.path for file in fsspec.open_files("headrace://d/*", **options)] == ["d/a"]
        found, path = fsspec.core.url_to_fs(url, **options)
        assert found.cat(path) == b"hello"
