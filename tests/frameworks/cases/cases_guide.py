"""What the guide to frameworks shows, run as it stands, in its order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.units import MIB
from headrace.volume import Volume
from scripts.environments import ROOT
from tests.dataset.corpora import ingest_texts

GUIDE = ROOT / "docs" / "guides" / "frameworks.md"


@pytest.mark.filterwarnings("ignore")
def test_what_the_guide_says_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Volume.create(f"file:data.img?create={16 * MIB}") as volume:
        ingest_texts(volume, tmp_path, count=40)
    names: dict[str, object] = {"__name__": "guide"}
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    assert len(blocks) == 9
    for code in blocks:
        exec(compile(code, str(GUIDE), "exec"), names)
