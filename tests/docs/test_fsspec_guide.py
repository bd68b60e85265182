"""What the guide to fsspec shows, run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.filesystem import HeadraceFileSystem
from headrace.units import MIB
from headrace.volume import Volume

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "fsspec.md"


def test_its_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    with (tmp_path / "member").open("wb") as file:
        file.truncate(64 * MIB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_VOLUME", f"file:{tmp_path}/member")
    Volume.create(f"file:{tmp_path}/member").close()
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    assert len(blocks) >= 3
    names: dict[str, object] = {}
    try:
        for block in blocks:
            exec(compile(block, str(GUIDE), "exec"), names)
        with Volume.open(f"file:{tmp_path}/member") as volume:
            assert [info.name for info in volume.list()] == [
                "corpus/part-0.parquet",
                "old-shards/shard.bin",
                "set/a",
                "set/b",
            ]
    finally:
        for fs in list(HeadraceFileSystem._cache.values()):
            fs.close()
        HeadraceFileSystem.clear_instance_cache()
