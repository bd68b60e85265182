"""A job file to begin with: every key, what it means, and what is assumed without it."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.plan.fields import FIELDS, Field

_HEAD = """\
# A job, for `headrace plan --job FILE`. Every key but gpus and the model's size may be left out.
# A figure may be a range: "1GB/s..2GB/s" or "1GB/s..1.2GB/s..2GB/s" (low, likely, high), or a list of these.
"""
_FILLED = {"gpus": "64", "model.parameters": '"8.03B"'}
_TITLES = {
    "model": "the model", "parallel": "how it is split", "feed": "what training eats", "checkpoint": "how it is saved",
    "failures": "how it fails", "goals": "what is good enough", "storage": "what is there", "network": "the network",
    "price": "money; prices are yours",
}  # fmt: skip
_SAMPLES = {
    "bytes": '"100GB"', "rate": '"10GB/s"', "count": '"1.5e9"', "duration": '"30min"', "flops": '"400TFLOP/s"',
    "number": "1.5", "whole": "8", "share": '"1%"', "flag": "true", "file": '"config.json"',
}  # fmt: skip


def example() -> str:
    lines = [_HEAD]
    section = ""
    for field in FIELDS:
        room, _, name = field.key.rpartition(".")
        if room != section:
            lines.append(f"\n[{room}]  # {_TITLES[room]}")
            section = room
        value = _FILLED.get(field.key)
        source = f" [{field.source}]" if field.source else ""
        lines.append(f"# {field.about}{source}")
        lines.append(f"{'' if value else '# '}{name} = {value or _value(field)}")
    return "\n".join(lines) + "\n"


def _value(field: Field) -> str:
    if field.kind == "choice":
        return f'"{field.default}"' + f"  # {', '.join(field.choices)}"
    if field.kind == "choices":
        return str((field.default or "").split()).replace("'", '"') + f"  # of {', '.join(field.choices)}"
    if field.default is None:
        return _SAMPLES[field.kind]
    return field.default if field.kind in ("whole", "number") and ".." not in field.default else f'"{field.default}"'


def example_catalogue() -> str:
    """A file of claims with every key: what is commented out may be left out."""
    from headrace.plan.catalogue import BOUNDS, GRADES, KINDS, PERS, SEEN, TRANSPORTS, UNITS, WHATS

    def words(choices: Iterable[str]) -> str:
        return ", ".join(choices)

    return f"""\
# What somebody claims of storage, for headrace: save it as ~/.config/headrace/providers/NAME.toml, or give it as
# --catalogue FILE. One [[offering]] for each thing that is offered, one [[offering.claim]] below it for each figure.

[[offering]]
# Short names of a-z, 0-9, dots and hyphens; together they are what --provider and --expect take: ours/array.
provider = "ours"
name = "array"
# title = "The array in row 4"
# {words(KINDS)}.
kind = "block"
# One or a list of {words(TRANSPORTS)}.
transport = "nvme-tcp"
# As `headrace doctor` calls it on a node: {words(SEEN)}. [default: unknown]
seen = "fabric-visible"
# Where it is said, when (a year, with a month and a day where they are known, or "unknown"), and by whom:
# {words(GRADES)} (of a blog: shown, never put into a plan).
source = "acceptance test"
date = "2026-11-12"
grade = "measured"
# note = "two controllers, 16 drives"

[[offering.claim]]
# {words(WHATS)}. Throughput is reads and writes alike.
what = "read"
# One of these, or both for a range, in this unit: {words(UNITS)}.
low = 40
# high = 48
unit = "GB/s"
# {words(BOUNDS)} ("at most" has high alone; tiers: the lowest and the highest that can be bought).
bound = "at least"
# For what: {words(per for per in PERS if per)}. [default: all of the offering together]
# per = "node"
# source, date, grade and note of its own, where they are not those of the offering.

[[offering.claim]]
what = "capacity"
low = 200
unit = "TB"
bound = "exactly"
"""
