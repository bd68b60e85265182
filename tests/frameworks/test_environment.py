"""The environment of the frameworks adds packages, and replaces none of the project's large ones."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import torch

import headrace
from scripts.environments import FRAMEWORKS

_SAY = """
import json, sys
from importlib import metadata
import headrace, numpy, torch
print(json.dumps([headrace.__file__, torch.__file__, torch.__version__, numpy.__file__, numpy.__version__,
    [metadata.version(name) for name in sys.argv[1:]]]))
"""


def test_it_has_what_is_wanted_and_our_torch(framework_python: Path, framework_environment: dict[str, str]) -> None:
    lines = [line for line in FRAMEWORKS.wanted.read_text().splitlines() if not line.startswith("#")]
    names, versions = zip(*(line.split("==") for line in lines), strict=True)
    done = subprocess.run(
        [framework_python, "-c", _SAY, *names], env=framework_environment, capture_output=True, text=True, check=True
    )
    ours = [headrace.__file__, torch.__file__, torch.__version__, np.__file__, np.__version__]
    assert json.loads(done.stdout) == [*ours, list(versions)]
