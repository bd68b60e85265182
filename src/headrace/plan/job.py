"""What a job says of itself, out of a TOML file and options, checked key by key; and what is assumed where it says
nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.fabric.file import read_plain_file, read_toml
from headrace.fabric.table import Table
from headrace.plan.fields import BY_KEY, FIELDS, Field
from headrace.plan.quantities import ASSUMED, GIVEN, Range
from headrace.plan.units import KINDS, SECONDS, parse_one

#: A job is a page; a catalogue or a model's config some more.
MAX_BYTES = 1 << 20

Value = Range | tuple[str, ...] | str | bool


class Job:
    """Values by key (`feed.tokens_per_s`). Keys are those of `headrace.plan.fields`; another one is a defect."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)

    def has(self, *keys: str) -> bool:
        """Whether the job says all of these itself."""
        return all(BY_KEY[key].key in self._values for key in keys)

    def given(self) -> dict[str, Value]:
        return dict(self._values)

    def range(self, key: str) -> Range | None:
        """What is given, else what is assumed, else None."""
        value = self._value(key)
        assert value is None or isinstance(value, Range)
        return value

    def need(self, key: str) -> Range:
        value = self.range(key)
        if value is None:
            raise UsageError(f"{key} is missing", expected=BY_KEY[key].about, next_step=f"give {_option(key)}")
        return value

    def whole(self, key: str) -> int:
        return round(self.need(key).likely)

    def text(self, key: str) -> str | None:
        value = self._value(key)
        assert value is None or isinstance(value, str)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._value(key)
        assert isinstance(value, tuple)
        return value

    def flag(self, key: str) -> bool:
        return bool(self._values.get(key, False))

    def _value(self, key: str) -> Value | None:
        field = BY_KEY[key]
        if key in self._values:
            return self._values[key]
        return None if field.default is None else _value(field, field.default, ASSUMED, field.source)

    def assumed(self, keys: Iterable[str]) -> list[tuple[str, Value, str]]:
        """Of these keys those that were not said: key, value, source."""
        found = [(key, self._value(key), BY_KEY[key].source) for key in keys if key not in self._values]
        return [(key, value, source) for key, value, source in found if value is not None]


def _option(key: str) -> str:
    name = key.rpartition(".")[2]
    option = f"--{name}" if key in ("gpus", "model.parameters") else f"--set {key}=..."
    return f"{option}, or {name} in the job's file"


def read_job(file: str | Path | None = None, options: Mapping[str, Any] | None = None) -> Job:
    """Out of a file and of options `{"feed.tokens_per_s": "14451"}`, which go before it. UsageError for any mistake."""
    values: dict[str, Value] = {}
    if file is not None:
        values |= read_table(Table(load_toml(file), file=str(file)))
        config = values.get("model.config")
        if isinstance(config, str):
            # Relative to the file that names it, as everywhere in files.
            values["model.config"] = str(Path(file).parent / config)
    for key, value in (options or {}).items():
        if key not in BY_KEY:
            Table({key: value}, file="the options").only(*BY_KEY)
        values[key] = _checked(Table({key: value}, file="the options"), key, BY_KEY[key])
    return Job(values)


def load_toml(path: str | Path) -> dict[str, Any]:
    """A page of TOML. UsageError says what is wrong with it."""
    return read_toml(read_bounded(path), where=str(path), next_step="see headrace plan --example")


def read_bounded(path: str | Path) -> bytes:
    return read_plain_file(path, most_bytes=MAX_BYTES)


def read_table(top: Table) -> dict[str, Value]:
    sections: dict[str, list[str]] = {}
    for field in FIELDS:
        section, _, name = field.key.rpartition(".")
        sections.setdefault(section, []).append(name)
    top.only(*sections.pop(""), *sections)
    values: dict[str, Value] = {}
    for field in FIELDS:
        section, _, name = field.key.rpartition(".")
        table = top.table(section) if section else top
        if table is None:
            continue
        if section:
            table.only(*sections[section])
        if name in table.keys:
            values[field.key] = _checked(table, name, field)
    return values


def _checked(table: Table, name: str, field: Field) -> Value:
    raw = table.value(name)
    try:
        return _value(field, raw, GIVEN, "")
    except ValueError as error:
        raise table.error(name, expected=str(error).removeprefix("expected "), found=table.shown(name)) from None


def _value(field: Field, raw: Any, origin: str, source: str) -> Value:
    """ValueError says what was expected."""
    if field.kind == "flag":
        if isinstance(raw, bool):
            return raw
        if raw in ("true", "false"):
            return bool(raw == "true")
        raise ValueError("expected true or false")
    if field.kind in ("text", "file"):
        if not isinstance(raw, str) or not raw or len(raw) > 4096 or not raw.isprintable():
            raise ValueError("expected a text")
        return raw
    if field.kind == "choice":
        if raw not in field.choices:
            raise ValueError(f"expected {' or '.join(field.choices)}")
        return str(raw)
    if field.kind == "choices":
        words = raw.replace(",", " ").split() if isinstance(raw, str) else raw
        if not isinstance(words, list) or len(words) > 16 or any(word not in field.choices for word in words):
            raise ValueError(f"expected at most 16 of {', '.join(field.choices)}")
        return tuple(words)
    return _range(field, raw, origin, source)


def _range(field: Field, raw: Any, origin: str, source: str) -> Range:
    parts = raw.split("..") if isinstance(raw, str) and ".." in raw else raw if isinstance(raw, list) else [raw]
    if not 1 <= len(parts) <= 3:
        raise ValueError("expected a figure, or low..high, or low..likely..high")
    figures = [_figure(field, part) for part in parts]
    if len(figures) == 2:
        figures.insert(1, (figures[0] + figures[1]) / 2)
    low, likely, high = figures * 3 if len(figures) == 1 else figures
    if not low <= likely <= high:
        raise ValueError("expected low, likely and high in this order")
    return Range(low, likely, high, field.unit, origin, source)


def _figure(field: Field, raw: Any) -> float:
    whole = field.kind == "whole"
    kind = "count" if whole else field.kind
    example = KINDS[kind][1]
    bounds = f"{field.low:g} to {field.high:g}" + ("" if field.factor == 1 else f", {field.about}")
    if field.unit is SECONDS:
        bounds += " seconds"
    wanted = f"expected {'a whole number' if whole else f'a figure such as {example},'} from {bounds}"
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError(wanted)
    if isinstance(raw, str):
        try:
            value = parse_one(raw, kind)
        except ValueError:
            raise ValueError(wanted) from None
    elif not field.low <= raw * 1 <= field.high:  # Also of a whole number that no float can hold, and of a NaN.
        raise ValueError(wanted)
    else:
        value = float(raw)
    if not field.low <= value <= field.high or (whole and value != int(value)):
        raise ValueError(wanted)
    return value * field.factor
