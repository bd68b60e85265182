"""What members can be that they should not be: one clear error each, through Python and on the command line, and not a
byte changed; and what only looks wrong, and works.

Each row holds for members that are files, namespaces of our target, devices of the kernel, as far as it can be there.
"""

from __future__ import annotations

import json
import lzma
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.device import crc32c
from headrace.errors import (
    HeadraceError,
    NotAVolume,
    NotFenced,
    UsageError,
    VolumeDamaged,
    VolumeFull,
    VolumeTooNew,
    VolumeTooOld,
)
from headrace.testing import Quirks, SharedNamespace
from headrace.testing.loop import LoopDevice
from headrace.testing.serve import ServeProcess, serving
from headrace.units import MIB
from headrace.volume import Volume, layout
from headrace.volume.copy import plan_in
from headrace.volume.media import members

NQN = "nqn.2026-01.io.headrace:test"
SIZE = 4 * MIB
DATA = random.Random(5).randbytes(300_000)
IMAGES = Path(__file__).parent.parent / "images"
FILE, TARGET, KERNEL, MODEL = "file", "target", "kernel", "model"
#: Images behind the two targets, in the order of their numbers: what may be written to, and what is write protected.
SERVED = ["a", "b", "c", "a-at-b", "b-at-a", "shrunk", "new-a", "new-b", "foreign", "blank", "full", "tiny"]
#: Beside those, where no reservations are offered.
SERVED_OPEN = ["open-a", "open-b"]
SERVED_PROTECTED = ["protected-a", "protected-b", "protected-blank"]


def make(where: Sequence[Path], data: dict[str, bytes], block_bytes: int = 4096) -> None:
    addresses = [f"file:{path}?create={SIZE}&block={block_bytes}" for path in where]
    with (
        Volume.create(addresses, name="-".join(path.stem for path in where), stripe_bytes=65536) as volume,
        volume.session(run_id="t") as session,
        session.transaction() as transaction,
    ):
        for name, content in data.items():
            transaction.put(name, content)


def reseal(path: Path, offset: int, code: str, value: int) -> None:
    """Change a field of both superblocks, checksum and all."""
    with path.open("r+b") as file:
        for place in (0, SIZE - 4096):
            file.seek(place)
            block = bytearray(file.read(4096))
            struct.pack_into(code, block, offset, value)
            struct.pack_into("<I", block, 4092, crc32c(bytes(block[:4092])))
            file.seek(place)
            file.write(block)


