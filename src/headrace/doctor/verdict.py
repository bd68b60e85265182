"""What kind of storage something is, as far as this machine can tell: one of five words, and why.

The words are exact. A PCIe function in a virtual machine is "hypervisor-presented" and nothing else: a hypervisor or a
DPU that presents NVMe shows transport `pcie`, whatever fabric stands behind it, so that cannot be told from inside.
Names of models are the device's own choice: they are quoted as evidence, and decide only where a provider documents
them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.doctor.facts import Facts
from headrace.doctor.facts.block import Disk
from headrace.doctor.facts.mounts import MEMORY, NETWORK, SHARED, Mount, mount_of
from headrace.doctor.facts.nvme import Namespace

#: The host sees the fabric: transport tcp, rdma or fc.
FABRIC = "fabric-visible"
#: PCIe, virtio or the like, which a hypervisor or DPU presents: what is behind it cannot be told from inside.
PRESENTED = "hypervisor-presented"
#: A device of this machine, or its memory.
LOCAL = "local"
NETWORK_FS = "network file system"
UNKNOWN = "unknown"
WORDS = (FABRIC, PRESENTED, LOCAL, NETWORK_FS, UNKNOWN)

_INSIDE = "whether a fabric is behind it cannot be told from inside"
_DEPTH_MAX = 8


@dataclass(frozen=True, kw_only=True)
class Verdict:
    word: str
    #: What it rests on, for people.
    why: str
    #: What is written there is gone when the instance stops, as the provider documents; `None`: nothing says so.
    ephemeral: bool | None = None


#: (model begins so, what the provider's documentation says it is, gone when the instance stops)
_MODELS = (
    ("Amazon Elastic Block Store", "AWS documents this model as an EBS volume", False),
    ("Amazon EC2 NVMe Instance Storage", "AWS documents this model as an instance store of the host", True),
    ("nvme_card-pd", "Google documents this model as a Persistent Disk or Hyperdisk", False),
    ("nvme_card", "Google documents this model as a local SSD of the host", True),
    ("MSFT NVMe Accelerator", "Azure documents this model as a remote disk behind Azure Boost", False),
    ("Microsoft NVMe Direct Disk", "Azure documents this model as a temporary disk of the host", True),
    ("EphemeralDisk", "Google documents this model as a local SSD of the host", True),
    ("PersistentDisk", "Google documents this model as a Persistent Disk", False),
)
#: What targets over a fabric call themselves.
_TARGETS = (
    ("headrace", "headrace serve"),
    ("Linux", "the Linux kernel's target"),
    ("SPDK", "SPDK"),
    ("Ceph", "Ceph's NVMe-oF gateway"),
    ("Lightbits", "Lightbits"),
)


def verdict_of_disk(facts: Facts, disk: Disk, depth: int = 0) -> Verdict:
    """Of a block device, down to what it is made of."""
    if depth > _DEPTH_MAX:
        return Verdict(word=UNKNOWN, why="it is made of too many layers")
    namespace = next((one for one in facts.nvme.namespaces if one.name == disk.name), None)
    if namespace is not None:
        return _of_namespace(facts, namespace, disk)
    if disk.below:
        return _of_parts(facts, disk, depth)
    if disk.name.startswith("loop") and disk.backing:
        mount = mount_of(disk.backing, facts.mounts)
        if mount is None:
            return Verdict(word=UNKNOWN, why=f"a loop device of {disk.backing}, which is not mounted here")
        behind = verdict_of_mount(facts, mount, depth + 1)
        return Verdict(
            word=behind.word, why=f"a loop device of a file at {mount.point}: {behind.why}", ephemeral=behind.ephemeral
        )
    if re.match(r"(ram|zram|nullb|pmem|brd)\d", disk.name):
        return Verdict(word=LOCAL, why="memory of this machine", ephemeral=True)
    if re.match(r"(rbd|nbd|drbd)\d", disk.name):
        return Verdict(word=FABRIC, why=f"{disk.name.rstrip('0123456789')} is a block device over TCP, not NVMe-oF")
    if re.search(r"/session\d+/target", disk.place):
        return Verdict(word=FABRIC, why="SCSI over iSCSI, which the host sees; not NVMe-oF")
    if re.search(r"/rport-\d+", disk.place):
        return Verdict(word=FABRIC, why="SCSI over Fibre Channel, which the host sees; not NVMe-oF")
    known = _model(disk.model)
    if known is not None:
        return Verdict(word=PRESENTED, why=f"model {disk.model!r}: {known[1]}; {_INSIDE}", ephemeral=known[2])
    if re.search(r"/virtio\d+/|/vbd-\d+|/vmbus|/VMBUS", disk.place):
        return Verdict(word=PRESENTED, why=f"a paravirtual disk; {_INSIDE}")
    return _by_hypervisor(facts, disk.place, f"model {disk.model!r}" if disk.model else "a disk")


def _of_namespace(facts: Facts, namespace: Namespace, disk: Disk) -> Verdict:
    controllers = facts.nvme.controllers_of(namespace)
    transports = sorted({controller.transport for controller in controllers if controller.transport})
    if not transports:
        return Verdict(word=UNKNOWN, why="no controller says by which transport it is reached")
    if len(transports) == 1 and controllers[0].fabrics:
        model = next((one.model for one in controllers if one.model), None)
        calls = next((name for begin, name in _TARGETS if (model or "").startswith(begin)), None)
        target = f"; the target calls itself {model!r}" if model else ""
        return Verdict(
            word=FABRIC,
            why=f"transport {transports[0]}{target}" + (f", as {calls} does" if calls else ""),
        )
    if len(transports) > 1:
        return Verdict(
            word=FABRIC if all(one.fabrics for one in controllers) else UNKNOWN,
            why=f"its paths have transports {', '.join(transports)}",
        )
    if transports == ["loop"]:
        return Verdict(word=LOCAL, why="transport loop: this kernel is its own target")
    model = next((one.model for one in controllers if one.model), disk.model)
    known = _model(model)
    if known is not None:
        return Verdict(
            word=PRESENTED, why=f"transport pcie, model {model!r}: {known[1]}; {_INSIDE}", ephemeral=known[2]
        )
    return _by_hypervisor(facts, disk.place, f"transport {transports[0]}" + (f", model {model!r}" if model else ""))


def _by_hypervisor(facts: Facts, place: str, said: str) -> Verdict:
    if facts.host.virtual:
        return Verdict(word=PRESENTED, why=f"{said}, in a virtual machine: {_INSIDE}")
    if facts.host.virtual is None:
        return Verdict(word=UNKNOWN, why=f"{said}; whether this is a virtual machine cannot be told")
    if not re.search(r"/pci\d|/platform/|/usb\d", place):
        return Verdict(word=UNKNOWN, why=f"{said}, of no bus that is known here")
    return Verdict(word=LOCAL, why=f"{said}, on hardware without a hypervisor; a DPU may present it all the same")


def _of_parts(facts: Facts, disk: Disk, depth: int) -> Verdict:
    parts = []
    for name in disk.below:
        part = facts.disk(name) or next(
            (whole for whole in facts.disks if any(name == one for one, _ in whole.partitions)), None
        )
        if part is None:
            return Verdict(word=UNKNOWN, why=f"made of {name}, which is not to be seen")
        parts.append(verdict_of_disk(facts, part, depth + 1))
    words = {part.word for part in parts}
    made = ", ".join(disk.below[:8])
    if len(words) > 1:
        return Verdict(word=UNKNOWN, why=f"made of parts of several kinds: {made}")
    gone = [part.ephemeral for part in parts]
    return Verdict(
        word=parts[0].word,
        why=f"made of {made}: {parts[0].why}",
        ephemeral=True if any(gone) else (False if all(one is False for one in gone) else None),
    )


def verdict_of_mount(facts: Facts, mount: Mount, depth: int = 0) -> Verdict:
    """Of a mounted file system."""
    if mount.kind in NETWORK:
        return Verdict(word=NETWORK_FS, why=f"{NETWORK[mount.kind]} ({mount.kind}), of {mount.source}")
    if mount.kind in MEMORY:
        return Verdict(word=LOCAL, why=f"{mount.kind}: memory of this machine", ephemeral=True)
    if mount.kind in SHARED:
        return Verdict(word=PRESENTED, why=f"{mount.kind}: files of the machine outside; what holds them is its affair")
    if mount.kind == "overlay":
        return Verdict(
            word=UNKNOWN, why="an overlay, as containers have: on which disk of the node it lies is not to be seen",
            ephemeral=True if facts.host.container else None,
        )  # fmt: skip
    disk = facts.disk_of_number(mount.number)
    if disk is None and mount.source.startswith("/dev/"):
        # btrfs and ZFS have numbers of their own.
        name = mount.source.removeprefix("/dev/")
        disk = next(
            (one for one in facts.disks if name in (one.name, *(part for part, _ in one.partitions)) or
             name == f"mapper/{one.mapped}"), None,
        )  # fmt: skip
    if disk is None:
        kind = "a file system in user space" if mount.kind.startswith("fuse") else mount.kind
        return Verdict(word=UNKNOWN, why=f"{kind} of {mount.source or 'nothing'}, of no disk that is to be seen")
    found = verdict_of_disk(facts, disk, depth + 1)
    return Verdict(word=found.word, why=f"{mount.kind} on {disk.name}: {found.why}", ephemeral=found.ephemeral)


def _model(model: str | None) -> tuple[str, str, bool] | None:
    return next((one for one in _MODELS if (model or "").startswith(one[0])), None)
