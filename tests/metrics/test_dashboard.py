"""The dashboard asks for nothing that is not there: metrics, their labels, values of labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.measure.watch.causes import CAUSES
from headrace.metrics import METRICS

BOARD = json.loads((Path(__file__).parents[2] / "dashboards/headrace.json").read_text())
LABELS = {f"headrace_{metric.name}": set(metric.labels) for metric in METRICS}
#: Prometheus' own, of every metric.
GIVEN = {"job", "instance"}


def expressions(found: Any = BOARD) -> Iterator[str]:
    if isinstance(found, dict):
        for key in ("expr", "query"):
            if isinstance(found.get(key), str):
                yield found[key]
        for value in found.values():
            yield from expressions(value)
    elif isinstance(found, list):
        for value in found:
            yield from expressions(value)


def test_it_asks_for_metrics_that_exist_by_labels_that_they_have() -> None:
    asked = [text for text in expressions() if "headrace_" in text]
    assert len(asked) > 15
    for text in asked:
        names = re.findall(r"\bheadrace_\w+", text)
        assert set(names) <= set(LABELS), text
        for name, selector in re.findall(r"\b(headrace_\w+)\{([^}]*)\}", text):
            assert set(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', selector)) <= LABELS[name] | GIVEN, text
        labels = set.union(*(LABELS[name] for name in names)) | GIVEN
        for group in re.findall(r"\b(?:by|without)\s*\(([^)]*)\)", text):
            assert set(re.split(r",\s*", group)) <= labels, text
        for values in re.findall(r'cause\s*(?:=~|!~|!=|=)\s*"([^"]*)"', text):
            assert set(values.split("|")) <= set(CAUSES), text


def test_legends_name_labels_of_what_they_are_of() -> None:
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            labels = set.union(*(LABELS[name] for name in re.findall(r"\bheadrace_\w+", target["expr"]))) | GIVEN
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, panel["title"]


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
