"""Recorded machines: what each is, in the five words, and all that is wrong with it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from headrace.doctor.examine import Examination, examine
from headrace.doctor.machine import Machine
from headrace.doctor.verdict import WORDS
from tests.doctor.machines import NAMES, unpack

VERDICTS = {
    "aws-ebs-and-instance-store": {
        "/dev/md0": "hypervisor-presented",
        "/dev/nvme0n1": "hypervisor-presented",
        "/fsx": "network file system",
    },
    "gcp-hyperdisk-and-local-ssd": {
        "/dev/nvme0n1": "hypervisor-presented",
        "/dev/nvme1n1": "hypervisor-presented",
        "/mnt/share": "network file system",
    },
    "azure-boost": {"/dev/nvme0n1": "hypervisor-presented", "/dev/nvme1n1": "hypervisor-presented"},
    "bare-metal-rdma": {"/dev/nvme0n1": "fabric-visible", "/dev/nvme2n1": "local"},
    "kernel-tcp-host": {"/dev/nvme0n1": "fabric-visible", "/dev/vda": "hypervisor-presented"},
    "kernel-to-headrace": {"/dev/nullb1": "local", "/dev/nvme0n1": "fabric-visible"},
    "kernel-rxe": {"/dev/nullb1": "local", "/dev/nvme0n1": "fabric-visible"},
}
#: All that is an error or a warning, with what it is about.
WRONG: dict[str, set[str]] = {
    "aws-ebs-and-instance-store": set(),
    "gcp-hyperdisk-and-local-ssd": {
        "fs-no-barriers /mnt/ssd", "nfs-soft /mnt/share", "nfs-nconnect /mnt/share", "nfs-small-requests /mnt/share",
        "net-mtu ens4",
    },
    "azure-boost": {
        "cgroup-killed machine", "block-throttled nvme1n1", "cgroup-memory machine", "cgroup-throttled machine",
    },
    "bare-metal-rdma": {
        "nvme-state nvme1", "net-down rail1", "rdma-port mlx5_1", "nvme-no-optimized-path nvme0n1",
        "nvme-policy-numa nvme0n1", "net-mtu rail1", "net-crc rail1", "rdma-counters mlx5_0", "ulimit-memlock machine",
        "gds-p2pdma-fabric machine", "gds-iommu machine",
    },
    "kernel-tcp-host": {
        "nvme-keep-alive nvme0", "nvme-few-queues nvme0", "nvme-ctrl-loss nvme1", "identity-cloned machine",
        "identity-mixed nvme0", "net-flaps enp1s0", "net-losses enp1s0", "net-offloads enp1s0",
        "tcp-retransmits enp1s0", "tcp-path-mtu enp1s0", "tcp-buffers machine",
        "fs-sync /train", "fs-data-journal /train",
        "io-uring-off machine",
    },
    "kernel-to-headrace": {"identity-missing machine"},
    "kernel-rxe": {
        "identity-missing machine", "nvme-policy-numa nvme0n1", "rdma-software rxe0",
    },
}  # fmt: skip
#: And what is only worth knowing there.
NOTES: dict[str, set[str]] = {
    "kernel-to-headrace": {"ulimit-files"},
    "aws-ebs-and-instance-store": {"fs-ephemeral"},
    "bare-metal-rdma": {
        "nvme-ctrl-loss", "nvme-waits-for-ever", "net-numa-gpu", "block-scheduler", "block-numa-gpu",
        "block-read-ahead", "gds", "gds-compat",
    },
    "kernel-tcp-host": {
        "nvme-waits-for-ever", "nvme-short-queues", "nvme-reconnects", "nvme-one-interface", "tcp-limited",
        "identity-pair",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Examination]:
    return {name: examine(Machine(unpack(name, tmp_path_factory.mktemp(name)))) for name in NAMES}


@pytest.mark.parametrize("name", VERDICTS)
def test_storage_has_its_verdict(examined: dict[str, Examination], name: str) -> None:
    found = {one.name: one.verdict.word for one in examined[name].storage}
    assert found == VERDICTS[name]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_denied_that_cannot_be_seen(examined: dict[str, Examination], name: str) -> None:
    """The words are five, and a PCIe device in a virtual machine is never said to be something else than NVMe-oF."""
    for one in examined[name].storage:
        assert one.verdict.word in WORDS
        if one.verdict.word == "hypervisor-presented":
            assert "cannot be told from inside" in one.verdict.why and "not NVMe-oF" not in one.verdict.why


@pytest.mark.parametrize("name", WRONG)
def test_all_that_is_wrong_is_found_and_nothing_else(examined: dict[str, Examination], name: str) -> None:
    found = {f"{one.id} {one.about[0]}" for one in examined[name].findings if one.severity in ("error", "warning")}
    assert found == WRONG[name]


@pytest.mark.parametrize("name", NOTES)
def test_what_is_worth_knowing_is_told(examined: dict[str, Examination], name: str) -> None:
    assert {one.id for one in examined[name].findings if one.severity == "note"} >= NOTES[name]


def test_a_target_of_ours_is_known_by_what_it_calls_itself(examined: dict[str, Examination]) -> None:
    """As the kernel shows it; by the name alone nothing is decided."""
    found = examined["kernel-to-headrace"]
    why = next(one.verdict.why for one in found.storage if one.name == "/dev/nvme0n1")
    assert why == "transport tcp; the target calls itself 'headrace', as headrace serve does"
    (controller,) = found.facts.nvme.controllers
    assert (controller.queues, controller.queue_size, controller.keep_alive_s, controller.ctrl_loss_s) == (
        2,
        128,
        5,
        600,
    )
    ways = next(one.parts for one in found.storage if one.name == "/dev/nvme0n1")
    assert ways == {"nvme0n1", "nvme0", "eth0", "rxe0"}


def test_findings_are_told_the_worst_first_and_whole(examined: dict[str, Examination]) -> None:
    for found in examined.values():
        order = [("error", "warning", "note").index(one.severity) for one in found.findings]
        assert order == sorted(order)
        for one in found.findings:
            assert all((one.evidence, one.why, one.what_to_do, one.title)), one


def test_what_is_gone_with_the_instance_is_told(examined: dict[str, Examination]) -> None:
    gone = {one.name: one.verdict.ephemeral for one in examined["aws-ebs-and-instance-store"].storage}
    assert gone == {"/dev/md0": True, "/dev/nvme0n1": False, "/fsx": None}


def test_gpudirect_is_proven_by_counters_only(tmp_path: Path) -> None:
    folder = unpack("bare-metal-rdma", tmp_path)
    assert examine(Machine(folder)).to_json()["gpudirect"] == "not proven"
    stats = folder / "proc/driver/nvidia-fs/stats"
    stats.write_text(stats.read_text().replace("Read=0", "Read=4711"))
    assert examine(Machine(folder)).to_json()["gpudirect"] == "proven"


def test_secrets_are_not_kept(examined: dict[str, Examination]) -> None:
    found = examined["kernel-tcp-host"]
    assert [one.authenticates for one in found.facts.nvme.controllers] == [True, None]
    assert "DHHC" not in str(found.to_json())


def test_what_was_named_is_looked_at_only(tmp_path: Path) -> None:
    folder = unpack("gcp-hyperdisk-and-local-ssd", tmp_path)
    found = examine(Machine(folder), ["/mnt/share/data"])
    assert [one.name for one in found.storage] == ["/mnt/share"]
    about = {name for one in found.findings for name in one.about}
    assert about == {"/mnt/share", "ens4", "machine"}
    with (folder / "proc/self/mountinfo").open("a") as mounts:
        mounts.write("99 1 7:0 / /mnt/ssd/image ro - squashfs /dev/loop0 ro\n")
    (one,) = examine(Machine(folder), ["/mnt/ssd/image/data"]).storage
    assert one.name == "/mnt/ssd/image" and one.verdict.word == "unknown"
    with (folder / "proc/self/mountinfo").open("a") as mounts:
        mounts.write("98 1 0:60 / /mnt/$(x) rw - nfs4 10.0.0.1:/a rw,vers=4.2,nconnect=8,soft\n")
    (soft,) = (one for one in examine(Machine(folder), ["/mnt/$(x)"]).findings if one.id == "nfs-soft")
    assert soft.command is not None
    # Pasted as it is, it changes nothing.
    assert soft.command.split("  # ") == [
        "findmnt -no OPTIONS '/mnt/$(x)'", "umount it, then mount -t nfs -o THESE,hard 10.0.0.1:/a '/mnt/$(x)'"
    ]  # fmt: skip
    found = examine(Machine(folder), ["/dev/nvme1n1", "nvme1n1"])
    assert [one.name for one in found.storage] == ["/dev/nvme1n1"]


def test_names_that_are_there_stay(tmp_path: Path) -> None:
    """Targets know a host by them: what is missing is made of the other one."""
    name = "nqn.2014-08.org.nvmexpress:uuid:"
    for there, said, missing, made in (
        ("hostid", "7d1c3b62-0000-4000-8000-000000000002", "hostnqn", f"{name}7d1c3b62-0000-4000-8000-000000000002"),
        ("hostnqn", f"{name}7d1c3b62-0000-4000-8000-000000000001", "hostid", "7d1c3b62-0000-4000-8000-000000000001"),
    ):
        folder = unpack("kernel-tcp-host", tmp_path / there)
        (folder / "etc/nvme" / missing).unlink()
        (folder / "etc/nvme" / there).write_text(f"{said}\n")
        (finding,) = (one for one in examine(Machine(folder)).findings if one.id == "identity-missing")
        assert finding.command is not None
        command = finding.command.replace("/etc/nvme", str(folder / "etc/nvme"))
        subprocess.run(["sh", "-ec", command], check=True, timeout=60)
        assert (folder / "etc/nvme" / there).read_text() == f"{said}\n"
        assert (folder / "etc/nvme" / missing).read_text() == f"{made}\n"


@pytest.mark.parametrize(
    ("path", "text", "word"),
    [
        ("sys/class/nvme/nvme2/transport", "loop", "local"),
        ("proc/cpuinfo", "flags\t: fpu hypervisor\n", "hypervisor-presented"),
        ("proc/cpuinfo", "Features : fp asimd\n", "unknown"),
        ("sys/class/nvme/nvme2/transport", "", "unknown"),
        ("sys/class/nvme/nvme2/transport", "fc", "fabric-visible"),
    ],
)
def test_the_verdict_follows_from_what_is_there(tmp_path: Path, path: str, text: str, word: str) -> None:
    folder = unpack("bare-metal-rdma", tmp_path)
    (folder / path).resolve().write_text(text)
    found = {one.name: one.verdict.word for one in examine(Machine(folder)).storage}
    assert found["/dev/nvme2n1"] == word


_BASE = "sys/class/nvme"
_PORT = "sys/class/infiniband/mlx5_0/ports/1"
_MOUNT = "45 22 259:8 / /data rw,noatime - {} rw{}\n"


@pytest.mark.parametrize(
    ("path", "text", "wrong"),
    [
        (f"{_BASE}/nvme0/nvme0c0n1/ana_state", "inaccessible", "nvme-no-usable-path nvme0n1"),
        (f"{_BASE}/nvme0/state", "dead", "nvme-state nvme0"),
        (f"{_BASE}/nvme0/kato", "0", "nvme-keep-alive nvme0"),
        (f"{_BASE}/nvme0/hostid", "4c4c4544-0000-4000-8000-00000000000f", "identity-mixed nvme0"),
        ("etc/nvme/hostid", "00000000-0000-0000-0000-000000000000", "identity-hostid machine"),
        ("etc/nvme/hostid", "my-host", "identity-hostid machine"),
        ("etc/nvme/hostnqn", "nqn.2014-08.org.nvmexpress:uuid:03000200-0400-0500-0006-000700080009",
         "identity-placeholder machine"),
        (f"{_PORT}/gid_attrs/types/1", "IB/RoCE v1", "rdma-roce-v1 mlx5_0"),
        (f"{_PORT}/state", "2: INIT", "rdma-port mlx5_0"),
        ("proc/self/mountinfo", _MOUNT.format("nfs4 10.10.0.9:/a", ",vers=4.2,noac,nconnect=8"),
         "nfs-no-attribute-cache /data"),
        ("proc/self/mountinfo", _MOUNT.format("cifs //10.10.0.9/a", ",soft,rsize=65536"), "smb-soft /data"),
        ("proc/self/mountinfo", _MOUNT.format("xfs /dev/nvme0n1", ",strictatime"), "fs-atime /data"),
        ("proc/self/limits", "Max open files            256                  4096                 files\n",
         "ulimit-files machine"),
    ],
)  # fmt: skip
def test_one_thing_more_is_wrong(tmp_path: Path, path: str, text: str, wrong: str) -> None:
    folder = unpack("bare-metal-rdma", tmp_path)
    before = {f"{one.id} {one.about[0]}" for one in examine(Machine(folder)).findings if one.severity != "note"}
    (folder / path).resolve().write_text(text)
    after = {f"{one.id} {one.about[0]}" for one in examine(Machine(folder)).findings if one.severity != "note"}
    assert wrong in after and wrong not in before


def test_what_only_looks_wrong_is_no_warning(tmp_path: Path) -> None:
    folder = unpack("bare-metal-rdma", tmp_path)
    group = folder / "sys/kernel/iommu_groups/0/type"
    group.parent.mkdir(parents=True)
    group.write_text("identity\n")
    port = (folder / _PORT).resolve()
    (port / "link_layer").write_text("InfiniBand\n")
    (port / "rate").write_text("100 Gb/sec (2X HDR)\n")
    found = {one.id: one.severity for one in examine(Machine(folder)).findings}
    assert "gds-iommu" not in found and found["rdma-width"] == "note"
    group.write_text("DMA-FQ\n")
    (port / "rate").write_text("25 Gb/sec (1X EDR)\n")
    found = {one.id: one.severity for one in examine(Machine(folder)).findings}
    assert found["gds-iommu"] == found["rdma-width"] == "warning"
