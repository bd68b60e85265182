"""A small volume of two members, and a session on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.volume import Session, Volume


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    uris = [f"file:{tmp_path}/member{i}?create=16MiB" for i in range(2)]
    Volume.create(uris, stripe_bytes=65536).close()
    with Volume.open([uri.split("?")[0] for uri in uris], write=True) as opened:
        yield opened


@pytest.fixture
def session(volume: Volume) -> Iterator[Session]:
    with volume.session(run_id="test") as session:
        yield session
