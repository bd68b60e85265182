"""Which rank this process is, of how many, and where rank 0 is: as torchrun or Slurm say it in the environment."""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import UsageError

#: On which rank 0 listens. Not MASTER_PORT, where torchrun has its own store (29500 by default).
DEFAULT_PORT = 29577
#: More ranks than any job has that measures storage: a bound on what rank 0 keeps for each.
MOST_RANKS = 4096


@dataclass(frozen=True, kw_only=True)
class Seat:
    """`address`: of rank 0's node, "" where nobody says it. `run`: the job's own name, so that two jobs never mix."""

    rank: int
    world: int
    address: str = ""
    run: str = ""
    host: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.world <= MOST_RANKS:
            raise UsageError("world size", expected=f"1 to {MOST_RANKS}", found=str(self.world))
        if not 0 <= self.rank < self.world:
            raise UsageError("rank", expected=f"0 to {self.world - 1}", found=str(self.rank))

    @property
    def token(self) -> str:
        """What ranks of one run have in common, and others have not by chance. It is no secret."""
        return hashlib.sha256(f"{self.run}\n{self.world}\n{self.address}".encode()).hexdigest()[:16]

    def named(self) -> str:
        return f"rank {self.rank} ({self.host})" if self.host else f"rank {self.rank}"


def seat_of(environ: Mapping[str, str]) -> Seat | None:
    """The seat that torchrun's variables give (RANK, WORLD_SIZE, MASTER_ADDR), else Slurm's (SLURM_PROCID,
    SLURM_NTASKS, and the first node of the step); None where this is one process. `UsageError` names a variable that
    cannot be meant.
    """
    host = socket.gethostname()
    if "RANK" in environ and "WORLD_SIZE" in environ:
        world = _number(environ, "WORLD_SIZE")
        if world == 1:
            return None
        address = environ.get("MASTER_ADDR", "").strip()
        run = f"torchrun {environ.get('TORCHELASTIC_RUN_ID', '')} {environ.get('MASTER_PORT', '')}"
        return Seat(rank=_number(environ, "RANK"), world=world, address=address, run=run, host=host)
    # A shell inside an allocation has SLURM_NTASKS, too; only what `srun` starts has a step.
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        world = _number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
        if world == 1:
            return None
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        run = f"slurm {environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
        return Seat(rank=_number(environ, "SLURM_PROCID"), world=world, address=first_node(nodes), run=run, host=host)
    return None


def first_node(nodes: str) -> str:
    """`"gpu[003-007,9],login1"` -> `"gpu003"`; `"rack[1-2]-n[3-4]"` -> `"rack1-n3"`; "" of nothing."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])*", nodes.strip())
    name = first.group(0) if first else ""
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", name)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise UsageError(
            f"the environment's {name}", expected="a number, as torchrun and Slurm set it", found=repr(text)[:60],
            next_step="unset it to measure from this process alone",
        )  # fmt: skip
    return int(text)
