"""What is wrong, or worth knowing: one finding."""

from __future__ import annotations

from dataclasses import dataclass

#: Data, or the run, are in danger, or nothing works; something costs much or will bite; worth knowing.
ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)

#: What findings are about that belong to no device.
MACHINE = "machine"


@dataclass(frozen=True, kw_only=True)
class Finding:
    #: Stays the same over time, as `nvme-state`: what scripts look for.
    id: str
    severity: str
    #: Names of disks, controllers, interfaces, mounts, targets, or `MACHINE`.
    about: tuple[str, ...]
    title: str
    #: What was seen, where.
    evidence: str
    why: str
    what_to_do: str
    #: For a shell; `None` where there is none to give. None of them is run.
    command: str | None = None

    def __post_init__(self) -> None:
        assert self.severity in SEVERITIES and self.about, self.id
