"""`headrace checkpoint pin` and `unpin`: what retention leaves alone."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.checkpoint.common import Checkpoints, parsed
from headrace.cli.volume.common import AsJson, TakeOver, Unfenced, VolumeOption, shown, writing


def pin(
    checkpoints: Checkpoints,
    members: VolumeOption = None,
    note: Annotated[str, typer.Option(help="Why, for people: `show` tells it.")] = "",
    takeover: TakeOver = False,
    unfenced: Unfenced = False,
    json: AsJson = False,
) -> None:
    """Keep checkpoints: from now on neither retention nor `rm` deletes them, and no save replaces them.

    A volume has one writer: while a job holds it, that job has to pin (`headrace.checkpoint.pin`).

    Example: `headrace checkpoint pin pretrain/step-1000 --note "before the spike" --volume file:/data/a.img`
    """
    from headrace import checkpoint

    with writing(members, "pin", takeover, unfenced) as session:
        done = {str(id): checkpoint.pin(session, id, note) for id in parsed(checkpoints)}
    _say(done, "pinned", "was pinned already", json)


def unpin(
    checkpoints: Checkpoints,
    members: VolumeOption = None,
    takeover: TakeOver = False,
    unfenced: Unfenced = False,
    json: AsJson = False,
) -> None:
    """Let retention and `rm` delete checkpoints again.

    Example: `headrace checkpoint unpin pretrain/step-1000 --volume file:/data/a.img`
    """
    from headrace import checkpoint

    with writing(members, "unpin", takeover, unfenced) as session:
        done = {str(id): checkpoint.unpin(session, id) for id in parsed(checkpoints)}
    _say(done, "unpinned", "was not pinned", json)


def _say(done: dict[str, bool], changed: str, unchanged: str, json: bool) -> None:
    from headrace.cli.output import print_json

    if json:
        print_json(
            {changed: [id for id, new in done.items() if new], "unchanged": [id for id, new in done.items() if not new]}
        )
        return
    for id, new in done.items():
        print(f"{shown(id)} {'is ' + changed if new else unchanged}")
