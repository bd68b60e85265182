"""A volume on two files, and the file system over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.filesystem import HeadraceFileSystem
from headrace.units import MIB
from headrace.volume import Volume


@pytest.fixture
def addresses(tmp_path: Path) -> str:
    paths = [tmp_path / f"member{number}" for number in range(2)]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(64 * MIB)
    uris = [f"file:{path}" for path in paths]
    Volume.create(uris, name="files").close()
    return ",".join(uris)


@pytest.fixture
def fs(addresses: str) -> Iterator[HeadraceFileSystem]:
    fs = HeadraceFileSystem(addresses, skip_instance_cache=True)
    yield fs
    fs.close()
