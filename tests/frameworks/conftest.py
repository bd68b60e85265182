"""Frameworks run in processes of their own, with the Python of their own environment (`scripts/environments.py`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.environments import FRAMEWORKS, ROOT


@pytest.fixture(scope="session")
def framework_python() -> Path:
    """Its Python; tests that want it are skipped, and say why, where it could not be made."""
    if why := FRAMEWORKS.missing():
        pytest.skip(why)
    return FRAMEWORKS.python


@pytest.fixture(scope="session")
def framework_environment() -> dict[str, str]:
    """For its processes: this project's sources and tests, nothing from the network, one thread each."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {
        **os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
