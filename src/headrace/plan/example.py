"""A job file to begin with: every key, what it means, and what is assumed without it."""

from __future__ import annotations

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
