"""What goes wrong says so in one line, with a non-zero exit status, never a traceback. Real processes and targets."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.device import crc32c
from headrace.testing.serve import ServeProcess, free_port, serving
from headrace.volume import Volume

NQN = "nqn.2026-01.io.headrace:test"


def headrace(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )


def complaint(answer: subprocess.CompletedProcess[bytes]) -> str:
    """The one line; asserts that it is one, and that it was a failure."""
    said = answer.stderr.decode()
    assert answer.returncode not in (0, -signal.SIGSEGV, -signal.SIGABRT), said
    assert "Traceback" not in said + answer.stdout.decode("utf-8", "replace")
    # An ingest tells its progress before it; the error is one line, and the last.
    *before, last = said.splitlines()
    assert last.startswith("headrace: error: ")
    assert all(re.match(r"training a tokenizer: |[\d,]+ documents, |committing ", line) for line in before), said
    return last


@dataclass
class World:
    """What the cases have at hand."""

    directory: Path
    target: ServeProcess

    @property
    def good(self) -> str:
        """Address of a device that holds a volume."""
        return f"file:{self.directory}/good.img"

    def text(self, *, size: int = 100_000) -> Path:
        folder = self.directory / f"text-{size}"
        if not folder.exists():
            folder.mkdir()
            words = "".join(f"word{i} " for i in range(1000))
            for number in range(max(1, size // len(words))):
                (folder / f"{number}.txt").write_text(f"{number} {words}")
        return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("world")
    with serving(NQN, "mem:64MiB") as target:
        here = World(directory, target)
        Volume.create([f"{here.good}?create=64MiB"], name="good").close()
        yield here


def closed_port(world: World) -> list[str]:
    return ["volume", "info", f"nvme+tcp://127.0.0.1:{free_port()}/{NQN}?nsid=1&connect_timeout=5"]


def wrong_nqn(world: World) -> list[str]:
    return ["volume", "info", f"nvme+tcp://127.0.0.1:{world.target.port}/nqn.2026-01.io.headrace:other?nsid=1"]


def wrong_nsid(world: World) -> list[str]:
    return ["volume", "info", world.target.uri(nsid=7)]


def not_a_volume(world: World) -> list[str]:
    return ["volume", "info", world.target.uri()]


def newer_version(world: World) -> list[str]:
    """Both superblocks say a version that nobody has written yet, with a good checksum."""
    path = world.directory / "newer.img"
    if not path.exists():
        Volume.create([f"file:{path}?create=64MiB"]).close()
        image = bytearray(path.read_bytes())
        for place in (0, len(image) - 4096):
            block = image[place : place + 4096]
            block[8:12] = (99).to_bytes(4, "little")
            block[4092:] = crc32c(bytes(block[:4092])).to_bytes(4, "little")
            image[place : place + 4096] = block
        path.write_bytes(image)
    return ["volume", "info", f"file:{path}"]


def corpus_empty(world: World) -> list[str]:
    folder = world.directory / "empty"
    folder.mkdir(exist_ok=True)
    return ["ingest", str(folder), "data", "--volume", world.good]


def corpus_missing(world: World) -> list[str]:
    return ["ingest", str(world.directory / "nowhere"), "data", "--volume", world.good]


def tokenizer_broken(world: World) -> list[str]:
    path = world.directory / "tokenizer.json"
    path.write_text('{"model": {"type": "BPE", "vocab": {')
    return ["ingest", str(world.text()), "data", "--volume", world.good, "--tokenizer", str(path)]


def device_full(world: World) -> list[str]:
    small = world.directory / "small.img"
    if not small.exists():
        Volume.create([f"file:{small}?create=2MiB"], stripe_bytes=65536, log_bytes=131072).close()
    text = world.text(size=3_000_000)
    return ["ingest", str(text), "data", "--volume", f"file:{small}", "--vocab-size", "300"]


def no_such_object(world: World) -> list[str]:
    return ["volume", "cat", "nothing/here", "--volume", world.good]


def existing_volume(world: World) -> list[str]:
    return ["volume", "create", world.good]


CASES: list[tuple[Callable[[World], list[str]], int, list[str]]] = [
    (closed_port, 1, ["refused"]),
    (wrong_nqn, 1, ["nqn.2026-01.io.headrace:other"]),
    (wrong_nsid, 1, ["7"]),
    (not_a_volume, 1, ["volume"]),
    (newer_version, 1, ["version 99", "newer"]),
    (corpus_empty, 1, ["empty"]),
    (corpus_missing, 1, ["nowhere"]),
    (tokenizer_broken, 1, ["tokenizer"]),
    (device_full, 1, ["free"]),
    (no_such_object, 1, ["nothing/here"]),
    (existing_volume, 2, ["--force"]),
    (lambda world: ["volume", "info", "ftp://x"], 2, ["nvme+tcp://", "ftp://x"]),
    (lambda world: ["volume", "info"], 2, ["URI", "--help"]),
    (lambda world: ["volume", "create", world.good, "--stripe", "many"], 2, ["--stripe", "many"]),
    (lambda world: ["vollume"], 2, ["vollume"]),
    (lambda world: ["serve"], 2, ["nothing to serve"]),
    (lambda world: ["serve", "mem:1MiB", "--listen", "0.0.0.0:0"], 2, ["--allow-host"]),
    (lambda world: ["serve", "mem:1MiB", "--listen", "[::]:0"], 2, ["--allow-host"]),
    (lambda world: ["serve", "mem:1MiB", "--listen", "here"], 2, ["HOST:PORT"]),
    (lambda world: ["discover", "::1"], 2, ["brackets"]),
    (lambda world: ["volume", "info", "nvme+tcp://::1:4420/nqn.2026-01.a:b"], 2, ["brackets"]),
    (lambda world: ["serve", "mem:lots"], 2, ["lots"]),
    (lambda world: ["serve", "/nowhere/at/all"], 2, ["/nowhere/at/all"]),
    (lambda world: ["serve", "mem:1MiB", "--nqn", "x"], 2, ["nqn."]),
    (lambda world: ["serve", "mem:1MiB", "--io-engine", "fast"], 2, ["io_uring"]),
    (lambda world: ["serve", "mem:1MiB", "--direct", "yes"], 2, ["auto or on or off"]),
    (lambda world: ["serve", "mem:1MiB", "--subsystem", "nqn.2026-01.a:b"], 2, ["NQN=NAMESPACE"]),
    (lambda world: ["serve", "mem:1MiB", "--listen", f"127.0.0.1:{world.target.port}"], 1, ["in use"]),
    (lambda world: ["discover", f"127.0.0.1:{free_port()}"], 1, ["refused"]),
    (lambda world: ["demo", "--steps", "3"], 2, ["--steps"]),
    (lambda world: ["demo", "--ranks", "3"], 2, ["--ranks"]),
    (lambda world: ["demo", "--corpus", "/nowhere"], 2, ["/nowhere"]),
]


@pytest.mark.parametrize(("case", "status", "says"), CASES)
def test_one_line_and_a_status(world: World, case: Callable[[World], list[str]], status: int, says: list[str]) -> None:
    answer = headrace(*case(world))
    line = complaint(answer)
    assert answer.returncode == status, line
    for text in says:
        assert text.lower() in line.lower()


def test_a_failed_ingest_leaves_nothing(world: World) -> None:
    complaint(headrace(*device_full(world)))
    with Volume.open([f"file:{world.directory}/small.img"]) as volume:
        assert volume.list() == []


def test_a_flipped_byte_in_a_data_block(tmp_path: Path) -> None:
    media = tmp_path / "disk.img"
    data = b"".join(number.to_bytes(8, "little") for number in range(1 << 17))
    with (
        serving(NQN, f"{media}:64MiB") as target,
        Volume.create([target.uri()]) as volume,
        volume.session(run_id="test") as session,
        session.transaction() as transaction,
    ):
        transaction.put("good", b"untouched" * 1000)
        transaction.put("numbers", data)
    raw = bytearray(media.read_bytes())
    at = raw.index(data[700_000:700_064])
    raw[at] ^= 0x10
    media.write_bytes(raw)
    with serving(NQN, str(media)) as target:
        uri = target.uri()
        line = complaint(headrace("volume", "cat", "numbers", "--volume", uri))
        assert "numbers" in line
        answer = headrace("volume", "verify", uri, "--json")
        assert "numbers" in json.loads(answer.stderr)["error"]["message"]
        report = json.loads(answer.stdout)
        assert [entry["name"] for entry in report["damaged"]] == ["numbers"]
        assert report["objects"] == 2
        assert headrace("volume", "cat", "good", "--volume", uri).stdout == b"untouched" * 1000


def test_a_second_writer(world: World) -> None:
    with Volume.open([world.good], write=True) as volume, volume.session(run_id="training") as session:
        with session.transaction() as transaction:
            transaction.put("x", b"1")
        line = complaint(headrace("volume", "rm", "x", "--volume", world.good))
        assert "training" in line
        with session.transaction() as transaction:
            transaction.put("still-mine", b"1")
    assert headrace("volume", "cat", "still-mine", "--volume", world.good).stdout == b"1"


def test_a_writer_that_died_is_taken_over_when_asked(tmp_path: Path) -> None:
    uri = f"file:{tmp_path}/disk.img"
    with Volume.create([f"{uri}?create=32MiB"]) as volume:
        session = volume.session(run_id="training", heartbeat_s=0.1)
        with session.transaction() as transaction:
            transaction.put("x", b"1")
        # Its process is gone: it beats no more, and never closed.
        session._beat.stop(None)
        session._fence.close()
        line = complaint(headrace("volume", "rm", "x", "--volume", uri))
        assert "training" in line and "--takeover" in line
        answer = headrace("volume", "rm", "x", "--volume", uri, "--takeover")
        assert answer.returncode == 0, answer.stderr
        assert headrace("volume", "ls", uri, "--json").stdout.strip() == b""


def test_a_target_that_is_gone_for_good(tmp_path: Path, world: World) -> None:
    """The tool waits as long as it was told to, then says so."""
    with serving(NQN, f"{tmp_path}/disk.img:256MiB") as target:
        uri = target.uri(loss_timeout=1.5)
        Volume.create([uri]).close()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "headrace", "ingest", str(world.text(size=10_000_000)), "data"),
                *("--volume", uri, "--vocab-size", "300"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            # It is connected when the target sees a second user of its port.
            deadline = time.monotonic() + 60
            while not _connections(process.pid, target.port):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            os.kill(target.process.pid, signal.SIGKILL)
            out, err = process.communicate(timeout=90)
        finally:
            process.kill()
            process.wait()
    line = complaint(subprocess.CompletedProcess([], process.returncode, out, err))
    assert str(target.port) in line


def _connections(pid: int, port: int) -> int:
    """Established TCP connections of a process to a local port."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            text = str(link.readlink())
        except OSError:
            continue
        if text.startswith("socket:["):
            inodes.add(text[8:-1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == "01" and row[9] in inodes for row in rows)
