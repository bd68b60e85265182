"""Reports of several nodes beside each other: what should differ and does not, and what should not and does."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.doctor.checks import sort
from headrace.doctor.checks.identity import NEW_PAIR
from headrace.doctor.examine import Examination
from headrace.doctor.facts.nvme import FABRICS
from headrace.doctor.finding import ERROR, MACHINE, NOTE, WARNING, Finding
from headrace.errors import UsageError
from headrace.fabric.file import read_plain_file

#: Of one report.
_MAX_BYTES = 16 << 20
#: Of a value, characters.
_SHOWN = 120


def read_reports(files: Sequence[Path]) -> list[tuple[str, dict[str, Any]]]:
    """(name, what `headrace doctor --json` printed) each. UsageError."""
    found = []
    for file in files:
        raw = read_plain_file(file, most_bytes=_MAX_BYTES)
        try:
            said = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                "not a report", where=str(file), expected="what `headrace doctor --json` printed", found=str(error)
            ) from None
        if not isinstance(said, dict) or not isinstance(said.get("facts"), dict):
            raise UsageError("not a report", where=str(file), expected="what `headrace doctor --json` printed")
        found.append((_shown(file.stem), said))
    return found


def check_nodes(found: Examination, others: Sequence[tuple[str, dict[str, Any]]]) -> Examination:
    """With findings about what several nodes have in common, or not."""
    if not others:
        return found
    nodes = [("this node", found.to_json()), *others]
    more = [*_clones(nodes), *_different(nodes)]
    return replace(found, findings=tuple(sort([*found.findings, *more])))


def _clones(nodes: Sequence[tuple[str, dict[str, Any]]]) -> list[Finding]:
    findings = []
    for field, name in (("hostid", "host identifier"), ("hostnqn", "host name")):
        by_value: dict[str, list[str]] = defaultdict(list)
        for node, said in nodes:
            value = _at(said, "facts", "host", "identity", field)
            if isinstance(value, str):
                by_value[value.lower()].append(node)
        for same in by_value.values():
            if len(same) > 1:
                findings.append(
                    Finding(
                        id="nodes-cloned",
                        severity=ERROR,
                        about=(MACHINE,),
                        title=f"{len(same)} nodes have one {name}",
                        evidence=f"/etc/nvme/{field} is the same on {', '.join(same[:8])}",
                        why="to a target they are one host: each shares the other's reservations, and a new connection "
                        "of one may end the other's",
                        what_to_do="make a new pair on each node at its first start, none in the image, and allow it "
                        "on the targets",
                        command=NEW_PAIR,
                    )
                )
    return findings


def _different(nodes: Sequence[tuple[str, dict[str, Any]]]) -> list[Finding]:
    findings = []
    compared: tuple[tuple[str, str, Callable[[dict[str, Any]], object]], ...] = (
        (WARNING, "MTU of interfaces that carry storage", _mtus),
        (NOTE, "kernel", lambda said: _at(said, "facts", "host", "kernel")),
        (NOTE, "driver of the GPUs", lambda said: _at(said, "facts", "gpus", "driver")),
        (NOTE, "ctrl_loss_tmo of NVMe controllers", lambda said: _controllers(said, "ctrl_loss_s")),
    )
    for severity, name, value in compared:
        by_value: dict[str, list[str]] = defaultdict(list)
        for node, said in nodes:
            seen = value(said)
            if seen not in (None, ""):
                by_value[_shown(seen)].append(node)
        if len(by_value) > 1:
            findings.append(
                Finding(
                    id="nodes-differ",
                    severity=severity,
                    about=(MACHINE,),
                    title=f"nodes differ: {name}",
                    evidence="; ".join(f"{seen}: {', '.join(who[:8])}" for seen, who in list(by_value.items())[:8]),
                    why="the slowest node is the speed of the job; what holds on one says nothing of the other",
                    what_to_do="make them the same",
                )
            )
    return findings


def _mtus(said: dict[str, Any]) -> str:
    storage = said.get("storage")
    lists = [one.get("parts") for one in storage if isinstance(one, dict)] if isinstance(storage, list) else []
    parts = {part for one in lists if isinstance(one, list) for part in one if isinstance(part, str)}
    interfaces = _at(said, "facts", "network", "interfaces")
    if not isinstance(interfaces, list):
        return ""
    mtus = {
        str(one.get("mtu")) for one in interfaces
        if isinstance(one, dict) and str(one.get("name")) in parts - {"lo"} and one.get("mtu")
    }  # fmt: skip
    return ", ".join(sorted(mtus))


def _controllers(said: dict[str, Any], field: str) -> str:
    controllers = _at(said, "facts", "nvme", "controllers")
    if not isinstance(controllers, list):
        return ""
    values = {
        str(one[field]) for one in controllers
        if isinstance(one, dict) and one.get("transport") in FABRICS and one.get(field) is not None
    }  # fmt: skip
    return ", ".join(sorted(values))


def _shown(value: object) -> str:
    """What another node's file says goes to this terminal."""
    return "".join(one if one.isprintable() else "\ufffd" for one in str(value)[:_SHOWN])


def _at(said: Any, *keys: str) -> Any:
    for key in keys:
        said = said.get(key) if isinstance(said, dict) else None
    return said
