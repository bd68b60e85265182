"""Whatever a machine shows: what makes no sense is unknown, and nothing raises."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.doctor import machine as machines
from headrace.doctor.examine import examine
from headrace.doctor.facts.mounts import read_mounts
from headrace.doctor.facts.network import flow_of
from headrace.doctor.machine import FILE_MAX_BYTES, Machine, number_of
from headrace.doctor.page import build
from headrace.doctor.report import print_report
from tests.doctor.machines import FOLDER, unpack, unpack_text
from tests.doctor.test_checklist import ALL

_QUIET = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
_VALUES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [b"", b"-1", b"99999999999999999999999", b"0x", b"\xff\xfe", b"off", b"none", b"a=b,c", b"1:2", b"/../..",
         b"[]", b"4: ", b"0-", b"\0\0\0", b"9" * 70_000, "\u0661\u0662".encode(), b"nan", b"1e999", b"(null)"]
    ),
)  # fmt: skip
_KINDS = st.sampled_from(["bytes", "missing", "pipe", "folder", "loop", "away", "socket"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all machines at once, so that every check has something to look at."""
    names = ("bare-metal-rdma", "kernel-tcp-host", "azure-boost")
    text = "\n".join((FOLDER / f"{name}.machine").read_text() for name in names)
    return unpack_text(ALL + text, tmp_path_factory.mktemp("whole"))


class Garbled(Machine):
    """A machine, some of whose files say something else."""

    def __init__(self, root: Path, says: dict[str, bytes]) -> None:
        super().__init__(root)
        self.says = says

    def _read(self, path: str, most: int) -> bytes | None:
        found = self.says.get(self.real(path) or "")
        return super()._read(path, most) if found is None else found[: most + 1]


def _spoil(path: Path, kind: str, value: bytes) -> None:
    path.unlink()
    if kind == "bytes":
        path.write_bytes(value)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "away":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            # Longer paths than a socket may have.
            where = Path.cwd()
            os.chdir(path.parent)
            one.bind(path.name)
            os.chdir(where)


@_QUIET
@given(data=st.data())
def test_files_of_nonsense_are_unknown(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "spoilt"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder, symlinks=True)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=30, unique=True)):
        _spoil(path, data.draw(_KINDS), data.draw(_VALUES))
    found = examine(Machine(folder))
    json.dumps(found.to_json())
    assert "<script" not in build(found).html()
    print_report(found)


def test_garbage_here_and_there_is_unknown(whole: Path) -> None:
    """Every file says nonsense once: among others that do, too, and among many that do not."""
    files = [f"/{path.relative_to(whole)}" for path in sorted(whole.rglob("*")) if path.is_file()]
    for garbage in (bytes(range(256)), b"18446744073709551615\n", b"-1\n"):
        for part in range(5):
            found = examine(Garbled(whole, dict.fromkeys(files[part::5], garbage)))
            json.dumps(found.to_json())


def test_an_empty_machine_is_unknown(tmp_path: Path) -> None:
    found = examine(Machine(tmp_path))
    assert found.storage == () and found.findings == ()
    assert "No storage is to be seen" in found.sentence
    assert found.facts.host.virtual is None and found.facts.host.kernel is None


def test_reads_are_bounded_and_stay_inside(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (tmp_path / "huge").write_bytes(b"1" * (FILE_MAX_BYTES + 1))
    (tmp_path / "out").symlink_to("../../../../../../etc/passwd")
    (tmp_path / "absolute").symlink_to("/etc/passwd")
    (tmp_path / "endless").symlink_to("/dev/zero")
    assert machine.text("/huge") is None and machine.number("/huge") is None
    # In a recorded machine these are its own files, which it does not have.
    assert [machine.text(f"/{name}") for name in ("out", "absolute", "endless")] == [None, None, None]
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("inside\n")
    assert [machine.text(f"/{name}") for name in ("out", "absolute")] == ["inside", "inside"]
    assert machine.real("/absolute") == "/etc/passwd"


def test_what_may_not_be_read_is_denied_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = unpack("kernel-tcp-host", tmp_path)
    (folder / "proc/self/status").write_text("Uid:\t1000\t1000\t1000\t1000\n")
    real = os.open

    def refuses(path: os.PathLike[str] | str, *rest: int, **more: int) -> int:
        if str(path).endswith("product_uuid"):
            raise PermissionError(13, "Permission denied")
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuses)
    found = examine(Machine(folder))
    assert found.facts.host.identity.dmi_uuid is None
    assert any(one.startswith("with root: ") and "product_uuid" in one for one in found.unseen)
    assert "identity-cloned" not in {one.id for one in found.findings}