class World:
    """Images of members, good and bad, behind every kind of device. Nobody ever changes one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target: ServeProcess | None = None
        self.protected: ServeProcess | None = None
        self.namespaces: dict[str, SharedNamespace] = {}
        self.models: dict[str, bytes] = {}
        self.loops = ExitStack()
        self.devices: dict[str, str] = {}
        path = self.path
        make([path("a"), path("b")], {"x": DATA})
        make([path("c")], {"x": DATA})
        make([path("full")], {"x": DATA, "filler": bytes(1 << 20)})
        make([path("short-a"), path("short-b")], {"x": DATA}, 512)
        for name, other in [("a-at-b", "a"), ("b-at-a", "b"), ("shrunk", "b"), ("new-a", "a"), ("new-b", "b"),
                            ("protected-a", "a"), ("protected-b", "b"), ("grown", "c"),
                            ("open-a", "a"), ("open-b", "b")]:  # fmt: skip
            shutil.copy(path(other), path(name))
        with path("shrunk").open("r+b") as file:
            # Its last superblock came along, as far as it can.
            file.seek(SIZE - 4096)
            last = file.read(4096)
            file.truncate(3 * MIB)
            file.seek(3 * MIB - 4096)
            file.write(last)
        for name in ("new-a", "new-b"):
            reseal(path(name), 8, "<I", layout.VERSION + 1)
        foreign = bytearray(SIZE)
        foreign[0x438:0x43A] = b"\x53\xef"
        path("foreign").write_bytes(foreign)
        for name in ("blank", "protected-blank"):
            path(name).write_bytes(bytes(SIZE))
        path("tiny").write_bytes(bytes(8192))
        with path("grown").open("r+b") as file:
            file.truncate(2 * SIZE)
        old = lzma.decompress((IMAGES / "version-1.xz").read_bytes())
        half = len(old) // 2
        path("old-a").write_bytes(old[:half])
        path("old-b").write_bytes(old[half:])
        (folder / "small").write_bytes(DATA)
        (folder / "big").write_bytes(bytes(2 * SIZE))
        self.originals = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.times: dict[str, int] = {}
        self.restore()

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.img"

    def untouched(self) -> bool:
        """Is every medium as it was, byte for byte, whoever stands in front of it, and no new file there?"""
        for path in self.folder.iterdir():
            # What a target keeps beside a medium.
            name = path.name.removesuffix(".reservations")
            if name not in self.originals:
                return False
            written = path.stat().st_mtime_ns
            if name == path.name and written != self.times[name]:
                # A file that was opened for writing looks younger, too.
                if path.read_bytes() != self.originals[name]:
                    return False
                self.times[name] = written
        return all(self.namespaces[name].read(0, SIZE) == data for name, data in self.models.items())

    def restore(self) -> None:
        for name, content in self.originals.items():
            path = self.folder / name
            if path.read_bytes() != content:
                path.write_bytes(content)
            self.times[name] = path.stat().st_mtime_ns

    def uri(self, kind: str, name: str) -> str:
        if kind == FILE:
            return f"file:{self.path(name)}"
        if kind == KERNEL:
            if name not in self.devices:
                loop = LoopDevice(
                    self.path("c" if name == "long" else name), None,
                    sector_bytes=4096 if name == "long" else 512, read_only=name.startswith("protected"),
                )  # fmt: skip
                self.loops.callback(self.devices.clear)
                self.devices[name] = self.loops.enter_context(loop).path
            return self.devices[name]
        target, names = self.target, SERVED + SERVED_OPEN
        if name.startswith("protected"):
            target, names = self.protected, SERVED_PROTECTED
        assert target is not None
        return target.uri(names.index(name) + 1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("members"))
    writable, protected = ([str(made.path(name)) for name in names] for names in (SERVED, SERVED_PROTECTED))
    with serving(NQN, *writable) as made.target, serving(NQN, *protected, options=["--read-only"]) as made.protected:
        for name in SERVED_OPEN:
            made.target.ask("add-namespace", nqn=NQN, namespace={"path": str(made.path(name)), "no_reservations": True})
        yield made


@dataclass(frozen=True)
class Refused:
    error: type[HeadraceError]
    says: str
    status: int = 1


WORKS = None
OLD, GREW = "an older version", "a member that grew"
TAKEN = Refused(UsageError, "holds a volume", 2)
IN_USE = Refused(UsageError, "in use: mounted at", 2)
Addresses = Callable[[World, str], list[str]]


def of(*names: str) -> Addresses:
    return lambda world, kind: [world.uri(kind, name) for name in names]


def with_options(options: str, *names: str) -> Addresses:
    return lambda world, kind: [
        ("block:" if kind == KERNEL else "") + world.uri(kind, name) + ("&" if kind == TARGET else "?") + options
        for name in names
    ]


def by_another_name(world: World, kind: str) -> list[str]:
    """The same medium twice, by addresses that differ."""
    uri = world.uri(kind, "blank")
    if kind == TARGET:
        return [uri, uri.replace("127.0.0.1", "localhost")]
    link = world.folder.parent / f"{world.folder.name}-link-{kind}"
    link.unlink(missing_ok=True)
    link.symlink_to(uri.removeprefix("file:"))
    return [uri, f"{'file' if kind == FILE else 'block'}:{link}"]


def mounted(world: World, kind: str) -> list[str]:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no mkfs.ext4 here")
    image, where = world.folder.parent / "mounted.img", world.folder.parent / "mounted"
    where.mkdir()
    loop = world.loops.enter_context(LoopDevice(image, 16 * MIB))
    subprocess.run(["mkfs.ext4", "-q", loop.path], check=True, capture_output=True)
    if subprocess.run(["mount", loop.path, where], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    world.loops.callback(subprocess.run, ["umount", where], check=True)
    return [loop.path]


def model(world: World, kind: str) -> list[str]:
    """Namespaces that take no reservation, behind addresses that the command line takes, too."""
    if not world.namespaces:
        world.namespaces = {name: SharedNamespace(SIZE, quirks=Quirks(no_reservations=True)) for name in "ab"}
        devices = [namespace.connect() for namespace in world.namespaces.values()]
        with (
            Volume.create(devices=devices, stripe_bytes=65536) as volume,
            volume.session(run_id="t", unfenced=True) as session,
            session.transaction() as transaction,
        ):
            transaction.put("x", DATA)
        world.models = {name: namespace.read(0, SIZE) for name, namespace in world.namespaces.items()}
    return [f"model:{name}" for name in world.namespaces]


@dataclass(frozen=True)
class Row:
    what: str
    addresses: Addresses
    kinds: tuple[str, ...] = (FILE, TARGET, KERNEL)
    read: Refused | None = WORKS
    write: Refused | None = WORKS
    create: Refused | None = TAKEN


def anyhow(error: type[HeadraceError], says: str, status: int = 1, **others: Refused) -> dict[str, Refused]:
    """The same for whoever reads and writes."""
    return {"read": Refused(error, says, status), "write": Refused(error, says, status), **others}


ROWS = [
    Row("members in another order", of("b", "a")),
    Row("members that were swapped at their addresses", of("a-at-b", "b-at-a")),
    Row("a member is missing", of("a"), **anyhow(NotAVolume, "missing: number 1 not among them")),
    Row("the first member is missing", of("b"), **anyhow(NotAVolume, "missing: number 0 not among them")),
    Row("a member of another volume", of("a", "c"), **anyhow(NotAVolume, "different volumes")),
    Row("a member more than there are", of("a", "b", "c"), **anyhow(NotAVolume, "different volumes")),
    Row(
        "a member twice", of("a", "a", "b"),
        **anyhow(NotAVolume, "given twice", create=Refused(UsageError, "given twice", 2)),
    ),
    Row(
        "a member twice, by two addresses", by_another_name,
        **anyhow(NotAVolume, "not a headrace volume", create=Refused(UsageError, "given twice", 2)),
    ),
    Row("a member that shrank", of("a", "shrunk"), **anyhow(VolumeDamaged, "smaller than it was")),
    Row(GREW, of("grown"), (FILE, KERNEL)),
    Row("made with blocks of 512 bytes, on blocks of 4096", with_options("block=4096", "short-a", "short-b"), (FILE,)),
    Row("made with blocks of 4096 bytes, on blocks of 512", with_options("block=512", "a", "b"), (FILE, KERNEL)),
    Row("a disk of 512-byte blocks as one of 4096", with_options("block=4096", "a", "b"), (KERNEL,)),
    Row("made on blocks of 512 bytes, on a disk of 4096", of("long"), (KERNEL,)),
    Row(
        "blocks shorter than the disk's", with_options("block=512", "long"), (KERNEL,),
        **anyhow(UsageError, "512", 2, create=Refused(UsageError, "512", 2)),
    ),
    Row(
        "blocks that no device has", with_options("block=1024", "a", "b"), (FILE, KERNEL),
        **anyhow(UsageError, "1024", 2, create=Refused(UsageError, "1024", 2)),
    ),
    Row(
        "write protected", of("protected-a", "protected-b"), (TARGET, KERNEL),
        write=Refused(UsageError, "can only be read", 2),
    ),
    Row(
        "write protected, and blank", of("protected-blank"), (TARGET, KERNEL),
        **anyhow(NotAVolume, "not a headrace volume", create=Refused(UsageError, "can only be read", 2)),
    ),
    Row("no reservations", of("open-a", "open-b"), (TARGET,), write=Refused(NotFenced, "reservations")),
    Row("no reservations", model, (MODEL,), write=Refused(NotFenced, "reservations")),
    Row(
        "a file system", of("foreign"), (FILE, TARGET, KERNEL),
        **anyhow(NotAVolume, "ext4", create=Refused(UsageError, "ext4", 2)),
    ),
    Row(
        "mounted", mounted, (KERNEL,),
        read=Refused(NotAVolume, "ext4"), write=IN_USE, create=IN_USE,
    ),
    Row("a newer version", of("new-a", "new-b"), **anyhow(VolumeTooNew, f"version {layout.VERSION + 1}")),
    Row(OLD, of("old-a", "old-b"), (FILE,), write=Refused(VolumeTooOld, "no longer written")),
    Row(
        "too small", of("tiny"), (FILE, TARGET),
        **anyhow(NotAVolume, "not a headrace volume", create=Refused(UsageError, "too small", 2)),
    ),
    Row("full", of("full"), write=Refused(VolumeFull, "free space")),
]  # fmt: skip
CASES = [(row, kind) for row in ROWS for kind in row.kinds]


READ = ["info *", "ls *", "stat x -V", "cat x --json -V", "cp :x OUT -V", "verify *", "scrub *"]
WRITE = ["cp SOURCE :new -V", "rm x -V", "takeover * --yes"]
#: The commands that say it for all, where members are not files.
FEW = ["info *", "cp SOURCE :new -V", "create *"]


@pytest.mark.parametrize(("row", "kind"), CASES, ids=[f"{row.what}: {kind}" for row, kind in CASES])
def test_error_list(
    row: Row,
    kind: str,
    world: World,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == KERNEL and LoopDevice.problem():
        pytest.skip(LoopDevice.problem())
    monkeypatch.delenv("HEADRACE_VOLUME", raising=False)
    if kind == MODEL:
        monkeypatch.setattr(
            members, "open_device",
            lambda uri, *, read_only: world.namespaces[uri.removeprefix("model:")].connect(read_only=read_only),
        )  # fmt: skip
    full = row.write is not None and row.write.error is VolumeFull
    source = world.folder / ("big" if full else "small")
    with ExitStack() as world.loops:
        addresses = row.addresses(world, kind)
        in_python(row, addresses, source)
        assert world.untouched()
        for number, (command, refused) in enumerate(commands(row, kind, full)):
            given = arguments(command, addresses, source, tmp_path / f"out-{number}")
            # In turn as people read it, and as programs do.
            on_the_command_line([*given, *(["--json"] if number % 2 else [])], refused, capfd)
            assert world.untouched(), command
        if row.read is not None:
            # Whatever it can do with these, it never writes, and says it in a line.
            main(["volume", "salvage", *addresses])
            assert len([line for line in capfd.readouterr().err.splitlines() if "headrace: error" in line]) <= 1
        assert world.untouched()
        if row.write is None and kind in (FILE, KERNEL):
            for command in ("cp SOURCE :new -V", "rm x -V", "scrub *"):
                on_the_command_line(arguments(command, addresses, source, tmp_path), WORKS, capfd)
            with Volume.open(addresses) as volume:
                assert [info.name for info in volume.list()] == ["new"] and volume.read("new") == DATA
            world.loops.close()
            world.restore()


def in_python(row: Row, addresses: list[str], source: Path) -> None:
    def read() -> None:
        with Volume.open(addresses) as volume:
            assert row.what == OLD or volume.read("x") == DATA

    def write() -> None:
        with Volume.open(addresses, write=True) as volume:
            plan_in(volume, [source], "new")
            volume.session().close()

    for do, refused in ((read, row.read), (write, row.write), (lambda: Volume.create(addresses), row.create)):
        if refused is not None:
            with pytest.raises(refused.error) as raised:
                do()
            check(refused, str(raised.value), type(raised.value).__name__)
        elif do is read:
            read()


def commands(row: Row, kind: str, full: bool) -> Iterator[tuple[str, Refused | None]]:
    for command in READ:
        # What is old has other objects, and a copy that another session would write is named by a scrub.
        if not (row.what == OLD and " x" in command.replace(":", " ")) and not (
            row.what == GREW and "scrub" in command
        ):
            yield command, row.read
    for command in WRITE[: 1 if full or row.what == OLD else 3]:
        if row.write is not None and (row.read is not None or "takeover" not in command):
            yield command, row.write
    if row.create is not None:
        yield "create *", row.create


def arguments(command: str, addresses: list[str], source: Path, out: Path) -> list[str]:
    given: list[str] = ["volume"]
    for word in command.replace("SOURCE", str(source)).replace("OUT", str(out)).split():
        if word == "-V":
            given += [text for uri in addresses for text in ("-V", uri)]
        else:
            given += addresses if word == "*" else [word]
    return given


def on_the_command_line(given: list[str], refused: Refused | None, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    status = main(given)
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    if refused is None:
        assert (status, err) == (0, ""), err
        return
    (line,) = err.splitlines()
    assert status == refused.status, line
    if "--json" in given:
        said = json.loads(line)["error"]
        assert said["exit_status"] == status
        check(refused, said["message"], said["kind"])
        for printed in out.splitlines():
            json.loads(printed)
    else:
        assert line.startswith("headrace: error: ") and not out
        check(refused, line)


def check(refused: Refused, message: str, kind: str | None = None) -> None:
    for part in refused.says.split(": "):
        assert part in message
    assert kind in (None, refused.error.__name__)
