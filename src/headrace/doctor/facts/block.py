"""Disks of the kernel: what is behind each, and how it is asked."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.doctor.machine import Machine, number_of

#: Most disks that are looked at.
DISKS_MAX = 512


@dataclass(frozen=True, kw_only=True)
class Disk:
    """`/dev/NAME`. Sizes in the units that the kernel's names say; `None`: it does not say."""

    name: str
    #: Major and minor number, as `259:0`; and those of its partitions.
    number: str | None
    partitions: tuple[tuple[str, str], ...]
    size_bytes: int | None
    #: Of the kernel's tree, as `/sys/devices/pci0000:00/...`.
    place: str
    vendor: str | None
    model: str | None
    read_only: bool
    rotational: bool | None
    #: What this is made of, as `dm-0` of `sda`.
    below: tuple[str, ...]
    #: The file behind a loop device.
    backing: str | None
    #: Of device-mapper: its name, and what it is ("mpath-...", "LVM-...", "CRYPT-...").
    mapped: str | None
    mapped_as: str | None
    scheduler: str | None
    read_ahead_kb: int | None
    requests: int | None
    max_sectors_kb: int | None
    max_hw_sectors_kb: int | None
    logical_block_bytes: int | None
    #: "write back" or "write through".
    write_cache: str | None
    io_timeout_ms: int | None
    discard_max_bytes: int | None


def read_disks(machine: Machine) -> tuple[Disk, ...]:
    names = [name for name in machine.names("/sys/block") if not re.fullmatch(r"nvme\d+c\d+n\d+", name)]
    disks = (_disk(machine, name) for name in names[:DISKS_MAX])
    # Loop and memory devices that nobody uses.
    return tuple(disk for disk in disks if disk.size_bytes != 0 or not re.match(r"(loop|ram|zram|nbd|md)\d", disk.name))


def _disk(machine: Machine, name: str) -> Disk:
    base = f"/sys/block/{name}"
    size = machine.number(f"{base}/size")
    inside = machine.names(base)
    parts = [one for one in inside if one.startswith(name) and machine.exists(f"{base}/{one}/partition")]
    chosen = re.search(r"\[([\w-]+)\]", machine.text(f"{base}/queue/scheduler") or "")
    rotational = machine.number(f"{base}/queue/rotational")
    return Disk(
        name=name,
        number=machine.word(f"{base}/dev"),
        partitions=tuple((one, machine.word(f"{base}/{one}/dev") or "") for one in parts),
        # In units of 512 bytes, whatever the logical block is.
        size_bytes=size * 512 if size is not None and size >= 0 else None,
        place=machine.real(base) or "",
        vendor=machine.word(f"{base}/device/vendor"),
        model=machine.word(f"{base}/device/model"),
        read_only=machine.number(f"{base}/ro") == 1,
        rotational=None if rotational is None else rotational == 1,
        below=tuple(machine.names(f"{base}/slaves")),
        backing=machine.word(f"{base}/loop/backing_file", most=4096),
        mapped=machine.word(f"{base}/dm/name"),
        mapped_as=machine.word(f"{base}/dm/uuid"),
        scheduler=chosen[1] if chosen else machine.word(f"{base}/queue/scheduler"),
        read_ahead_kb=machine.number(f"{base}/queue/read_ahead_kb"),
        requests=machine.number(f"{base}/queue/nr_requests"),
        max_sectors_kb=machine.number(f"{base}/queue/max_sectors_kb"),
        max_hw_sectors_kb=machine.number(f"{base}/queue/max_hw_sectors_kb"),
        logical_block_bytes=machine.number(f"{base}/queue/logical_block_size"),
        write_cache=machine.word(f"{base}/queue/write_cache"),
        io_timeout_ms=number_of(machine.word(f"{base}/queue/io_timeout")),
        discard_max_bytes=machine.number(f"{base}/queue/discard_max_bytes"),
    )
