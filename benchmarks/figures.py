"""A figure: one number with its unit, its bound where it has one, its samples, and what it was measured on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table

from benchmarks.environment import environment


@dataclass(frozen=True, kw_only=True)
class Figure:
    """`at_least`/`at_most`: what must hold; `samples`: the single measurements that `value` is the median of."""

    suite: str
    figure: str
    #: None: what was compared with has no such thing, and `unit` says what.
    value: float | None
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    samples: list[float] = field(default_factory=list)
    #: Half the distance between the quartiles of pairs of the *same* thing: differences below it say nothing.
    noise: float | None = None
    #: Of a ratio: the medians of what was compared, and their unit.
    ours: float | None = None
    peer: float | None = None
    measured_in: str | None = None
    #: Package and version that it is of, or that ours was compared with.
    version: str | None = None
    #: How many cores each process kept busy (CPU seconds a second), by process.
    cpu: dict[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        if self.value is None:
            return self.at_least is None and self.at_most is None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )

    def json_line(self) -> str:
        """One line; bounds that do not exist are left out, a value that does not exist is null."""
        shown = {
            key: value for key, value in asdict(self).items() if key == "value" or (value is not None and value != {})
        }
        for key, value in shown.items():
            if isinstance(value, float):
                shown[key] = _rounded(value)
        shown["samples"] = [_rounded(sample) for sample in self.samples]
        if self.cpu:
            shown["cpu"] = {name: _rounded(value) for name, value in self.cpu.items()}
        return json.dumps({**shown, "environment": environment()}, ensure_ascii=False)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def table(figures: Iterable[Figure]) -> Table:
    view = Table(title="headrace benchmarks", title_justify="left")
    for name in ("suite", "figure"):
        view.add_column(name)
    for name in ("value", "unit", "bound", "noise", "n"):
        view.add_column(name, justify="right")
    view.add_column("verdict")
    view.add_column("ours / peer")
    view.add_column("busy cores")
    view.add_column("version")
    for item in figures:
        bound = f">= {item.at_least:g}" if item.at_least is not None else ""
        bound += f"<= {item.at_most:g}" if item.at_most is not None else ""
        verdict = ("holds" if item.holds else "[bold red]missed[/]") if bound else ""
        noise = f"{item.noise:.2g}" if item.noise is not None else ""
        both = f"{item.ours:.3g} / {item.peer:.3g} {item.measured_in}" if item.ours and item.peer else ""
        busy = ", ".join(f"{name} {value:.2f}" for name, value in item.cpu.items())
        value = "none" if item.value is None else f"{item.value:.3g}"
        view.add_row(
            item.suite, item.figure, value, item.unit, bound, noise, str(len(item.samples)), verdict,
            both, busy, item.version or "",
        )  # fmt: skip
    return view


def show(figures: Iterable[Figure]) -> None:
    """The table, on standard error: standard output carries the JSON lines."""
    Console(stderr=True, width=None if Console(stderr=True).is_terminal else 200).print(table(figures))
