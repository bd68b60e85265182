"""GPUs, and whether bytes could go to them past the processor's memory (GPUDirect Storage), and ever did."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.doctor.machine import Machine

_DEVICES_MAX = 4096
_NVIDIA = "0x10de"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    #: Of its PCI function, as `0000:19:00.0`.
    address: str
    numa_node: int | None


@dataclass(frozen=True, kw_only=True)
class GpuDirect:
    """What is there for GPUDirect Storage. Only `reads` and `writes` prove anything."""

    #: Version of nvidia-fs; "loaded" where it says none; `None`: it is not there.
    nvidia_fs: str | None
    #: Operations that nvidia-fs counted since it was loaded; `None`: it shows none.
    reads: int | None
    writes: int | None
    #: It counts at all; `None`: it does not say.
    counts: bool | None
    #: The kernel has the P2PDMA that the driver needs; `None`: cannot be told.
    p2pdma: bool | None
    #: Of cufile.json; `None`: it does not say.
    allow_compat: bool | None
    use_p2pdma: bool | None
    #: `/run/udev` is there, without which cuFile falls back in a container.
    udev: bool


@dataclass(frozen=True, kw_only=True)
class Gpus:
    gpus: tuple[Gpu, ...]
    driver: str | None
    direct: GpuDirect


def read_gpus(machine: Machine) -> Gpus:
    base = "/sys/bus/pci/devices"
    found = []
    for name in machine.names(base)[:_DEVICES_MAX]:
        # Display controllers, 3D ones among them.
        if (machine.word(f"{base}/{name}/class") or "").startswith("0x03") and (
            machine.word(f"{base}/{name}/vendor") == _NVIDIA
        ):
            node = machine.number(f"{base}/{name}/numa_node")
            found.append(Gpu(address=name, numa_node=node if node is not None and node >= 0 else None))
    driver = re.search(r"\s(\d{3}\.\d{1,3}(?:\.\d{1,3})?)\s", machine.text("/proc/driver/nvidia/version") or "")
    return Gpus(gpus=tuple(found), driver=driver[1] if driver else None, direct=_direct(machine, bool(found)))


def _direct(machine: Machine, gpus: bool) -> GpuDirect:
    stats = machine.text("/proc/driver/nvidia-fs/stats") or ""
    loaded = machine.exists("/proc/driver/nvidia-fs")
    version = re.search(r"NVFS Driver\(version: ([\d.:]{1,20})\)", stats)
    counted = re.search(r"^Ops\s*:\s*Read=(\d{1,19}) Write=(\d{1,19})", stats, re.M)
    config = machine.text("/etc/cufile.json") or ""
    return GpuDirect(
        nvidia_fs=(version[1].replace(":", ".") if version else "loaded") if loaded else None,
        reads=int(counted[1]) if counted else None,
        writes=int(counted[2]) if counted else None,
        counts={0: False, 1: True}.get(machine.number("/sys/module/nvidia_fs/parameters/rw_stats_enabled") or 0)
        if machine.exists("/sys/module/nvidia_fs/parameters/rw_stats_enabled")
        else None,
        # 10 MiB and more to read: only where somebody can use it.
        p2pdma=machine.finds("/proc/kallsyms", "p2pdma_pgmap_ops") if gpus else None,
        allow_compat=_flag(config, "allow_compat_mode"),
        use_p2pdma=_flag(config, "use_pci_p2pdma"),
        udev=machine.exists("/run/udev"),
    )


def _flag(config: str, name: str) -> bool | None:
    """Of a JSON file with comments."""
    match = re.search(rf'^\s*"{name}"\s*:\s*(true|false)\b', config, re.M)
    return match[1] == "true" if match else None
