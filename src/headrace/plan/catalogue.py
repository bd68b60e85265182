"""What providers claim: every claim with its source, date and grade. A data file, and files of users beside it.

A claim is a statement of somebody about a figure, and never a measurement here. Grades, from the best:

    measured        by a user of it, who says how
    contract        promised, with a consequence
    documentation   read in a provider's own documentation
    marketing       a provider's own word elsewhere
    blog            of somebody else; shown, never put into a plan
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.fabric.table import Table
from headrace.plan import units
from headrace.plan.job import load_toml
from headrace.plan.quantities import CLAIMED, Range

GRADES = ("measured", "contract", "documentation", "marketing", "blog")
KINDS = ("block", "file system", "object", "local")
#: How a guest sees it, in the words of `headrace doctor`.
SEEN = ("fabric-visible", "hypervisor-presented", "local", "network file system", "unknown")
TRANSPORTS = ("nvme-tcp", "nvme-rdma", "pcie", "iscsi", "virtio", "lustre", "nfs", "moosefs", "weka", "http", "unknown")
WHATS = ("throughput", "read", "write", "iops", "capacity", "network", "price", "gpu hour")
#: What a figure is for; "" is all of the offering together.
PERS = ("", "gpu", "node", "device", "volume", "instance", "TiB", "MiB/s", "GiB month", "GB month", "month")
#: "tiers": from the lowest to the highest that can be bought.
BOUNDS = ("exactly", "about", "at least", "at most", "tiers")

#: Unit of a claim -> (factor, what it then is).
UNITS = {
    "MB/s": (1e6, "B/s"),
    "GB/s": (1e9, "B/s"),
    "MiB/s": (2.0**20, "B/s"),
    "GiB/s": (2.0**30, "B/s"),
    "Gbit/s": (1e9 / 8, "B/s"),
    "IOPS": (1.0, "IOPS"),
    "USD": (1.0, "USD"),
    "EUR": (1.0, "EUR"),
    "TB": (1e12, "B"),
    "PiB": (2.0**50, "B"),
    "TiB": (2.0**40, "B"),
}
#: Entries older than this are marked.
STALE_DAYS = 365

_OFFERING_KEYS = ("provider", "name", "title", "kind", "transport", "seen", "source", "date", "grade", "note", "claim")
_CLAIM_KEYS = ("what", "low", "high", "unit", "per", "bound", "source", "date", "grade", "note")
_DATE = re.compile(r"(\d{4})(?:-(\d{2})(?:-(\d{2}))?)?")
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,40}")


@dataclass(frozen=True, kw_only=True)
class Word:
    """On whose word, since when, of which grade. `date`: "2026", "2026-06" or "2026-06-30"; "unknown" where it is."""

    source: str
    date: str
    grade: str

    def age(self, today: datetime.date) -> str:
        """ "" where it is less than a year old, else a mark. A date without a day is taken for its first one."""
        if self.date == "unknown":
            return "date unknown"
        year, month, day = (int(part or 1) for part in _DATE.fullmatch(self.date).groups())  # type: ignore[union-attr]
        days = (today - datetime.date(year, month, day)).days
        return "older than a year" if days > STALE_DAYS else ""

    def to_json(self, today: datetime.date) -> dict[str, Any]:
        return {"source": self.source, "date": self.date, "grade": self.grade, "age": self.age(today) or None}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`low`, `high`: in `unit` as it was stated; None: not bounded on this side."""

    what: str
    low: float | None
    high: float | None
    unit: str
    per: str
    bound: str
    word: Word
    note: str = ""

    @property
    def base(self) -> str:
        return UNITS[self.unit][1]

    def ends(self) -> tuple[float, float]:
        """In `base`; the only one twice."""
        factor = UNITS[self.unit][0]
        low, high = self.low, self.high
        first = low if low is not None else high
        last = high if high is not None else low
        assert first is not None and last is not None
        return first * factor, last * factor

    def __str__(self) -> str:
        low, high = (None if end is None else units.significant(end, 8) for end in (self.low, self.high))
        if low is not None and high is not None and low != high:
            figure = f"{low} to {high}"
        else:
            figure = low if low is not None else str(high)
        words = {"exactly": "", "tiers": "", "about": "about ", "at least": "at least ", "at most": "at most "}
        per = f" per {self.per}" if self.per else ""
        return f"{self.what}: {words[self.bound]}{figure} {self.unit}{per}" + (f" ({self.note})" if self.note else "")

    def to_json(self, today: datetime.date) -> dict[str, Any]:
        return {
            "what": self.what, "low": self.low, "high": self.high, "unit": self.unit, "per": self.per,
            "bound": self.bound, "note": self.note, **self.word.to_json(today),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Offering:
    provider: str
    name: str
    title: str
    kind: str
    transport: tuple[str, ...]
    seen: str
    word: Word
    claims: tuple[Claim, ...]
    note: str = ""
    #: The file that it stands in.
    file: str = ""

    @property
    def key(self) -> str:
        return f"{self.provider}/{self.name}"

    def rates(
        self, way: str, *, nodes: Range, gpus: Range, capacity: Range | None, today: datetime.date | None = None
    ) -> tuple[list[Range], list[str]]:
        """Limits of "read" or "write", B/s of all nodes together, and what was left out and why.

        Tiers count by the lowest, until something else is bought. A limit ("at most") counts for itself: what it
        predicts is the best that can be.
        """
        today = today or datetime.date.today()
        found, left_out = [], []
        for claim in self.claims:
            if claim.what not in ("throughput", way):
                continue
            many = {"": 1.0, "volume": 1.0, "gpu": gpus.likely, "node": nodes.likely}.get(claim.per)
            if claim.per == "TiB" and claim.base == "B/s":
                if capacity is None:
                    raise UsageError(
                        f"{self.key} claims a rate for each TiB", expected="the size that is rented",
                        next_step="give --capacity, as 100TiB",
                    )  # fmt: skip
                many = capacity.likely / 2**40
            if claim.word.grade == "blog" or many is None or claim.base != "B/s":
                why = "of a blog" if claim.word.grade == "blog" else f"is per {claim.per}"
                left_out.append(f"left out of {self.key}: {claim}, which is {why.removeprefix('is ')}")
                continue
            low, high = claim.ends()
            marks = [claim.word.grade, claim.word.date, claim.word.age(today)]
            source = (
                f"{self.key} claims {claim} [{claim.word.source}; {', '.join(dict.fromkeys(m for m in marks if m))}]"
            )
            unit = units.RATE
            found.append(Range(low * many, low * many, high * many, unit, CLAIMED, source))
        return found, left_out

    def to_json(self, today: datetime.date) -> dict[str, Any]:
        return {
            "provider": self.provider, "name": self.name, "title": self.title, "kind": self.kind,
            "transport": list(self.transport), "seen": self.seen, "note": self.note, **self.word.to_json(today),
            "claims": [claim.to_json(today) for claim in self.claims],
        }  # fmt: skip


@dataclass(frozen=True)
class Catalogue:
    offerings: tuple[Offering, ...]

    def find(self, name: str) -> Offering:
        """By "provider/offering", or by the provider where it has one alone. UsageError names what there is."""
        matches = [one for one in self.offerings if name in (one.key, one.provider)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise UsageError(
                f"{name} offers several things", expected=f"one of {', '.join(one.key for one in matches)}"
            )  # fmt: skip
        provider, slash, _ = name.partition("/")
        offered = [one.key for one in self.offerings if one.provider == provider]
        if slash and offered:
            raise UsageError(
                f"{provider} has no such offering", expected=f"one of {', '.join(offered)}", found=repr(name)[:80]
            )
        known = sorted({one.provider for one in self.offerings})
        raise UsageError(
            "no such provider in the catalogue", expected=f"one of {', '.join(known)}, or one in a file of your own",
            found=repr(name)[:80], next_step="see headrace providers",
        )  # fmt: skip

    def filtered(self, filters: Iterable[str]) -> list[Offering]:
        """`["transport=nvme-tcp", "grade=documentation"]`: offerings for which all of these hold."""
        found = list(self.offerings)
        for text in filters:
            key, equals, value = text.partition("=")
            values = _FILTERS.get(key)
            if not equals or values is None:
                raise UsageError(
                    "--filter", expected=f"KEY=VALUE, where KEY is one of {', '.join(_FILTERS)}", found=repr(text)[:80],
                    next_step="for example provider=aws",
                )  # fmt: skip
            known = sorted({word for one in self.offerings for word in values(one)})
            if value not in known:
                raise UsageError(f"--filter {key}", expected=f"one of {', '.join(known)}", found=repr(value)[:80])
            found = [one for one in found if value in values(one)]
        return found


_FILTERS: dict[str, Any] = {
    "provider": lambda one: (one.provider,),
    "name": lambda one: (one.name,),
    "kind": lambda one: (one.kind,),
    "transport": lambda one: one.transport,
    "seen": lambda one: (one.seen,),
    "grade": lambda one: {one.word.grade, *(claim.word.grade for claim in one.claims)},
    "what": lambda one: {claim.what for claim in one.claims},
}


def load_catalogue(files: Sequence[str | Path] = ()) -> Catalogue:
    """The catalogue that comes with headrace, files of the user's folder, then `files`; a later entry of the same
    provider and name stands for the one before. UsageError for any mistake in them."""
    found: dict[str, Offering] = {}
    with resources.as_file(resources.files("headrace.plan") / "providers.toml") as built_in:
        paths = [built_in, *user_files(), *map(Path, files)]
        for path in paths:
            for offering in read_catalogue(load_toml(path), file=str(path)):
                found[offering.key] = offering
    return Catalogue(tuple(sorted(found.values(), key=lambda one: one.key)))


def user_files() -> list[Path]:
    """`*.toml` in `headrace/providers` of the user's configuration folder (`$XDG_CONFIG_HOME`, else `~/.config`)."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")  # noqa: PTH111, PTH118
    try:
        return sorted((Path(home) / "headrace" / "providers").glob("*.toml"))
    except (OSError, ValueError):
        return []


def read_catalogue(tree: Mapping[str, Any], *, file: str) -> list[Offering]:
    top = Table(tree, file=file)
    top.only("offering")
    offerings = [_offering(table) for table in top.tables("offering")]
    seen: set[str] = set()
    for index, one in enumerate(offerings):
        if one.key in seen:
            raise top.error(f"offering[{index}].name", expected="each once in a file", found=one.key)
        seen.add(one.key)
    return offerings


def _offering(table: Table) -> Offering:
    table.only(*_OFFERING_KEYS)
    for key in ("provider", "name"):
        if not _NAME.fullmatch(table.required_text(key)):
            raise table.error(key, expected="a short name of a-z, 0-9, dots and hyphens", found=table.shown(key))
    transport = table.value("transport")
    transport = [transport] if isinstance(transport, str) else transport
    if (
        not isinstance(transport, list)
        or not 1 <= len(transport) <= 8
        or any(not isinstance(word, str) or word not in TRANSPORTS for word in transport)
    ):
        expected = f"a list of {', '.join(TRANSPORTS)}"
        raise table.error("transport", expected=expected, found=table.shown("transport"))
    word = _word(table, None)
    return Offering(
        provider=table.required_text("provider"), name=table.required_text("name"),
        title=table.text("title", 200) or table.required_text("name"), kind=_choice(table, "kind", KINDS),
        transport=tuple(transport), seen=table.choice("seen", SEEN) or "unknown", word=word,
        claims=tuple(_claim(item, word) for item in table.tables("claim")), note=table.text("note", 400) or "",
        file=table.file,
    )  # fmt: skip


def _claim(table: Table, above: Word) -> Claim:
    table.only(*_CLAIM_KEYS)
    low, high = table.number("low", 0, 1e18), table.number("high", 0, 1e18)
    if low is None and high is None:
        raise table.error("low", expected="low, high, or both", found="neither")
    if low is not None and high is not None and low > high:
        raise table.error("low", expected="at most high", found=f"{low:g} and {high:g}")
    bound = _choice(table, "bound", BOUNDS)
    what, unit = _choice(table, "what", WHATS), _choice(table, "unit", tuple(UNITS))
    bases = {"iops": {"IOPS"}, "capacity": {"B"}, "price": {"USD", "EUR"}, "gpu hour": {"USD", "EUR"}}
    if UNITS[unit][1] not in bases.get(what, {"B/s"}):
        raise table.error("unit", expected=f"a unit of {what}", found=unit)
    if UNITS[unit][1] == "B/s" and not (low or high):
        raise table.error("low", expected="a rate above 0", found="0")
    if bound == "at most" and (low is not None or high is None):
        raise table.error(
            "bound", expected="high alone, for a limit", found="low, too" if low is not None else "no high"
        )
    return Claim(
        what=what, low=low, high=high, unit=unit, per=table.choice("per", PERS) or "", bound=bound,
        word=_word(table, above), note=table.text("note", 400) or "",
    )  # fmt: skip


def _word(table: Table, above: Word | None) -> Word:
    """Source, date and grade; a claim that names none has those of its offering."""
    source, date = table.text("source", 400), _date(table)
    grade = table.choice("grade", GRADES)
    if above is None and (source is None or date is None or grade is None):
        missing = next(key for key in ("source", "date", "grade") if table.value(key) is None)
        raise table.error(missing, expected='one for every entry; for a date that nobody knows "unknown"', found="none")
    if date is not None and date != "unknown":
        found = _DATE.fullmatch(date)
        try:
            year, month, day = (int(part or 1) for part in found.groups()) if found else (0, 0, 0)
            datetime.date(year, month, day)
        except ValueError:
            raise table.error("date", expected='YYYY, YYYY-MM, YYYY-MM-DD or "unknown"', found=repr(date)) from None
    if above is None:
        assert source is not None and date is not None and grade is not None
        return Word(source=source, date=date, grade=grade)
    return Word(source=source or above.source, date=date or above.date, grade=grade or above.grade)


def _date(table: Table) -> str | None:
    """As a text, or as TOML has dates."""
    value = table.value("date")
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return value.isoformat()
    return table.text("date", 20)


def _choice(table: Table, key: str, choices: Sequence[str]) -> str:
    value = table.choice(key, choices)
    if value is None:
        raise table.error(key, expected=" or ".join(choices), found="nothing")
    return value
