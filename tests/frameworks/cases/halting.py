"""Where a process halts that a framework has started, until it is killed. Imports nothing: it is imported there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

FOLDER = "HALTING"


def in_mid_save(arguments: Any) -> None:
    """For `pre_finalize_callback`: the files of this rank are written, and the checkpoint is not published. Where the
    folder of `HALTING` has the name of its checkpoint: say so there, and wait."""
    folder = Path(os.environ[FOLDER])
    if (folder / Path(arguments.path).name.removeprefix("tmp_")).exists():
        (folder / f"halted-{os.getpid()}").touch()
        # No longer than who started it: a test that fails before it kills them would leave this one behind.
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(1)
