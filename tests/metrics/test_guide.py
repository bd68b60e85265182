"""The guide of the metrics: what it tells to type runs, and its table is the one that there is."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from headrace.metrics import METRICS
from headrace.volume import Volume
from tests.dataset.corpora import ingest_texts

GUIDE = (Path(__file__).parents[2] / "docs/guides/metrics.md").read_text()


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Volume.create(["file:data.img?create=16MiB"]) as volume:
        ingest_texts(volume, tmp_path, count=20)
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    # The path of a socket has 107 bytes.
    with tempfile.TemporaryDirectory(prefix="hr-") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        exec(compile(example, "docs/guides/metrics.md", "exec"), {})


def test_the_table_names_every_metric_with_its_labels() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", GUIDE.partition("## Names")[2], re.MULTILINE)
    assert rows[: len(METRICS)] == [(metric.name, ", ".join(metric.labels), metric.help) for metric in METRICS]
