"""The machine itself: kernel, hypervisor, provider, container, processors, and who it is to NVMe targets."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from uuid import UUID

from headrace.doctor.facts.mounts import mountinfo
from headrace.doctor.machine import Machine
from headrace.settings import HOSTID, HOSTNQN

#: `sys_vendor`, `chassis_asset_tag` or `product_name` of DMI begins so: whose machine it is.
_PROVIDERS = (
    ("Amazon EC2", "AWS"),
    ("Google", "Google Cloud"),
    ("7783-7084-3265-9085-8269-3286-77", "Azure"),
    ("OracleCloud.com", "Oracle Cloud"),
    ("Alibaba Cloud", "Alibaba Cloud"),
    ("DigitalOcean", "DigitalOcean"),
    ("Hetzner", "Hetzner"),
    ("Vultr", "Vultr"),
    ("Scaleway", "Scaleway"),
)
#: `sys_vendor` or `product_name` of machines that are no hardware, where the processor does not say so (Arm).
_VIRTUAL = (
    "QEMU",
    "KVM",
    "VMware",
    "Xen",
    "OpenStack",
    "innotek",
    "VirtualBox",
    "Bochs",
    "Virtual Machine",
    "Firecracker",
)


_GROUPS_MAX = 512


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Names of this host in `/etc/nvme`; `None`: there is none, or it cannot be read."""

    hostnqn: str | None
    hostid: str | None
    #: The machine's own identifier, of which `nvme gen-hostnqn` makes a name; root only.
    dmi_uuid: str | None
    #: The environment of this process gives headrace's own host both; the kernel's host takes no notice of it.
    in_environment: bool

    @property
    def nqn_uuid(self) -> UUID | None:
        """The identifier inside of a name of the UUID form."""
        match = re.fullmatch(r"nqn\.2014-08\.org\.nvmexpress:uuid:([0-9a-fA-F-]{36})", self.hostnqn or "")
        return uuid_of(match[1]) if match else None


@dataclass(frozen=True, kw_only=True)
class Host:
    kernel: str | None
    #: Major and minor.
    kernel_version: tuple[int, int] | None
    #: Whether a hypervisor is under it; `None`: nothing says so.
    virtual: bool | None
    vendor: str | None
    product: str | None
    #: Whose cloud it is, by what the firmware says of itself.
    provider: str | None
    #: "kubernetes", "docker", "podman", "container"; `None`: nothing shows one.
    container: str | None
    #: This process may read everything.
    root: bool
    cpus: int | None
    numa_nodes: int | None
    memory_bytes: int | None
    #: Huge pages that were set aside, and those of them that nobody has; bytes.
    huge_bytes: int | None
    huge_free_bytes: int | None
    #: An IOMMU translates for devices; `None`: not known.
    iommu: bool | None
    identity: Identity


def uuid_of(text: str | None) -> UUID | None:
    try:
        return UUID(text) if text and re.fullmatch(r"[0-9a-fA-F-]{32,36}", text) else None
    except ValueError:
        return None


def read_host(machine: Machine) -> Host:
    kernel = machine.word("/proc/sys/kernel/osrelease")
    match = re.match(r"(\d{1,4})\.(\d{1,4})", kernel or "")
    dmi = {
        name: machine.word(f"/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name", "chassis_asset_tag")
    }
    said = [value for value in dmi.values() if value]
    said_of_memory = machine.text("/proc/meminfo") or ""
    memory = _memory(said_of_memory, r"MemTotal:\s+(\d{1,15}) kB")
    page = _memory(said_of_memory, r"Hugepagesize:\s+(\d{1,9}) kB")
    huge = {
        name: None if page is None or count is None else count * page * 1024
        for name in ("Total", "Free")
        for count in [_memory(said_of_memory, rf"HugePages_{name}:\s+(\d{{1,12}})$")]
    }
    return Host(
        kernel=kernel,
        kernel_version=(int(match[1]), int(match[2])) if match else None,
        virtual=_virtual(machine, said),
        vendor=dmi["sys_vendor"],
        product=dmi["product_name"],
        provider=next(filter(None, map(provider_of, said)), None),
        container=_container(machine),
        root=bool(re.search(r"^Uid:\s+\d+\s+0\s", machine.text("/proc/self/status") or "", re.M)),
        cpus=_count(machine.word("/sys/devices/system/cpu/online")),
        numa_nodes=_count(machine.word("/sys/devices/system/node/online")),
        memory_bytes=memory * 1024 if memory is not None else None,
        huge_bytes=huge["Total"],
        huge_free_bytes=huge["Free"],
        iommu=_iommu(machine),
        identity=Identity(
            hostnqn=machine.word("/etc/nvme/hostnqn"),
            hostid=machine.word("/etc/nvme/hostid"),
            dmi_uuid=machine.word("/sys/class/dmi/id/product_uuid"),
            in_environment=machine.live and all(os.environ.get(name) for name in (HOSTNQN, HOSTID)),
        ),
    )


def _memory(text: str, pattern: str) -> int | None:
    found = re.search(f"^{pattern}", text, re.M)
    return int(found[1]) if found else None


def read_nodes(machine: Machine) -> dict[int, int]:
    """By processor its NUMA node."""
    base = "/sys/devices/system/node"
    found: dict[int, int] = {}
    for name in machine.names(base):
        match = re.fullmatch(r"node(\d{1,4})", name)
        for part in (machine.word(f"{base}/{name}/cpulist") or "").split(",") if match else ():
            ends = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
            if match and ends:
                found |= dict.fromkeys(range(int(ends[1]), int(ends[2] or ends[1]) + 1), int(match[1]))
    return found


def provider_of(said: str) -> str | None:
    """Whose cloud it is, by one word of the firmware."""
    return next((name for begin, name in _PROVIDERS if said.startswith(begin)), None)


def _virtual(machine: Machine, said: list[str]) -> bool | None:
    if machine.finds("/proc/cpuinfo", " hypervisor"):
        return True
    if machine.word("/sys/hypervisor/type") or any(name in value for value in said for name in _VIRTUAL):
        return True
    # A processor that would say so, and does not: x86.
    return False if machine.finds("/proc/cpuinfo", "flags\t") else None


def _container(machine: Machine) -> str | None:
    if machine.exists("/var/run/secrets/kubernetes.io") or machine.exists("/run/secrets/kubernetes.io"):
        return "kubernetes"
    if machine.exists("/.dockerenv"):
        return "docker"
    if machine.exists("/run/.containerenv"):
        return "podman"
    found = re.search(r"^\d+ \d+ \S+ \S+ / .* - overlay ", mountinfo(machine), re.M)
    return "container" if found else None


def _iommu(machine: Machine) -> bool | None:
    command_line = machine.text("/proc/cmdline") or ""
    if re.search(r"\b(iommu=(pt|off)|(intel|amd)_iommu=off|iommu\.passthrough=1)\b", command_line):
        return False
    if not machine.exists("/sys/class/iommu"):
        return None
    groups = "/sys/kernel/iommu_groups"
    kinds = [machine.word(f"{groups}/{one}/type") for one in machine.names(groups)[:_GROUPS_MAX]]
    if any(kinds):
        # Passed through ("identity") by the kernel's default or by its command line.
        return any(kind.startswith("DMA") for kind in kinds if kind)
    return bool(machine.names("/sys/class/iommu"))


def _count(ranges: str | None) -> int | None:
    """`0-3,8` -> 5."""
    total = 0
    for part in (ranges or "").split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if match is None:
            return None
        total += max(0, int(match[2] or match[1]) - int(match[1]) + 1)
    return total or None
