"""A folder, a namespace and a volume, small; and two ranks, started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bench.ranks import Ranks
from headrace.fabric import MemoryMedia, NamespaceOptions, SubsystemOptions, Target, TargetOptions
from headrace.units import MIB
from headrace.volume import Volume

NQN = "nqn.2026-01.io.example:bench"


def target(count: int = 1, size_bytes: int = 64 * MIB) -> Target:
    """Of namespaces in memory."""
    namespaces = [NamespaceOptions(media=MemoryMedia(size_bytes=size_bytes)) for _ in range(count)]
    return Target(TargetOptions(subsystems=[SubsystemOptions(nqn=NQN, namespaces=namespaces)]))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


@pytest.fixture
def namespace() -> Iterator[str]:
    with target() as serving:
        yield serving.uri()


@pytest.fixture
def volume(namespace: str) -> str:
    Volume.create(namespace).close()
    return namespace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "data"
    made.mkdir()
    return made
