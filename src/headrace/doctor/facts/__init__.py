"""What a machine shows, one file a domain. Facts are read once; checks look at nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.doctor.facts.block import Disk, read_disks
from headrace.doctor.facts.gpu import Gpus, read_gpus
from headrace.doctor.facts.host import Host, read_host, read_nodes
from headrace.doctor.facts.limits import Limits, read_limits
from headrace.doctor.facts.lustre import LustreClient, read_lustre
from headrace.doctor.facts.mounts import Mount, read_mounts
from headrace.doctor.facts.network import Network, read_network
from headrace.doctor.facts.nvme import Nvme, read_nvme
from headrace.doctor.facts.rdma import Rdma, read_rdma
from headrace.doctor.machine import Machine, number_of


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All of it. What a field has `None` for is not known, never "no"."""

    host: Host
    nvme: Nvme
    disks: tuple[Disk, ...]
    mounts: tuple[Mount, ...]
    network: Network
    rdma: Rdma
    limits: Limits
    gpus: Gpus
    lustre: tuple[LustreClient, ...]
    #: By processor the NUMA node that it is on.
    nodes: Mapping[int, int]

    def disk(self, name: str) -> Disk | None:
        return next((disk for disk in self.disks if disk.name == name), None)

    def disk_of_number(self, number: str) -> Disk | None:
        """The disk that has this number, or of which a partition has it."""
        for disk in self.disks:
            if disk.number == number or any(number == other for _, other in disk.partitions):
                return disk
        return None


def gather(machine: Machine) -> Facts:
    """Everything that the machine shows. Whatever it shows, this returns: what makes no sense is not known."""
    nvme = read_nvme(machine)
    ports = [number_of(controller.part("trsvcid")) for controller in nvme.controllers]
    return Facts(
        host=read_host(machine),
        nvme=nvme,
        disks=read_disks(machine),
        mounts=read_mounts(machine),
        network=read_network(machine, [port for port in ports if port is not None and 0 < port < 65536]),
        rdma=read_rdma(machine),
        limits=read_limits(machine),
        gpus=read_gpus(machine),
        lustre=read_lustre(machine),
        nodes=read_nodes(machine),
    )
