"""NVMe controllers, their subsystems, namespaces and paths, as sysfs shows them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.doctor.facts.interrupts import Interrupts, interrupts_of, read_table
from headrace.doctor.machine import Machine, number_of

FABRICS = ("tcp", "rdma", "fc")


@dataclass(frozen=True, kw_only=True)
class Controller:
    """One association, or one PCIe function. `None`: this kernel does not say."""

    name: str
    #: "pcie", "tcp", "rdma", "fc", "loop", "apple-nvme".
    transport: str | None
    #: Of fabrics: as `traddr=10.0.0.1,trsvcid=4420,src_addr=10.0.0.2`; of PCIe the function.
    address: str | None
    model: str | None
    firmware: str | None
    #: Of the PCI function, as 0x1d0f.
    pci_vendor: str | None
    subsysnqn: str | None
    hostnqn: str | None
    hostid: str | None
    cntlid: int | None
    #: "live", "connecting", "resetting", "deleting", "dead", "new".
    state: str | None
    #: The admin queue is one of them.
    queues: int | None
    #: Entries of each I/O queue.
    queue_size: int | None
    keep_alive_s: int | None
    #: Seconds; -1: for ever.
    ctrl_loss_s: int | None
    reconnect_delay_s: int | None
    #: Seconds; -1: never.
    fast_io_fail_s: int | None
    numa_node: int | None
    #: A secret of DH-HMAC-CHAP is set, a key of TLS is in use.
    authenticates: bool | None
    encrypted: bool | None
    reconnects: int | None
    resets: int | None
    discovery: bool
    #: Only of PCIe functions.
    interrupts: Interrupts | None

    @property
    def fabrics(self) -> bool:
        return self.transport in FABRICS

    def part(self, key: str) -> str | None:
        """`traddr`, `trsvcid`, `src_addr`, `host_traddr` or `host_iface` of the address."""
        match = re.search(rf"(?:^|,){key}=([^,]+)", self.address or "")
        return match[1] if match else None


@dataclass(frozen=True, kw_only=True)
class Path:
    """Of one namespace by one controller."""

    controller: str
    #: "optimized", "non-optimized", "inaccessible", "persistent-loss", "change"; `None`: not known.
    ana: str | None


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """A disk of the kernel, `/dev/NAME`."""

    name: str
    #: The kernel's own multipath is above its paths; else it is the namespace by one controller.
    multipath: bool
    paths: tuple[Path, ...]
    wwid: str | None


@dataclass(frozen=True, kw_only=True)
class Subsystem:
    name: str
    nqn: str | None
    model: str | None
    #: "numa", "round-robin", "queue-depth".
    policy: str | None
    controllers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Nvme:
    controllers: tuple[Controller, ...]
    subsystems: tuple[Subsystem, ...]
    namespaces: tuple[Namespace, ...]
    #: `nvme_core.multipath`.
    native_multipath: bool | None
    #: Modules that are loaded, of nvme-tcp, nvme-rdma, nvme-fc, nvmet.
    modules: tuple[str, ...]

    def controllers_of(self, namespace: Namespace) -> list[Controller]:
        names = {path.controller for path in namespace.paths}
        return [controller for controller in self.controllers if controller.name in names]

    def namespaces_of(self, controller: str) -> list[Namespace]:
        return [one for one in self.namespaces if any(path.controller == controller for path in one.paths)]


def read_nvme(machine: Machine) -> Nvme:
    base = "/sys/class/nvme"
    names = [name for name in machine.names(base) if re.fullmatch(r"nvme\d{1,6}", name)]
    said = machine.word("/sys/module/nvme_core/parameters/multipath")
    table = read_table(machine) if names else {}
    return Nvme(
        controllers=tuple(_controller(machine, f"{base}/{name}", name, table) for name in names),
        subsystems=tuple(_subsystems(machine)),
        namespaces=tuple(_namespaces(machine, names)),
        native_multipath={"Y": True, "N": False}.get(said or ""),
        modules=tuple(
            name for name in ("nvme_tcp", "nvme_rdma", "nvme_fc", "nvmet") if machine.exists(f"/sys/module/{name}")
        ),
    )


def _controller(machine: Machine, base: str, name: str, table: Mapping[int, Mapping[int, int]]) -> Controller:
    def seconds(attribute: str) -> int | None:
        text = machine.word(f"{base}/{attribute}")
        return -1 if text == "off" else number_of(text)

    node = machine.number(f"{base}/numa_node")
    size = machine.number(f"{base}/sqsize")
    return Controller(
        name=name,
        transport=machine.word(f"{base}/transport"),
        address=machine.word(f"{base}/address"),
        model=machine.word(f"{base}/model"),
        firmware=machine.word(f"{base}/firmware_rev"),
        pci_vendor=machine.word(f"{base}/device/vendor"),
        subsysnqn=machine.word(f"{base}/subsysnqn"),
        hostnqn=machine.word(f"{base}/hostnqn"),
        hostid=machine.word(f"{base}/hostid"),
        cntlid=machine.number(f"{base}/cntlid"),
        state=machine.word(f"{base}/state"),
        queues=machine.number(f"{base}/queue_count"),
        # As the kernel keeps it, one less.
        queue_size=size + 1 if size is not None else None,
        keep_alive_s=machine.number(f"{base}/kato"),
        ctrl_loss_s=seconds("ctrl_loss_tmo"),
        reconnect_delay_s=seconds("reconnect_delay"),
        fast_io_fail_s=seconds("fast_io_fail_tmo"),
        numa_node=node if node is not None and node >= 0 else None,
        authenticates=machine.is_set(f"{base}/dhchap_secret"),
        encrypted=machine.is_set(f"{base}/tls_key"),
        reconnects=machine.number(f"{base}/diag/reconnect_count"),
        resets=machine.number(f"{base}/diag/reset_count"),
        discovery=machine.word(f"{base}/cntrltype") == "discovery",
        interrupts=interrupts_of(machine, f"{base}/device", table),
    )


def _subsystems(machine: Machine) -> list[Subsystem]:
    base = "/sys/class/nvme-subsystem"
    found = []
    for name in machine.names(base):
        inside = machine.names(f"{base}/{name}")
        found.append(
            Subsystem(
                name=name,
                nqn=machine.word(f"{base}/{name}/subsysnqn"),
                model=machine.word(f"{base}/{name}/model"),
                policy=machine.word(f"{base}/{name}/iopolicy"),
                controllers=tuple(one for one in inside if re.fullmatch(r"nvme\d{1,6}", one)),
            )
        )
    return found


def _namespaces(machine: Machine, controllers: list[str]) -> list[Namespace]:
    #: Per controller, what hangs from it.
    below = {name: machine.names(f"/sys/class/nvme/{name}") for name in controllers}
    found = []
    for disk in machine.names("/sys/block"):
        match = re.fullmatch(r"nvme(\d{1,6})n(\d{1,6})", disk)
        if match is None:
            continue
        hidden = re.compile(rf"nvme{match[1]}c\d{{1,6}}n{match[2]}")
        paths = [
            Path(controller=name, ana=machine.word(f"/sys/class/nvme/{name}/{one}/ana_state"))
            for name, inside in below.items()
            for one in inside
            if hidden.fullmatch(one)
        ]
        multipath = bool(paths)
        if not paths:
            paths = [Path(controller=name, ana=None) for name, inside in below.items() if disk in inside]
        found.append(
            Namespace(name=disk, multipath=multipath, paths=tuple(paths), wwid=machine.word(f"/sys/block/{disk}/wwid"))
        )
    return found
