"""Queues, interrupts, flow control, Lustre, huge pages, io_uring: found where a recorded machine shows them, and never
without evidence."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.doctor.checks.measured import check_measured
from headrace.doctor.examine import examine
from headrace.doctor.facts.limits import ask_io_uring
from headrace.doctor.finding import Finding
from headrace.doctor.machine import Machine
from headrace.doctor.record import Recorder
from headrace.doctor.touch import Touch, touch_mount
from tests.doctor.machines import unpack, unpack_text

CARD = "/sys/devices/pci0000:40/0000:41:00.0"
DRIVE = "/sys/devices/pci0000:00/0000:01:00.0"
NODES = "/sys/devices/system/node/node0/cpulist = 0-63\n/sys/devices/system/node/node1/cpulist = 64-127\n"
VECTORS = "".join(f"{{device}}/msi_irqs/{number} = msix\n" for number in (200, 201, 202))
RING = (
    "Ring parameters for rail0:\nPre-set maximums:\nRX:\t\t8192\nTX:\t\t8192\n"
    "Current hardware settings:\nRX:\t\t{}\nTX:\t\t1024"
)
SILENT = (
    "/commands/dcb-pfc-rail0 <<\npfc-cap 8 macsec-bypass off delay 0\n"
    "prio-pfc 0:off 1:off 2:off 3:off 4:off 5:off 6:off 7:off\n.\n"
    "/commands/ethtool-a-rail0 <<\nPause parameters for rail0:\nAutonegotiate:\toff\nRX:\t\toff\nTX:\t\toff\n.\n"
)
#: The kernel shows its RDMA device below the card.
RDMA = f"{CARD}/infiniband/mlx5_0/\n"


def interrupts(cpu: int, count: int, *more: int) -> str:
    """As /proc/interrupts has them: three vectors, the counts of processor `cpu` and of those after it."""
    head = "           " + "".join(f"CPU{one:<8}" for one in range(128))
    counts = [0] * 128
    counts[cpu : cpu + 1 + len(more)] = [count, *more]
    line = " ".join(map(str, counts))
    rows = [f" {number}: {line} IR-PCI-MSIX-0000:41:00.0 {number}-edge mlx5_comp" for number in (200, 201, 202)]
    return f"/proc/interrupts <<\n{head}\n" + "\n".join([*rows, "NMI: 1 2 Non-maskable"]) + "\n.\n"


ONE_BUSY = "/proc/interrupts <<\n           CPU0 CPU1\n 200: 5000000 0 x\n 201: 0 17 y\n 202: 3 0 z\n.\n"
#: Nearly all of one connection's, and the little that others have elsewhere: nothing is wrong with where they go.
ONE_FLOW = "/proc/interrupts <<\n           CPU0 CPU1\n 200: 5000000 0 x\n 201: 0 300000 y\n 202: 3 0 z\n.\n"
LUSTRE = (
    "/sys/fs/lustre/osc/abcdef-OST0000-osc-ffff8881/max_rpcs_in_flight = {rpcs}\n"
    "/sys/fs/lustre/osc/abcdef-OST0000-osc-ffff8881/max_pages_per_rpc = {pages}\n"
    "/sys/fs/lustre/osc/abcdef-OST0001-osc-ffff8881/max_rpcs_in_flight = 64\n"
    "/sys/fs/lustre/osc/abcdef-OST0001-osc-ffff8881/max_pages_per_rpc = 1024\n"
    "/sys/fs/lustre/llite/abcdef-ffff8881/max_read_ahead_mb = 1024\n"
    "/sys/fs/lustre/llite/abcdef-ffff8881/max_read_ahead_per_file_mb = {ahead}\n"
)
MEMORY = (
    "/proc/meminfo <<\nMemTotal:       2113929216 kB\nHugePages_Total:  {}\nHugePages_Free:   {}\n"
    "Hugepagesize:     1048576 kB\n.\n"
)
STATISTICS = "/commands/ethtool-S-rail0 <<\nNIC statistics:\n     rx_prio3_pause: 88\n     tx_prio3_pause: 0\n.\n"
GROUP = "/sys/fs/cgroup/system.slice/job.service"


#: Of one machine, all that can be.
ALL = (
    NODES + VECTORS.format(device=CARD) + interrupts(64, 4_000_000) + RDMA + SILENT + STATISTICS
    + f"/commands/ethtool-g-rail0 <<\n{RING.format(1024)}\n.\n{CARD}/net/rail0/statistics/rx_missed_errors = 4711\n"
    + MEMORY.format(512, 400) + "/commands/io-uring = EPERM\n" + LUSTRE.format(rpcs=8, pages=256, ahead=0)
)  # fmt: skip


def found_in(folder: Path, name: str, more: str) -> dict[str, Finding]:
    """What comes first in a text counts, so that `more` goes before what the machine says."""
    found = examine(Machine(unpack(name, unpack_text(more, folder))))
    return {f"{one.id} {one.about[0]}": one for one in found.findings}


@pytest.mark.parametrize(
    ("name", "more", "wrong", "severity", "evidence"),
    [
        ("bare-metal-rdma", VECTORS.format(device=CARD) + interrupts(0, 4_000_000, 12),
         "irq-one-processor rail0", "warning", "12000000 of 12000036 of its 3 busy queues"),
        ("bare-metal-rdma", VECTORS.format(device=DRIVE) + interrupts(9, 4_000_000),
         "irq-one-processor nvme2", "note", "of its 3 busy queues"),
        ("bare-metal-rdma", NODES + VECTORS.format(device=CARD) + interrupts(64, 50_000, 50_000, 50_000),
         "irq-other-node rail0", "note", "450000 of 450000; rail0 is on node 0"),
        ("bare-metal-rdma", f"{CARD}/net/rail0/statistics/rx_missed_errors = 4711\n"
         f"/commands/ethtool-g-rail0 <<\n{RING.format(1024)}\n.\n",
         "net-ring rail0", "warning", "rx_missed_errors: 4711, of 91234567 packets; ethtool -g: RX 1024, at most 8192"),
        ("bare-metal-rdma", RDMA + SILENT, "rdma-no-flow-control mlx5_0", "warning", "no ECN mark was ever counted"),
        ("bare-metal-rdma", RDMA + STATISTICS,
         "rdma-paused mlx5_0", "note", "rx_prio3_pause: 88"),
        ("aws-ebs-and-instance-store", LUSTRE.format(rpcs=8, pages=256, ahead=256),
         "lustre-requests /fsx", "note", "max_rpcs_in_flight 8, max_pages_per_rpc 256"),
        ("aws-ebs-and-instance-store", LUSTRE.format(rpcs=32, pages=1024, ahead=16),
         "lustre-read-ahead /fsx", "note", "max_read_ahead_per_file_mb 16, max_read_ahead_mb 1024"),
        ("bare-metal-rdma", MEMORY.format(512, 400), "huge-pages-idle machine", "note", "HugePages_Free 400.0 GiB"),
        ("bare-metal-rdma", "/commands/io-uring = ENOSYS\n",
         "io-uring-refused machine", "note", "io_uring_setup: ENOSYS"),
        ("bare-metal-rdma", f"{GROUP}/memory.events <<\nlow 0\nhigh 4242\nmax 0\noom 0\noom_kill 0\n.\n"
         f"{GROUP}/memory.high = 1000000000\n",
         "cgroup-slowed machine", "warning", "high 4242; memory.high: 1000000000"),
        ("bare-metal-rdma", "/sys/module/nvidia_fs/parameters/rw_stats_enabled = 0\n", "gds machine", "note",
         "rw_stats_enabled is 0"),
    ],
)  # fmt: skip
def test_it_is_found(tmp_path: Path, name: str, more: str, wrong: str, severity: str, evidence: str) -> None:
    one = found_in(tmp_path, name, more)[wrong]
    assert one.severity == severity and evidence in one.evidence, one


def test_all_of_it_is_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "record", unpack("bare-metal-rdma", unpack_text(ALL, tmp_path / "machine")))
    found = examine(recorder)
    recorder.write()
    again = examine(Machine(tmp_path / "record"))
    assert [one.id for one in again.findings] == [one.id for one in found.findings]
    assert {one.id for one in found.findings} >= {
        "irq-one-processor", "irq-other-node", "net-ring", "rdma-no-flow-control", "rdma-paused", "huge-pages-idle",
        "io-uring-refused",
    }  # fmt: skip
    for one in found.findings:
        assert all((one.evidence, one.why, one.what_to_do, one.title)), one


@pytest.mark.parametrize(
    ("name", "more", "id"),
    [
        # Spread, seldom, or of one vector.
        ("bare-metal-rdma", VECTORS.format(device=CARD) + interrupts(0, 4_000_000, 4_000_000), "irq-one-processor"),
        ("bare-metal-rdma", VECTORS.format(device=CARD) + interrupts(0, 4_000), "irq-one-processor"),
        ("bare-metal-rdma", f"{CARD}/msi_irqs/200 = msix\n" + interrupts(0, 4_000_000), "irq-one-processor"),
        # One connection keeps one queue busy, wherever the others would go.
        ("bare-metal-rdma", VECTORS.format(device=CARD) + ONE_BUSY, "irq-one-processor"),
        ("bare-metal-rdma", VECTORS.format(device=CARD) + ONE_FLOW, "irq-one-processor"),
        ("bare-metal-rdma", NODES + VECTORS.format(device=CARD) + interrupts(0, 50_000, 50_000), "irq-other-node"),
        # Without a packet lost a ring is long enough; one that cannot be longer is no advice.
        ("bare-metal-rdma", f"/commands/ethtool-g-rail0 <<\n{RING.format(1024)}\n.\n", "net-ring"),
        ("bare-metal-rdma", f"{CARD}/net/rail0/statistics/rx_missed_errors = 4711\n"
         f"/commands/ethtool-g-rail0 <<\n{RING.format(8192)}\n.\n", "net-ring"),
        # What nobody says is not held against it.
        ("bare-metal-rdma", RDMA, "rdma-no-flow-control"),
        ("bare-metal-rdma", RDMA + SILENT.partition("/commands/ethtool-a")[0], "rdma-no-flow-control"),
        ("bare-metal-rdma", RDMA + SILENT.replace("3:off", "3:on"), "rdma-no-flow-control"),
        ("bare-metal-rdma", RDMA + SILENT + "".join(
            f"{CARD}/net/rail0/ecn/{side}/enable/3 = 1\n" for side in ("roce_np", "roce_rp")), "rdma-no-flow-control"),
        ("bare-metal-rdma", MEMORY.format(512, 0), "huge-pages-idle"),
        ("bare-metal-rdma", "/commands/io-uring = allowed\n", "io-uring-refused"),
        ("aws-ebs-and-instance-store", LUSTRE.format(rpcs=32, pages=1024, ahead=256), "lustre-requests"),
        ("aws-ebs-and-instance-store", LUSTRE.replace("abcdef", "other").format(rpcs=1, pages=1, ahead=1),
         "lustre-requests"),
        # A filter of a container that lets it through, as the kernel said itself.
        ("azure-boost", "/commands/io-uring = allowed\n", "io-uring-filtered"),
    ],
)  # fmt: skip
def test_it_is_not_found_without_evidence(tmp_path: Path, name: str, more: str, id: str) -> None:
    assert not [one for one in found_in(tmp_path, name, more) if one.startswith(id + " ")]


def test_one_queue_is_told_where_nothing_spreads_it(tmp_path: Path) -> None:
    folder = unpack("bare-metal-rdma", tmp_path)
    queues = folder / CARD[1:] / "net/rail0/queues"
    for one in list(queues.iterdir())[1:]:
        one.rmdir()
    (queue,) = queues.iterdir()
    (one,) = (one for one in examine(Machine(folder)).findings if one.id == "net-one-queue")
    assert one.severity == "warning" and "100000 Mb/s" in one.evidence
    (queue / "rps_cpus").write_text("00000000,0000ffff\n")
    assert "net-one-queue" not in {one.id for one in examine(Machine(folder)).findings}


def test_io_uring_is_asked_of_the_kernel_itself() -> None:
    said = ask_io_uring()
    assert said == "allowed" or said in errno.errorcode.values()
    switched = Path("/proc/sys/kernel/io_uring_disabled")
    if said == "allowed" and switched.exists():
        assert switched.read_text().strip() != "2"
    assert examine(Machine(), ["/"], measure=False).facts.limits.io_uring == said


def test_layouts_of_lustre_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`struct lov_user_md_v1` as lustre_user.h has it; other file systems have none."""
    assert touch_mount(str(tmp_path)).stripes is None
    for count, magic in ((1, 0x0BD10BD0), (-1, 0x0BD30BD0), (8, 0x0BD10BD0), (None, 0x0BD60BD0)):
        raw = magic.to_bytes(4, "little") + bytes(20) + (4 << 20).to_bytes(4, "little")
        raw += (count or 0).to_bytes(2, "little", signed=True) + bytes(2)
        with monkeypatch.context() as patch:
            patch.setattr("os.getxattr", lambda path, name, raw=raw: raw)
            touched = touch_mount(str(tmp_path))
        assert touched.stripes == count
        ids = {one.id for one in check_measured([], [replace(touched, size_bytes=None)])}
        assert ids == ({"lustre-stripes"} if count == 1 else set())
    assert not list(check_measured([], [Touch(kind="mount", path="/mnt", outcome="answered")]))
