"""Do bytes go to the GPUs past the processor's memory? Proved by counters, never by configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.doctor.facts import Facts
from headrace.doctor.facts.gpu import GpuDirect
from headrace.doctor.finding import MACHINE, NOTE, WARNING, Finding
from headrace.doctor.storage import Storage

_ABOUT = (MACHINE,)


def direct_state(direct: GpuDirect) -> str:
    """ "proven", "not proven" or "not there"."""
    if direct.reads or direct.writes:
        return "proven"
    return "not proven" if direct.nvidia_fs or direct.p2pdma else "not there"


def check_gpus(facts: Facts, storage: Sequence[Storage]) -> Iterator[Finding]:
    direct = facts.gpus.direct
    if not facts.gpus.gpus:
        return
    state = direct_state(direct)
    if state == "proven":
        yield Finding(
            id="gds",
            severity=NOTE,
            about=_ABOUT,
            title="GPUDirect Storage: proven",
            evidence=f"/proc/driver/nvidia-fs/stats, Ops: Read={direct.reads} Write={direct.writes}",
            why="some I/O since the module was loaded went that way; whether yours does, they say while it runs",
            what_to_do="look at them before and after a run",
            command="grep Ops /proc/driver/nvidia-fs/stats",
        )
    elif state == "not proven":
        there = f"nvidia-fs {direct.nvidia_fs}" if direct.nvidia_fs else "the kernel's P2PDMA for cuFile"
        yield Finding(
            id="gds",
            severity=NOTE,
            about=_ABOUT,
            title="GPUDirect Storage: not proven",
            evidence=f"{there} is there; no counter shows that it was used"
            + ("" if direct.nvidia_fs else " (the way by P2PDMA has no counter to look at)")
            + ("; it does not count: rw_stats_enabled is 0" if direct.counts is False else ""),
            why="cuFile and KvikIO fall back to memory of the processor without a word",
            what_to_do="run with allow_compat_mode=false, and see the counters move"
            + (", once they are switched on" if direct.counts is False else ""),
            command=("echo 1 > /sys/module/nvidia_fs/parameters/rw_stats_enabled; " if direct.counts is False else "")
            + "gdscheck -p; grep Ops /proc/driver/nvidia-fs/stats",
        )
        if direct.allow_compat is not False:
            yield Finding(
                id="gds-compat",
                severity=NOTE,
                about=_ABOUT,
                title="cuFile may fall back without a word",
                evidence="/etc/cufile.json, allow_compat_mode: "
                + ("true" if direct.allow_compat else "not said, or no such file"),
                why="a run that should be direct is not, and nothing fails",
                what_to_do="set it to false while you measure",
            )
    over_fabric = [one.name for one in facts.nvme.controllers if one.fabrics]
    if direct.use_p2pdma and over_fabric:
        yield Finding(
            id="gds-p2pdma-fabric",
            severity=WARNING,
            about=(*_ABOUT, *over_fabric),
            title="cuFile is told to use P2PDMA, which does not work over a fabric",
            evidence=f"/etc/cufile.json, use_pci_p2pdma: true; {', '.join(over_fabric)}",
            why="NVIDIA's documentation excludes NVMe-oF and RAID 0 from it: reads fail with EIO, or fall back",
            what_to_do="set it to false; over RDMA use nvidia-fs with the drivers of DOCA or MLNX_OFED",
        )
    if direct.nvidia_fs and facts.host.container and not direct.udev:
        yield Finding(
            id="gds-udev",
            severity=WARNING,
            about=_ABOUT,
            title="cuFile will fall back in this container",
            evidence="/run/udev is not there",
            why="it looks up devices by it",
            what_to_do="mount it into the container",
            command="docker run -v /run/udev:/run/udev:ro ...",
        )
    if direct.nvidia_fs and facts.host.iommu:
        yield Finding(
            id="gds-iommu",
            severity=WARNING,
            about=_ABOUT,
            title="an IOMMU translates between devices",
            evidence="/sys/class/iommu is not empty, the kernel's command line does not say iommu=pt, nor "
            "/sys/kernel/iommu_groups/*/type identity",
            why="transfers between devices go through the root complex, slower or not at all",
            what_to_do="boot with iommu=pt, or without",
            command="cat /proc/cmdline",
        )
