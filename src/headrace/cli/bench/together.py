"""Options of commands that several nodes carry out together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from headrace.bench.meeting import Meeting

MEET = typer.Option(
    "--meet", metavar="FOLDER", show_default=False,
    help="Under torchrun or srun: meet in this folder, which all nodes see, and not on a port of rank 0's node.",
)  # fmt: skip
MEET_PORT = typer.Option(
    "--meet-port", metavar="PORT", show_default=False,
    help="Under torchrun or srun: the port of rank 0's node on which ranks meet. [default: 29577]",
)  # fmt: skip


def alone(command: str) -> None:
    """UsageError where torchrun or srun started several of a command that is one process: each would be by itself."""
    import os

    from headrace.bench.meeting import seat_of
    from headrace.errors import UsageError

    if seat_of(os.environ) is not None:
        raise UsageError(
            f"headrace bench {command}", expected="one process", found="one of several ranks",
            next_step="start it without torchrun or srun (`headrace bench run` and `accelerators` go with them)",
        )  # fmt: skip


@contextmanager
def meeting_of(folder: Path | None, port: int | None, scratch: bool = False) -> Iterator[Meeting | None]:
    """The meeting of all ranks, as torchrun's or Slurm's environment says; None where this process is alone."""
    import os

    from headrace.bench.meeting import DEFAULT_PORT, meet, seat_of
    from headrace.errors import UsageError

    seat = seat_of(os.environ)
    if seat is None:
        if folder is not None or port is not None:
            raise UsageError(
                "--meet and --meet-port", expected="a job of several ranks, started by torchrun or srun",
                found="one process", next_step="leave them out, or start it so",
            )  # fmt: skip
        yield None
        return
    if scratch:
        raise UsageError(
            "--scratch, with several ranks", found="each would write to the same bytes of the device or volume",
            next_step="measure reads, or a folder: there each rank has files of its own",
        )  # fmt: skip
    with meet(seat, folder=folder, port=DEFAULT_PORT if port is None else port) as meeting:
        yield meeting
