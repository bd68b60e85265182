"""`headrace doctor --expect`: what the doctor measured, against what the catalogue of `headrace plan` claims.

The two rooms do not know of each other; here they meet.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from headrace.cli.expectation_bench import Bench
from headrace.doctor.checks import sort
from headrace.doctor.describe import Section
from headrace.doctor.examine import Examination
from headrace.doctor.facts import Facts
from headrace.doctor.finding import NOTE, WARNING, Finding
from headrace.doctor.rate import Rate
from headrace.doctor.storage import Storage, link_of
from headrace.doctor.verdict import FABRIC, LOCAL, NETWORK_FS, PRESENTED
from headrace.errors import UsageError
from headrace.fabric.file import read_plain_file
from headrace.plan.catalogue import Offering, load_catalogue
from headrace.plan.expect import BELOW, MET, Comparison, Here, Measured, compare, read_measured
from headrace.plan.units import significant

#: Of a record: what was measured on that machine.
RECORDED = "measured.json"
_MAX_BYTES = 1 << 20
_WRITES = "the doctor writes nothing; `headrace bench` does, and --measured takes what it printed as JSON"
_NETWORK = "the doctor puts no load on the network alone; figures measured elsewhere can be given with --measured"
_HELD_BACK = "what reads here was busy all the time, and storage may have more"
#: By the kind of an offering: the verdicts that fit.
_WORDS = {
    "block": (FABRIC, PRESENTED),
    "file system": (NETWORK_FS,),
    "object": (NETWORK_FS,),
    "local": (LOCAL, PRESENTED),
}


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What is claimed, and figures that somebody else measured."""

    offering: Offering
    given: tuple[Measured, ...]
    #: Where these are from; "" where there are none. Of which storage, as `_name`; None: nobody says.
    given_by: str
    given_of: str | None
    #: The run of `headrace bench` that had them.
    bench: Bench | None
    #: This machine, and not a recorded one.
    live: bool

    @staticmethod
    def of(name: str, catalogue: Sequence[Path], measured: Path | None, machine: Path | None) -> Expectation:
        """UsageError: nobody of that name, files that are none."""
        offering = load_catalogue(catalogue).find(name)
        given: list[Measured] = []
        of = bench = None
        file = measured or (machine / RECORDED if machine is not None and (machine / RECORDED).exists() else None)
        if file is not None:
            try:
                tree = json.loads(read_plain_file(file, most_bytes=_MAX_BYTES))
            except (ValueError, RecursionError):
                raise UsageError("not a report of measurements", where=str(file), expected="JSON") from None
            if isinstance(tree, dict) and isinstance(tree.get("outcomes"), list):
                bench = Bench.of(tree)
                tree = {"measured": bench.figures(tree["outcomes"], file=str(file))}
            given = read_measured(tree, file=str(file))
            of = tree.get("of")
        return Expectation(
            offering=offering, given=tuple(given), given_by="" if file is None else file.name,
            given_of=of if isinstance(of, str) else None, bench=bench, live=machine is None,
        )  # fmt: skip

    def choose(self, facts: Facts, storage: Sequence[Storage]) -> Storage:
        """The piece that is meant: the only one, or the only one of such a kind. UsageError where it must be named, and
        where what was measured elsewhere is not of it."""
        chosen = self._choose(storage)
        if self.given_of not in (None, _name(chosen)):
            raise UsageError(
                "what was measured is of another storage", where=self.given_by, expected=_name(chosen),
                found=repr(self.given_of)[:200],
            )  # fmt: skip
        if self.bench is not None:
            self.bench.check(facts, chosen, file=self.given_by, live=self.live)
        return chosen

    def _told(self) -> str:
        """Of the figures that somebody else measured."""
        if not self.given_by:
            return ""
        if self.bench is not None:
            return f"figures out of {self.given_by}, {self.bench.told(live=self.live)}"
        of = "" if self.given_of is not None else ", which does not say of which storage they are"
        return f"figures out of {self.given_by}{of}"

    def _choose(self, storage: Sequence[Storage]) -> Storage:
        words = _WORDS[self.offering.kind] if self.offering.seen == "unknown" else (self.offering.seen,)
        fitting = [one for one in storage if one.meant in words]
        for choice in (storage, fitting):
            if len(choice) == 1:
                return choice[0]
        names = ", ".join(one.name for one in (fitting or storage)[:8]) or "none"
        raise UsageError(
            f"--expect: which storage is {self.offering.key}?", expected="the name of one piece of storage",
            found=f"{names}{' ...' if len(fitting or storage) > 8 else ''}",
            next_step=f"headrace doctor NAME --expect {self.offering.key}",
        )  # fmt: skip

    def held_against(self, found: Examination) -> Held:
        chosen = self.choose(found.facts, found.storage)
        measured = [*_measured(found, chosen), *self.given]
        here = Here(
            gpus=len(found.facts.gpus.gpus) or None, size_bytes=_size(found, chosen), devices=max(1, chosen.devices),
            missing=_missing(found, live=self.live), **_link(found, chosen),
        )  # fmt: skip
        return Held(
            offering=self.offering, storage=chosen, measured=tuple(measured),
            comparisons=tuple(compare(self.offering, measured, here)), today=datetime.date.today(),
            given_by=self._told(),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Held:
    """The outcome."""

    offering: Offering
    storage: Storage
    measured: tuple[Measured, ...]
    comparisons: tuple[Comparison, ...]
    today: datetime.date
    #: Where figures are from that somebody else measured.
    given_by: str

    def findings(self) -> list[Finding]:
        key, name = self.offering.key, self.storage.name
        found = []
        seen = self.offering.seen
        if seen != "unknown" and seen != self.storage.meant:
            found.append(
                Finding(
                    id="expect-other-storage", severity=WARNING, about=(name,),
                    title=f"{name} is {self.storage.verdict.word}, and {key} should be seen as {seen}",
                    evidence=f"{self.storage.verdict.why}; the catalogue: {self.offering.title}, seen as {seen}",
                    why="it may be another storage than the one that is claimed: then the comparison says nothing",
                    what_to_do="name the storage that is meant",
                    command=f"headrace providers --filter provider={self.offering.provider}",
                )
            )  # fmt: skip
        for one in self.comparisons:
            if one.verdict != BELOW:
                continue
            blog = one.claim.word.grade == "blog"
            how = one.measured.how if one.measured is not None else ""
            found.append(
                Finding(
                    id="expect-below",
                    # What somebody else wrote is nobody's promise.
                    severity=NOTE if blog else WARNING, about=(name,),
                    title=f"{one.way} of {name} is {one.why} of {key}: {one.figure}",
                    evidence=f"measured: {how or 'as given'}; claimed: {one.claim} [{_word(one, self.today)}]",
                    why="what was planned by the claim takes longer, or needs more of it"
                    + ("; the claim is of a blog, and nobody's promise" if blog else ""),
                    what_to_do="measure again while nothing else uses it; then ask the provider, with the claim and "
                    "its source, and plan with what was measured",
                    command=f"headrace bench {quote(name)}; headrace plan --read RATE ...",
                )
            )  # fmt: skip
        return found

    def told(self, found: Examination) -> Examination:
        return replace(found, findings=tuple(sort([*found.findings, *self.findings()])))

    def record(self, folder: Path) -> None:
        """What was measured, beside the files that were read."""
        if self.measured:
            record = {"of": _name(self.storage), **to_record(self.measured)}
            (folder / RECORDED).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def section(self) -> Section:
        rows = [
            [
                one.verdict,
                f"{one.claim}" + ("" if one.way == one.claim.what else f", {one.way}s")
                + f"\n[{_word(one, self.today)}]",
                one.figure, "" if one.ratio is None else f"{significant(100 * one.ratio)} %", one.why,
            ] for one in self.comparisons
        ]  # fmt: skip
        how = list(dict.fromkeys(one.how for one in self.measured if one.how))
        note = "; ".join([*how, *([self.given_by] if self.given_by else [])])
        if not rows:
            note = "it claims no figure that can be measured: only what it is, or what it costs"
        return Section(
            heading=f"{self.storage.name}, against what {self.offering.key} claims",
            columns=("verdict", "claimed", "measured", "ratio", "why"), rows=rows, note=note,
        )  # fmt: skip

    @property
    def sentence(self) -> str:
        count = {verdict: sum(one.verdict == verdict for one in self.comparisons) for verdict in (MET, BELOW)}
        rest = len(self.comparisons) - sum(count.values())
        return (
            f"Of {len(self.comparisons)} claims of {self.offering.key}: {count[MET]} met, {count[BELOW]} below, "
            f"{rest} cannot be measured here."
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "offering": self.offering.key, "storage": self.storage.name, "sentence": self.sentence,
            "given_by": self.given_by, "claims": [one.to_json(self.today) for one in self.comparisons],
            **to_record(self.measured),
        }  # fmt: skip


def _name(storage: Storage) -> str:
    """Of a target none: a record has another address for it."""
    return storage.name if storage.kind in ("disk", "mount") else storage.kind


def to_record(measured: Sequence[Measured]) -> dict[str, Any]:
    """As `read_measured` reads it."""
    forms = {"iops": ("IOPS", 1.0), "capacity": ("TB", 1e12)}
    rows = []
    for one in measured:
        unit, factor = forms.get(one.what, ("MB/s", 1e6))
        row = {
            "what": one.what, "value": one.value / factor, "unit": unit, "how": one.how, "per": one.per,
            "held_back": one.held_back,
        }  # fmt: skip
        rows.append({key: value for key, value in row.items() if value != ""})
    return {"measured": rows}


def _measured(found: Examination, chosen: Storage) -> list[Measured]:
    figures = []
    rate = found.rate
    if rate is not None and rate.read_bytes_per_s is not None:
        figures.append(_of_node("read", rate.read_bytes_per_s, rate))
    if rate is not None and rate.reads_per_s is not None:
        figures.append(_of_node("iops", rate.reads_per_s, rate))
    size = _size(found, chosen)
    if size is not None:
        figures.append(Measured(what="capacity", per="volume", value=float(size)))
    return figures


def _of_node(what: str, value: float, rate: Rate) -> Measured:
    held_back = _HELD_BACK if what in rate.held_back else ""
    return Measured(what=what, per="node", value=value, how=rate.how, held_back=held_back)


def _missing(found: Examination, *, live: bool) -> dict[str, str]:
    if found.rate is not None:
        why = found.rate.error or "nothing was measured"
    elif not live:
        why = "a recorded machine, and nothing was measured when it was recorded"
    else:
        why = "nothing was to be measured (--no-measure)"
    return {"read": why, "iops": why, "write": _WRITES, "network": _NETWORK, "capacity": "its size is not to be seen"}


def _size(found: Examination, chosen: Storage) -> int | None:
    """Of the whole: what the file system says, else the disk or the namespace."""
    touched = next((one.size_bytes for one in found.touches if one.path == chosen.name and one.size_bytes), None)
    target = next((one.size_bytes for one in found.targets if one.uri == chosen.name), None)
    rate = found.rate.size_bytes if found.rate is not None and chosen.kind == "mount" else None
    return touched or target or chosen.size_bytes or rate


def _link(found: Examination, chosen: Storage) -> dict[str, Any]:
    rate, name = link_of(found.facts, chosen)
    return {"link": rate, "link_name": name}


def _word(one: Comparison, today: datetime.date) -> str:
    word = one.claim.word
    marks = [word.source, word.date, word.grade, word.age(today) if word.date != "unknown" else ""]
    return "; ".join(mark if mark != "unknown" else "date unknown" for mark in marks if mark)
