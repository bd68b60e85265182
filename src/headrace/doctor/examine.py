"""One examination: gather, judge, measure, check."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from headrace.doctor.checks import check_all, sort
from headrace.doctor.checks.gpu import direct_state
from headrace.doctor.checks.measured import check_measured
from headrace.doctor.facts import Facts, gather
from headrace.doctor.finding import ERROR, WARNING, Finding
from headrace.doctor.machine import Machine
from headrace.doctor.probe import TargetProbe, probe_target, verdict_of_target
from headrace.doctor.rate import Rate, rate_apart, rate_of_target
from headrace.doctor.storage import Storage, all_storage, named_storage
from headrace.doctor.touch import Touch, touch

_AT_ONCE = 8
#: Most disks and file systems that are touched.
_TOUCHED_MAX = 64
#: What files that only root may read would tell.
_ROOT = {
    "/sys/class/dmi/id/product_uuid": "whether the host's name in /etc/nvme was made for this machine",
    "/etc/nvme/hostnqn": "this host's name",
    "/etc/nvme/hostid": "this host's identifier",
}


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What came of it."""

    facts: Facts
    storage: tuple[Storage, ...]
    #: The worst first.
    findings: tuple[Finding, ...]
    targets: tuple[TargetProbe, ...]
    touches: tuple[Touch, ...]
    #: Nothing was measured: a recorded machine, or that was asked for.
    measured: bool
    #: Of the storage that was to be loaded (`load`); `None`: none was.
    rate: Rate | None = None
    #: What could not be looked at, and what would show it.
    unseen: tuple[str, ...]

    def count(self, severity: str) -> int:
        return sum(one.severity == severity for one in self.findings)

    @property
    def sentence(self) -> str:
        errors, warnings = self.count(ERROR), self.count(WARNING)
        if not self.storage:
            begin = "No storage is to be seen here"
        else:
            words = [one.verdict.word for one in self.storage]
            kinds = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
            begin = f"Storage: {kinds}"
        if not errors and not warnings:
            return f"{begin}. Nothing is wrong with what was looked at."
        said = [_plural(errors, "error")] if errors else []
        said += [_plural(warnings, "warning")] if warnings else []
        return f"{begin}. {' and '.join(said)}; the first: {self.findings[0].title}."

    def to_json(self) -> dict[str, Any]:
        """One object: all facts, verdicts, findings and measurements. Fields that are null are not known."""
        return {
            "headrace": version("headrace"),
            "sentence": self.sentence,
            "storage": [
                {
                    "name": one.name,
                    "kind": one.kind,
                    "verdict": one.verdict.word,
                    "why": one.verdict.why,
                    "ephemeral": one.verdict.ephemeral,
                    "mounted": list(one.mounted),
                    "size_bytes": one.size_bytes,
                    "parts": sorted(one.parts),
                }
                for one in self.storage
            ],
            "findings": [dataclasses.asdict(one) for one in self.findings],
            "targets": [dataclasses.asdict(one) for one in self.targets],
            "touches": [dataclasses.asdict(one) for one in self.touches],
            "measured": self.measured,
            "rate": None if self.rate is None else dataclasses.asdict(self.rate),
            "unseen": list(self.unseen),
            "gpudirect": direct_state(self.facts.gpus.direct),
            "facts": plain(dataclasses.asdict(self.facts)),
        }


