"""A machine that is recorded, and looked at again: the same findings, and nobody's names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.doctor.examine import Examination, examine
from headrace.doctor.machine import Machine
from headrace.doctor.record import Cleaner, Recorder
from headrace.errors import UsageError
from tests.doctor.machines import NAMES, pack, unpack

#: Of the machines made by hand: what a record must not have.
TELLING = (
    "10.10.0.", "192.168.1.1", "10.128.0.5", "10.0.3.20", "4c4c4544", "7d1c3b62", "nqn.2026-01.example:pool", "DHHC",
    "S6000000000001", "vol00000000000000001", "io.spdk:cnode1",
)  # fmt: skip


def _said(found: Examination) -> list[tuple[str, str, str]]:
    return [(one.id, one.severity, one.about[0]) for one in found.findings]


@pytest.mark.parametrize("name", NAMES)
def test_a_record_shows_the_same(tmp_path: Path, name: str) -> None:
    recorder = Recorder(tmp_path / "record", unpack(name, tmp_path / "machine"))
    before = examine(recorder)
    recorder.write()
    after = examine(Machine(tmp_path / "record"))
    assert _said(after) == _said(before) and len(_said(before)) > 0
    assert [(one.name, one.verdict.word, len(one.parts)) for one in after.storage] == [
        (one.name, one.verdict.word, len(one.parts)) for one in before.storage
    ]
    text = pack(tmp_path / "record")
    assert not [word for word in TELLING if word in text]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UsageError, match="mixed"):
        Recorder.into(tmp_path)


def test_names_are_replaced_the_same_way_everywhere() -> None:
    clean = Cleaner(["gpu-17.cluster.corp", "gpu-17", "filer"])
    uuid = "6f9619ff-8b86-d011-b42d-00c04fc964ff"
    text = f"""gpu-17 mounts filer:/export, filer2 and gpu-17.cluster.corp
nqn.2014-08.org.nvmexpress:uuid:{uuid} {uuid.upper()} nqn.2020-05.com.corp:secret nqn.2014-08.org.nvmexpress.discovery
00:1b:21:ab:cd:ef fe80::21b:21ff:feab:cdef 2a02:1:2::7 ::1 0::/ 127.0.0.1 0.0.0.0 8.8.8.8 10.1.2.3 0000:19:00.0 19:07:26
0123456789abcdef01 1234567890123456789"""
    found = clean.text(text)
    for word in (
        "gpu-17",
        "filer:",
        "corp",
        uuid,
        uuid.upper(),
        "1b:21",
        "21b:21ff",
        "2a02:",
        "8.8.8.8",
        "10.1.2.3",
        "cdef01",
    ):
        assert word not in found, word
    kept = ("filer2", ":/export", "::1 0::/ 127.0.0.1 0.0.0.0 ", "0000:19:00.0 19:07:26", "nvmexpress.discovery")
    for word in (*kept, "1234567890123456789", "nqn.2014-08.org.nvmexpress:uuid:00000000-"):
        assert word in found, word
    assert clean.text(text) == found
    names = found.split()
    # The name and the identifier of one host still belong together.
    host = next(word for word in names if word.startswith("nqn.2014-08.org.nvmexpress:uuid:"))
    assert host.rpartition(":")[2] in names


def test_addresses_keep_their_networks() -> None:
    clean = Cleaner([])
    near, nearer, far, out = (clean.text(one) for one in ("10.1.2.3", "10.1.2.77", "10.200.2.3", "52.1.2.3"))
    network = near.rpartition(".")[0]
    assert nearer.startswith(network + ".") and near != nearer
    assert far.startswith("10.") and not far.startswith(network) and not out.startswith("52.")
    route = "Iface\tDestination\tGateway \tFlags\neth0\t0002010A\t00000000\t0001\n"
    (line,) = clean.file("/proc/self/net/route", route).splitlines()[1:]
    number = bytes.fromhex(line.split("\t")[1])[::-1]
    assert ".".join(map(str, number[:3])) == network


def test_what_identifies_is_replaced_in_each_form() -> None:
    clean = Cleaner(["gpu-17"])
    # The serial number of a drive without an identifier of its own: "P12345" and "12", as hexadecimal.
    for serial in ("503132333435", "3132"):
        found = clean.file("/sys/block/nvme0n1/wwid", f"nvme.8086-{serial}-4d4f44454c-00000001\n")
        assert re.fullmatch(r"nvme\.8086-[0-9a-f]+-4d4f44454c-00000001\n", found) and f"-{serial}-" not in found
    fibre = clean.text("traddr=nn-0x20000090fae0b5f5:pn-0x1000009012345678")
    assert "fae0b5f5" not in fibre and "12345678" not in fibre and fibre.startswith("traddr=nn-0x")
    uuid = "6f9619ff-8b86-d011-b42d-00c04fc964ff"
    pods = clean.text(f"/kubepods/pod{uuid} /kubepods-pod{uuid.replace('-', '_')}.slice /docker/GPU-17")
    assert "9619" not in pods and "17" not in pods and pods.count("000000000001") == 2
    assert clean.file("/sys/devices/virtual/dmi/id/chassis_asset_tag", "CZJ12345\n") == "replaced\n"
    assert clean.file("/sys/devices/virtual/dmi/id/chassis_asset_tag", "Amazon EC2\n") == "Amazon EC2\n"
    mount = "1 0 0:50 / /mnt rw - cifs //filer/a rw,vers=3.1.1,username=jane,domain=CORP,addr=10.0.0.9"
    found = clean.file("/proc/self/mountinfo", mount)
    assert "jane" not in found and "CORP" not in found and "vers=3.1.1,username=user-1" in found


def test_a_host_may_be_named_as_the_kernel_names_things(tmp_path: Path) -> None:
    root = tmp_path / "machine"
    (root / "proc/self").mkdir(parents=True)
    (root / "sys/class/net/eth0").mkdir(parents=True)
    (root / "sys/class/net/eth0/mtu").write_text("9000\n")
    options = "rw,vers=3,hard,proto=tcp,addr=10.0.0.9"
    mounts = [f"{n} 0 0:5{n} / /mnt{n} rw - nfs {name}:/x {options}" for n, name in enumerate(("nfs", "net", "hard"))]
    (root / "proc/self/mountinfo").write_text("\n".join(mounts) + "\n")
    recorder = Recorder(tmp_path / "record", root)
    before = examine(recorder)
    recorder.write()
    after = examine(Machine(tmp_path / "record"))
    assert _said(after) == _said(before) and len(after.storage) == 3
    assert [one.name for one in after.facts.network.interfaces] == ["eth0"]
    sources = {mount.source for mount in after.facts.mounts}
    assert len(sources) == 3 and all(re.fullmatch(r"host-\d\.example:/x", one) for one in sources)