def test_commands_that_do_not_end_are_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that prints for ever, one that hangs, one whose child holds what it printed: nothing of them is kept."""
    monkeypatch.setattr(machines, "COMMAND_TIMEOUT_S", 1.0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, program in (
        ("prints", "exec yes"), ("hangs", "exec sleep 60"), ("leaves", f"sleep 60 & echo $! > {tmp_path}/left; echo x"),
        ("fails", "echo x; exit 1"), ("answers", "echo x"),
    ):  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/sh\necho >> {tmp_path}/{name}.asked\n{program}\n")
        (tmp_path / name).chmod(0o755)
    machine = Machine()
    for _ in range(2):
        said = {name: machine.command(name, name, "word") for name in ("prints", "hangs", "leaves", "fails", "away")}
        assert set(said.values()) == {None}
    # Those that end have as long as they like to: this machine may be busy.
    monkeypatch.setattr(machines, "COMMAND_TIMEOUT_S", 60.0)
    assert machine.command("answers", "answers") == "x"
    assert machine.endless >= {"prints", "hangs", "leaves"}
    for asked in tmp_path.glob("*.asked"):
        assert asked.read_text() == "\n" or asked.stem not in machine.endless
    if (tmp_path / "left").exists():
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12), ("-1", -1), ("0x1d0f", 0x1D0F), (None, None), ("", None), ("1.5", None), ("\u0661", None),
        ("0x", None),
        ("9" * 21, None), ("9" * 5000, None), (str(2**64 - 1), 2**64 - 1), (str(2**64), None), ("off", None),
    ],
)  # fmt: skip
def test_numbers_are_numbers_or_nothing(text: str | None, value: int | None) -> None:
    assert number_of(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "ESTAB", "ESTAB 0 0 a:1", "ESTAB 0 0 :::99999 b:1", "E 0 0 10.0.0.1:1 10.0.0.2:2 rtt:/ cwnd:x mss:" + "9" * 40,
     "E 0 0 [::1]:1 [::2]:2 rtt:1e9/2 retrans:0/ delivery_rate Gbps bytes_sent:-1"],
)  # fmt: skip
def test_lines_of_ss_that_are_none_say_nothing(text: str) -> None:
    flow = flow_of(text)
    assert flow is None or (flow.rtt_ms, flow.cwnd, flow.mss, flow.bytes_sent, flow.delivery_rate) == (None,) * 5


def test_mounts_that_are_none_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    lines = [
        "",
        "1",
        "1 2 3:4 / / rw",
        "1 2 x:y / /a rw - ext4 /dev/a rw",
        "1 2 3:4 / /b\\040c rw - ext4 /dev/a rw,x=1",
    ]
    (tmp_path / "proc/self/mountinfo").write_text("\n".join(lines))
    (mount,) = read_mounts(Machine(tmp_path))
    assert mount.point == "/b c" and mount.options == {"rw": "", "x": "1"}


def test_a_page_of_mounts_and_a_name_in_another_encoding_hide_none(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    line = b"1 2 3:4 / /%s rw - ext4 /dev/a rw," + b"x" * 1000 + b"\n"
    (tmp_path / "proc/self/mountinfo").write_bytes(b"".join(line % name for name in [b"caf\xe9", *[b"a"] * 300, b"z"]))
    mounts = read_mounts(Machine(tmp_path))
    assert len(mounts) == 302 and mounts[-1].point == "/z"
    line = b"1 2 0:9 / /a\x1b[2Jb\\011c rw - nfs4 10.0.0.1:/x\x1b[2J rw,vers=4.2,x=\x07\n"
    (tmp_path / "proc/self/mountinfo").write_bytes(line)
    found = examine(Machine(tmp_path))
    assert str(found.to_json()).isprintable() and found.storage[0].name == "/a\ufffd[2Jb\ufffdc"