def examine(
    machine: Machine, names: Sequence[str] = (), *, measure: bool = True, tell: Callable[[str], None] = lambda _: None,
    load: Callable[[Facts, Sequence[Storage]], Storage] | None = None,
) -> Examination:  # fmt: skip
    """Look at the machine, and at the storage that is named, or all that there is; `measure`: at a live one also by
    connecting to targets that are named, reading from disks, and asking file systems. `tell`: what is being done.
    `load`: chooses a piece of storage, from which as much is read for some seconds as it gives.

    UsageError where a name means nothing here, and as `load` raises it. What the machine shows never raises.
    """
    tell("looking at the machine")
    facts = gather(machine)
    storage = named_storage(machine, facts, names) if names else all_storage(facts)
    measure = measure and machine.live
    chosen = load(facts, storage) if load is not None else None
    targets, touches = _measure(facts, storage, tell) if measure else ([], [])
    seen = {one.uri: verdict_of_target(one) for one in targets}
    storage = [dataclasses.replace(one, verdict=seen.get(one.name, one.verdict)) for one in storage]
    rate = None
    if chosen is not None and measure:
        tell(f"reading from {chosen.name} for some seconds")
        rate = _rate(chosen)
    findings = check_all(facts, storage, everything=not names)
    findings += check_measured(targets, touches)
    return Examination(
        facts=facts,
        storage=tuple(storage),
        findings=tuple(sort(findings)),
        targets=tuple(targets),
        touches=tuple(touches),
        measured=measure,
        rate=rate,
        unseen=tuple(_unseen(machine, facts, touches)),
    )


def _measure(
    facts: Facts, storage: Sequence[Storage], tell: Callable[[str], None]
) -> tuple[list[TargetProbe], list[Touch]]:
    targets = []
    for one in storage:
        if one.address is not None:
            tell(f"connecting to {', '.join(map(str, one.address.portals))}")
            targets.append(probe_target(one.address))
    wanted: dict[tuple[str, str], None] = {}
    waiting = {one.name for one in facts.nvme.controllers if one.state != "live"}
    for one in storage:
        # A disk that waits for its target would keep whoever reads it.
        if one.kind == "disk" and not (waiting & one.parts):
            wanted[("disk", one.name)] = None
        for point in one.mounted:
            if not (waiting & one.parts):
                wanted[("mount", point)] = None
    if wanted:
        tell(f"touching {len(wanted)} disks and file systems")
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        touches = list(pool.map(lambda one: touch(*one), list(wanted)[:_TOUCHED_MAX]))
    touches += [Touch(kind=kind, path=path, outcome="left out") for kind, path in list(wanted)[_TOUCHED_MAX:]]
    return targets, touches


def _rate(one: Storage) -> Rate:
    if one.address is not None:
        return rate_of_target(one.address)
    if one.kind == "disk":
        return rate_apart(one.name, "disk", one.name)
    if one.kind == "mount":
        return rate_apart(one.name, "files", one.path or one.name)
    return Rate(name=one.name, error="memory of a process, which has none to read from")


def _unseen(machine: Machine, facts: Facts, touches: Sequence[Touch]) -> list[str]:
    found = [f"{tells} ({path})" for path, tells in _ROOT.items() if path in machine.denied]
    other = sorted(machine.denied - set(_ROOT))
    if other:
        found.append(f"{', '.join(other[:4])}" + (f" and {len(other) - 4} more" if len(other) > 4 else ""))
    denied = [one.path for one in touches if one.outcome == "denied"]
    if denied:
        found.append(f"how fast {', '.join(denied[:8])} answers: no right to read it")
    said = [f"with root: {one}" for one in found] if not facts.host.root else found
    said += [
        f"how fast {one.path} answers: {one.error}"
        for one in touches
        if one.outcome == "not asked" or (one.kind == "disk" and one.outcome == "failed" and one.latency is None)
    ]
    said += [f"what `{name}` prints: it did not end" for name in sorted(machine.endless)]
    if facts.network.flows is None and "ss" not in machine.endless:
        said.append("with `ss` (iproute2): what TCP counts for each connection of storage")
    hard = [one for one in facts.network.interfaces if one.driver]
    if hard and all(one.offloads is None for one in hard) and "ethtool" not in machine.endless:
        said.append("with `ethtool`: what the network cards do by themselves")
    return said


def plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in value]
    if isinstance(value, ipaddress.IPv4Network | ipaddress.IPv6Network):
        return str(value)
    return value


def _plural(count: int, name: str) -> str:
    return f"{count} {name}{'s' if count != 1 else ''}"
