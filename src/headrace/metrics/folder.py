"""The directory of a run on one node, where its ranks find each other."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from headrace.errors import UsageError
from headrace.fabric.control import socket_folder

#: What tells one job of a node from another: the same for all ranks of a job on this node, and for no other. Several
#: of them, since each alone may be the same in two jobs (torchrun's run is "none" unless it is named).
JOB_VARIABLES = (
    "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID",
)  # fmt: skip


def run_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """`run-ID` in the directory where headrace has its sockets. A process that no launcher started has its own."""
    known = [f"{name}={environment[name]}" for name in JOB_VARIABLES if environment.get(name)]
    told = "\n".join(known) or f"process {os.getpid()}"
    return socket_folder() / f"run-{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def make_folder(folder: Path) -> None:
    """`UsageError` where it cannot be made, or is not this user's alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise UsageError(
            "the directory of a run's metrics cannot be made", where=str(folder), found=error.strerror,
            next_step="choose another one (folder=), the same on all ranks of the node",
        ) from None  # fmt: skip
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            "the directory of a run's metrics is not this user's alone",
            where=str(folder),
            expected=f"a directory of user {os.getuid()} with mode 0700",
            found=f"user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}",
        )
