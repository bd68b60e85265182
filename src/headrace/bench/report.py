"""What came of it in words and tables: for a terminal, and for the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headrace.bench import figures
from headrace.bench.figures import BYTES_PER_S, PER_S, SECONDS, SHARE, Figure, Outcome, differ
from headrace.bench.suite import Result
from headrace.units import format_bytes, format_rate, format_seconds

#: Noise above this share of a figure is told.
NOISY = 0.2
COLUMNS = ("pattern", "work", "flows", "figure", "median", "noise", "")
NAMES = {
    "ingest": "sequential ingest", "sequential": "sequential reads", "random": "random samples",
    "latency": "single small reads", "load": "model load", "checkpoint": "checkpoint", "mixed": "feeding while saving",
}  # fmt: skip


def value_text(value: float, unit: str) -> str:
    if unit == BYTES_PER_S:
        return format_rate(value)
    if unit == SECONDS:
        return format_seconds(value)
    if unit == SHARE:
        return f"{value:.0%}"
    return f"{value:,.0f}/s" if unit == PER_S else f"{value:,.0f}"


def noise_text(figure: Figure) -> str:
    """Half of what lies between the lowest and the highest round."""
    if figure.noise is None:
        return "one round"
    of = f" ({figure.noise / figure.value:.0%})" if figure.value else ""
    return f"± {value_text(figure.noise, figure.unit)}{of}"


def rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """One for each figure; what is as above is left out."""
    found: list[list[str]] = []
    before: tuple[str, str, int] | None = None
    for outcome in outcomes:
        for figure in outcome.figures:
            new = outcome.key != before
            before = outcome.key
            found.append(
                [
                    NAMES.get(outcome.pattern, outcome.pattern) if new else "", outcome.work if new else "",
                    str(outcome.flows) if new else "", figure.name, value_text(figure.value, figure.unit),
                    noise_text(figure), figure.note,
                ]
            )  # fmt: skip
    return found


def of_pattern(outcomes: Sequence[Outcome], pattern: str) -> dict[str, list[Outcome]]:
    """By work, in order of flows."""
    found: dict[str, list[Outcome]] = {}
    for one in outcomes:
        if one.pattern == pattern and one.figures:
            found.setdefault(one.work, []).append(one)
    return {work: sorted(ones, key=lambda one: one.flows) for work, ones in found.items()}


def enough(ones: Sequence[Outcome]) -> Outcome:
    """Of the same work at several flows, the fewest that are not slower than the fastest but for noise."""
    best = max(ones, key=lambda one: one.main.value)
    return next(one for one in ones if one is best or not (differ(one.main, best.main) or best.main.noise is None))


def sentence(result: Result) -> str:
    """One, for who reads no tables."""
    parts = []
    for pattern, words in (("sequential", "reads"), ("random", "random samples of {work}")):
        for work, ones in of_pattern(result.outcomes, pattern).items():
            one = enough(ones)
            text = f"{words.format(work=work)} {value_text(one.main.value, one.main.unit)} with {_flows(one.flows)}"
            if one.flows < ones[-1].flows and one.main.noise is not None:
                text += f" (more of them, up to {ones[-1].flows}, gain nothing beyond the noise)"
            parts.append(text)
    for work, ones in of_pattern(result.outcomes, "latency").items():
        parts.append(f"single reads of {work} take {value_text(ones[0].main.value, SECONDS)}")
    for ones in of_pattern(result.outcomes, "ingest").values():
        parts.append(f"takes {value_text(enough(ones).main.value, BYTES_PER_S)} of new data")
    for ones in of_pattern(result.outcomes, "load").values():
        parts.append(f"loads {format_bytes(ones[-1].bytes)} in {format_seconds(ones[-1].figure('time').value)}")
    for ones in of_pattern(result.outcomes, "checkpoint").values():
        save, restore = ones[0].figure("save"), ones[0].figure("restore")
        parts.append(
            f"saves {value_text(save.value, save.unit)} and restores {value_text(restore.value, restore.unit)} "
            f"({ones[0].work})"
        )
    for ones in of_pattern(result.outcomes, "mixed").values():
        parts.append(f"a feed at half speed keeps {value_text(ones[0].main.value, SHARE)} of it while ranks save")
    return f"{result.path}: " + ("; ".join(parts) if parts else "nothing was measured") + "."


def notes(result: Result) -> list[str]:
    """What must be known to read the figures: caches, durability, what single patterns said."""
    found = [result.stopped] if result.stopped else []
    for kind, of in (("cache", "cache"), ("durable", "durable when")):
        for text in dict.fromkeys(getattr(one, kind) for one in result.outcomes):
            if text:
                names = dict.fromkeys(
                    NAMES.get(o.pattern, o.pattern) for o in result.outcomes if getattr(o, kind) == text
                )
                found.append(f"{of} ({', '.join(names)}): {text}")
    found += _said(result.outcomes)
    if any(
        one.main.noise is not None and one.main.noise > NOISY * one.main.value for one in result.outcomes if one.figures
    ):
        found.append(
            f"rounds lie far apart (noise above {NOISY:.0%}): this machine or the path is busy with something else, or "
            "rounds are short; more of them (--rounds), or longer ones (--seconds, --size), say more"
        )
    found.append(
        "noise is half of what lies between the lowest and the highest round; what is measured is what this process "
        "sees, its own time included"
    )
    return list(dict.fromkeys(found))


def _said(outcomes: Sequence[Outcome]) -> list[str]:
    """What patterns said, each once: with other numbers of flows it is the same but for its figures."""
    alike: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for one in outcomes:
        for note in one.notes:
            alike.setdefault((one.pattern, re.sub(r"\d+(\.\d+)?", "#", note)), []).append((one.flows, note))
    found = []
    for (pattern, _), told in alike.items():
        of = NAMES.get(pattern, pattern)
        if pattern != "checkpoint":
            flows = sorted({flows for flows, _ in told})
            of += f", {_flows(flows[0])}" if len(flows) == 1 else f", {', '.join(map(str, flows))} flows"
        notes = dict.fromkeys(note for _, note in told)
        found.append(f"{of}{', as an example' if len(notes) > 1 else ''}: {next(iter(notes))}")
    return found


def to_json(result: Result) -> dict[str, Any]:
    """All of it, with the sentence and the notes that a reader would have seen."""
    found: dict[str, Any] = figures.to_json(result)
    return {"sentence": sentence(result), **found, "notes": notes(result)}


def _flows(count: int) -> str:
    return "1 flow" if count == 1 else f"{count} flows"
