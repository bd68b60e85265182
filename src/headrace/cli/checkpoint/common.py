"""What the commands of `headrace checkpoint` share: naming a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.checkpoint import CheckpointId
    from headrace.volume import Volume

#: One that is only read.
Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="RUN/step-N, or RUN: its latest.", show_default=False)
]
Checkpoints = Annotated[list[str], typer.Argument(metavar="RUN/step-N...", help="Which ones.", show_default=False)]


def chosen(volume: Volume, text: str) -> CheckpointId:
    """The checkpoint that was meant; ObjectNotFound where a run has none."""
    from headrace.checkpoint import latest, parse_checkpoint_id
    from headrace.cli.volume.common import shown
    from headrace.errors import ObjectNotFound, UsageError

    try:
        return parse_checkpoint_id(text)
    except UsageError:
        found = latest(volume, text.removesuffix("/"))
    if found is None:
        raise ObjectNotFound(
            f"there is no committed checkpoint of run {shown(text)!r}",
            next_step="`headrace checkpoint ls` lists what is there",
        )
    return found.id


def parsed(texts: list[str]) -> list[CheckpointId]:
    """Each of them once."""
    from headrace.checkpoint import parse_checkpoint_id

    return list(dict.fromkeys(parse_checkpoint_id(text) for text in texts))


def when(unix_s: float) -> str:
    """`2026-11-30 12:00:00 UTC`; a clock that was never right shows as it is."""
    from datetime import datetime, timezone

    try:
        return datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{unix_s:.0f} s"


def need_torch(what: str) -> None:
    """UsageError where PyTorch is not installed."""
    from importlib.util import find_spec

    from headrace.errors import UsageError

    if find_spec("torch") is None:
        raise UsageError(f"{what} needs PyTorch, which is not installed", next_step="pip install 'headrace[torch]'")
