"""Which processors the interrupts of network cards and NVMe drives come to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.doctor.machine import Machine

#: Of a machine of 512 processors and 2000 vectors.
_TABLE_MAX_BYTES = 32 << 20
_VECTORS_MAX = 4096
_BUSY = 100


@dataclass(frozen=True, kw_only=True)
class Interrupts:
    """Of one device, since they were set up."""

    #: Vectors to which more than a hundredth of all came: each is of a queue. One connection keeps one busy.
    vectors: int
    #: By processor; those without any are left out.
    by_cpu: Mapping[int, int]
    #: The same without those of the busiest vector: one connection keeps one vector busy, and says nothing of others.
    beside: Mapping[int, int]

    @property
    def count(self) -> int:
        return sum(self.by_cpu.values())

    @property
    def busiest(self) -> tuple[int, float]:
        """The processor that most come to, and its share."""
        cpu = max(self.by_cpu, key=lambda one: self.by_cpu[one])
        return cpu, self.by_cpu[cpu] / self.count


def read_table(machine: Machine) -> dict[int, dict[int, int]]:
    """`/proc/interrupts`: by vector and processor, zeros left out."""
    lines = (machine.text("/proc/interrupts", most=_TABLE_MAX_BYTES) or "").splitlines()[: _VECTORS_MAX + 1]
    cpus = [int(name) for name in re.findall(r"CPU(\d{1,5})", lines[0])] if lines else []
    found: dict[int, dict[int, int]] = {}
    for line in lines[1:]:
        number, colon, rest = line.partition(":")
        counts = rest.split()[: len(cpus)]
        if colon and re.fullmatch(r"\s*\d{1,6}", number) and all(re.fullmatch(r"\d{1,20}", one) for one in counts):
            found[int(number)] = {cpu: int(one) for cpu, one in zip(cpus, counts, strict=False) if int(one)}
    return found


def interrupts_of(machine: Machine, device: str, table: Mapping[int, Mapping[int, int]]) -> Interrupts | None:
    """`device`: its folder in sysfs; of virtio the PCI function above it is asked. `None`: it shows none."""
    vectors: list[int] = []
    for folder in (f"{device}/msi_irqs", f"{device}/../msi_irqs"):
        # Each is looked at, so that a record has them.
        vectors = [
            int(one) for one in machine.names(folder)[:_VECTORS_MAX]
            if re.fullmatch(r"\d{1,6}", one) and machine.exists(f"{folder}/{one}")
        ]  # fmt: skip
        if vectors:
            break
    counts = {vector: table.get(vector, {}) for vector in vectors}
    order = sorted(vectors, key=lambda vector: sum(counts[vector].values()), reverse=True)
    by_cpu, beside = _added(counts.values()), _added(counts[vector] for vector in order[1:])
    whole = sum(by_cpu.values())
    busy = [vector for vector in vectors if sum(counts[vector].values()) * _BUSY > whole]
    return Interrupts(vectors=len(busy), by_cpu=by_cpu, beside=beside) if whole else None


def _added(counts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for each in counts:
        for cpu, count in each.items():
            found[cpu] = found.get(cpu, 0) + count
    return found
