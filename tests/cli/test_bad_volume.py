"""Members that are not what they should be: one clear error each, its status, and not a byte changed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.volume import Volume

NQN = "nqn.2026-01.io.headrace:test"
MIB = 1 << 20


class Case:
    """A volume of two members, `a` and `b`, in files, and another one, `c`."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.directory = directory
        self._capsys = capsys
        for names in (["a", "b"], ["c"]):
            with (
                Volume.create([f"{self.uri(name)}?create=32MiB" for name in names], name="".join(names)) as volume,
                volume.session(run_id="t") as session,
                session.transaction() as transaction,
            ):
                transaction.put("x", os.urandom(3 * MIB))

    def path(self, name: str) -> Path:
        return self.directory / f"{name}.img"

    def uri(self, name: str) -> str:
        return f"file:{self.path(name)}"

    def state(self) -> dict[str, str]:
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.directory.iterdir())
            if path.is_file()
        }

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Status, standard output, standard error."""
        status = main(arguments)
        said = self._capsys.readouterr()
        return status, said.out, said.err

    def refused(self, *arguments: str) -> tuple[int, str]:
        """Status and the one line; asserts that nothing was changed."""
        before = self.state()
        status, _, err = self.run(*arguments)
        (line,) = err.splitlines()
        assert line.startswith("headrace: error: ")
        assert self.state() == before
        return status, line

    def refused_later(self, *arguments: str) -> tuple[int, str]:
        """As `refused`, where a session has been opened by then: the objects are the same."""
        listing = ["volume", "ls", self.uri("a"), self.uri("b"), "--json"]
        before = self.run(*listing)
        status, _, err = self.run(*arguments)
        (line,) = err.splitlines()
        assert self.run(*listing) == before
        return status, line


@pytest.fixture
def case(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.delenv("HEADRACE_VOLUME", raising=False)
    return Case(tmp_path, capsys)


def signature(magic: bytes, offset: int) -> Callable[[bytearray], None]:
    def put(image: bytearray) -> None:
        image[offset : offset + len(magic)] = magic

    return put


@pytest.mark.parametrize(
    ("put", "name"),
    [
        (signature(b"\x53\xef", 0x438), "ext4"),
        (signature(b"XFSB", 0), "XFS"),
        (signature(b"_BHRfS_M", 0x10040), "Btrfs"),
        (signature(b"LABELONE" + bytes(16) + b"LVM2 001", 512), "LVM"),
        (signature(b"EFI PART", 512), "GPT"),
        (signature(b"LUKS\xba\xbe", 0), "LUKS"),
        (signature(b"\xfc\x4e\x2b\xa9", 4096), "RAID"),
        (signature(b"\x83" + bytes(59) + b"\x55\xaa", 450), "MBR"),
    ],
)
def test_create_refuses_what_holds_something(case: Case, put: Callable[[bytearray], None], name: str) -> None:
    image = bytearray(32 * MIB)
    put(image)
    case.path("n").write_bytes(image)
    for more in ([], ["--dry-run"]):
        status, line = case.refused("volume", "create", case.uri("n"), *more)
        assert status == 2
        assert name in line and "--force" in line
    assert case.run("volume", "create", case.uri("n"), "--force")[0] == 0


@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="no mkfs.ext4 here")
def test_create_refuses_a_real_file_system(case: Case) -> None:
    import subprocess

    case.path("n").write_bytes(bytes(32 * MIB))
    subprocess.run(["mkfs.ext4", "-q", "-F", str(case.path("n"))], check=True, capture_output=True)
    assert "ext4" in case.refused("volume", "create", case.uri("n"))[1]


def test_a_plan_writes_nothing(case: Case) -> None:
    case.path("n").write_bytes(bytes(32 * MIB))
    before = case.state()
    status, out, _ = case.run("volume", "create", case.uri("n"), "--dry-run", "--json")
    plan = json.loads(out)
    assert status == 0
    assert (plan["dry_run"], len(plan["members"])) == (True, 1)
    assert 0 < plan["capacity_bytes"] < 32 * MIB
    assert case.state() == before
    assert case.run("volume", "create", case.uri("n"))[0] == 0
    made = json.loads(case.run("volume", "info", case.uri("n"), "--json")[1])
    assert made["capacity_bytes"] == plan["capacity_bytes"]


def test_no_volume_is_named(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    status, line = case.refused("volume", "ls")
    assert (status, "HEADRACE_VOLUME" in line) == (2, True)
    monkeypatch.setenv("HEADRACE_VOLUME", f"{case.uri('a')},{case.uri('b')}")
    assert case.run("volume", "ls")[1].split("\t")[2] == "x\n"


def test_copies_that_cannot_be_meant(case: Case) -> None:
    volume = ["-V", case.uri("a"), "-V", case.uri("b")]
    assert "nothing to copy to" in case.refused("volume", "cp", ":x", *volume)[1]
    assert "neither" in case.refused("volume", "cp", "here", "there", *volume)[1]
    assert "some sources" in case.refused("volume", "cp", "here", ":x", ":y", *volume)[1]
    assert "--to-volume" in case.refused("volume", "cp", ":x", "there", "-T", case.uri("c"), *volume)[1]


def test_rm_asks_and_counts(case: Case) -> None:
    volume = ["-V", case.uri("a"), "-V", case.uri("b")]
    status, line = case.refused("volume", "rm", "--prefix", "", *volume)
    assert status == 2 and "--yes" in line
    assert "no object has a name" in case.refused("volume", "rm", "y*", "--yes", *volume)[1]
    assert "nothing to delete" in case.refused("volume", "rm", *volume)[1]
    status, out, _ = case.run("volume", "rm", "x*", "--dry-run", *volume)
    assert (status, out) == (0, "x\n")
    assert "1 object, 3.0 MiB" in case.run("volume", "rm", "?", "--yes", *volume)[1]
    assert case.run("volume", "ls", case.uri("a"), case.uri("b"))[1] == ""


def test_scrub_names_what_is_damaged(case: Case) -> None:
    uris = [case.uri("a"), case.uri("b")]
    assert case.run("volume", "scrub", *uris, "--rate", "1GiB")[0] == 0
    with Volume.open(uris) as volume:
        member, offset, _ = volume.stored("x").blobs[0].data.used()[0]
    with case.path("ab"[member]).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    status, out, err = case.run("volume", "scrub", *uris, "--json")
    (finding,) = json.loads(out)["findings"]
    assert status == 1
    assert (finding["object_name"], finding["member"], finding["offset"]) == ("x", member, offset)
    assert case.run("volume", "scrub", *uris, "--from", "y")[0] == 0
    status, out, err = case.run("volume", "verify", *uris)
    assert status == 1 and f"offset {offset}" in err
    assert "1 thing is damaged" in case.run("volume", "scrub", *uris)[2]
    note = case.directory / "note"
    note.write_text('{"from": "y"}\n')
    assert case.run("volume", "scrub", *uris, "--checkpoint", str(note))[0] == 0
    assert not note.exists()
    note.write_text("what")
    assert case.run("volume", "scrub", *uris, "--checkpoint", str(note))[0] == 2


def test_scrub_writes_bad_copies_again_when_asked(case: Case) -> None:
    uris = [case.uri("a"), case.uri("b")]
    before = case.state()
    with Volume.open(uris) as volume:
        member, offset, length = volume.stored("x").blobs[0].tables[1].used()[0]
    with case.path("ab"[member]).open("r+b") as file:
        file.seek(offset)
        file.write(bytes(length))
    broken = case.state()
    status, out, err = case.run("volume", "scrub", *uris)
    assert status == 1 and case.state() == broken
    assert "1 copy is bad while the other one is good; --repair writes it again" in err
    assert f"copy 1 of a page of the checksum table does not match its checksum: member {member}" in out + err
    with Volume.open(uris, write=True) as volume, volume.session("job"):
        status, out, err = case.run("volume", "scrub", *uris, "--repair", "--json")
        assert status != 0 and len(json.loads(out.splitlines()[0])["findings"]) == 1
    status, out, err = case.run("volume", "scrub", *uris, "--repair")
    assert (status, "1 bad copy was written again" in out) == (0, True)
    assert case.run("volume", "scrub", *uris)[0] == 0
    name = f"{'ab'[member]}.img"
    with case.path("ab"[member]).open("rb") as file:
        file.seek(offset)
        assert any(file.read(length)) and case.state()[name] != broken[name] and len(before) == len(broken)


def test_a_repair_says_what_was_mended_what_remains_and_what_to_do(case: Case) -> None:
    uris = [case.uri("a"), case.uri("b")]

    def damage() -> None:
        with Volume.open(uris) as volume:
            (blob,) = volume.stored("x").blobs
            places = [blob.tables[1].used()[0], blob.data.used()[0]]
            for copy in range(2):
                # The checker finds both heartbeats lost on all copies; a session writes new ones.
                places.append((volume.superblock.log_member[copy], volume.superblock.log_offset[copy], 1))
        for member, offset, _ in places:
            with case.path("ab"[member]).open("r+b") as file:
                file.seek(offset)
                file.write(bytes(16))

    damage()
    status, out, err = case.run("volume", "scrub", *uris)
    assert status == 1 and "3 things are damaged beyond their copies, and 1 copy is bad while" in err
    assert "; 1 object is hit, the first 'x'; --repair writes it again, restore what is hit from another copy" in err
    damage()
    status, out, err = case.run("volume", "scrub", *uris, "--repair")
    assert status == 1 and "3 bad copies were written again" in out
    assert "3 bad copies were written again; what remains: 1 thing is damaged beyond its copies; 1 object is hit" in err
    assert "restore what is hit from another copy" in err and "--repair" not in err.partition("what remains")[2]
    damage()
    status, out, _ = case.run("volume", "scrub", *uris, "--repair", "--json")
    found = json.loads(out)
    assert (status, found["written_again"], len(found["findings"])) == (1, 3, 4)
    assert [finding["object_name"] for finding in found["left"]] == ["x"]


def test_salvage_without_a_member(case: Case) -> None:
    status, out, _ = case.run("volume", "salvage", case.uri("a"), "file:/nowhere/b.img", "--json")
    found = json.loads(out)
    assert status == 1 and [row["name"] for row in found["objects"]] == ["x"]
    assert any("/nowhere/b.img" in line for line in found["lost"])
    rescued = case.directory / "rescued"
    whole = [case.uri("a"), case.uri("b")]
    assert case.run("volume", "salvage", *whole, "--to", str(rescued))[0] == 0
    assert (rescued / "x").read_bytes() == Volume.open(whole).read("x")
    assert case.run("volume", "salvage", *whole, "--to", str(rescued))[0] == 2
    assert "cannot be opened" in case.run("volume", "salvage", "file:/nowhere/b.img")[2]


def test_a_listing_in_every_order(case: Case) -> None:
    uri = case.uri("c")
    with Volume.open([uri], write=True) as volume, volume.session(run_id="t") as session:
        for name, size in (("b", 10), ("c", 5), ("a", 20)):
            with session.transaction() as transaction:
                transaction.put(name, bytes(size))

    def names(*options: str) -> str:
        listed = case.run("volume", "ls", uri, "--json", *options)[1].splitlines()
        return "".join(json.loads(line)["name"] for line in listed)

    assert (names(), names("--reverse")) == ("abcx", "xcba")
    assert (names("--sort", "size"), names("--sort", "size", "--reverse")) == ("xabc", "cbax")
    assert (names("--sort", "time"), names("--prefix", "b")) == ("acbx", "b")
    (line,) = case.run("volume", "ls", uri, "--prefix", "a", "--long", "--json")[1].splitlines()
    assert json.loads(line)["stored_bytes"] == 4096
    assert case.run("volume", "ls", uri, "--prefix", "a", "--long")[1].split("\t")[2].strip() == "4.0 KiB"


def test_names_from_media_move_no_cursor(case: Case) -> None:
    with (
        Volume.open([case.uri("c")], write=True) as volume,
        volume.session(run_id="t") as session,
        session.transaction() as transaction,
    ):
        transaction.put("a\x1b[2J\nb\tc", b"1")
    out = case.run("volume", "ls", case.uri("c"))[1]
    assert out.splitlines()[0].split("\t")[2] == r"a\x1b[2J\nb\tc"
    found = [json.loads(line) for line in case.run("volume", "ls", case.uri("c"), "--json")[1].splitlines()]
    assert found[0]["name"] == "a\x1b[2J\nb\tc"


def test_taking_over_by_hand(case: Case) -> None:
    import signal
    import subprocess
    import sys
    import time

    uri = case.uri("c")
    assert "nobody holds" in case.run("volume", "takeover", uri)[1]
    hold = (
        "import sys, time\nfrom headrace.volume import Volume\n"
        f"volume = Volume.open({uri!r}, write=True)\n"
        "session = volume.session('training', heartbeat_s=0.4)\nprint('held', flush=True)\ntime.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        status, _, err = case.run("volume", "takeover", uri, "--yes")
        assert status == 1
        assert "'training'" in err and str(process.pid) in err and "its heart beats" in err and "--now" in err
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.2)
        status, _, err = case.run("volume", "takeover", uri)
        assert status == 2 and re.search(r"no beat in \d+\.\d s; last beat 20\d\d-.* UTC", err) and "--yes" in err
        status, out, _ = case.run("volume", "takeover", uri, "--yes", "--json")
        found = json.loads(out)
        assert status == 0
        assert (found["taken"], found["from"]["run_id"], found["from"]["beats"]) == (True, "training", False)
        assert found["from"]["watched_s"] >= 0.25 and found["from"]["last_beat_s"] > found["from"]["started_s"]
        assert json.loads(case.run("volume", "info", uri, "--json")[1])["writer"]["state"] == "closed"
    finally:
        process.kill()
        process.wait()
