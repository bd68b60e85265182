"""`headrace checkpoint pin` and `unpin`: what retention leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.checkpoint.common import Checkpoints, parsed
from headrace.cli.volume.common import AsJson, TakeOver, Unfenced, VolumeOption, open_reading, shown, writing

if TYPE_CHECKING:
    from headrace.checkpoint import CheckpointId


def pin(
    checkpoints: Checkpoints,
    members: VolumeOption = None,
    note: Annotated[str, typer.Option(help="Why, for people: `show` tells it.")] = "",
    ask: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Ask the job that holds the volume, in its WriterOptions(pin_requests=FOLDER).",
            show_default=False,
        ),
    ] = None,
    takeover: TakeOver = False,
    unfenced: Unfenced = False,
    json: AsJson = False,
) -> None:
    """Keep checkpoints: from now on neither retention nor `rm` deletes them, and no save replaces them.

    A volume has one writer: while a job holds it, that job has to pin. `--ask` leaves a request where it looks, and it
    pins with its next save; a step that retention deletes before is not kept.

    Example: `headrace checkpoint pin pretrain/step-1000 --note "before the spike" --volume file:/data/a.img`
    """
    from headrace import checkpoint

    if ask is not None:
        _ask(parsed(checkpoints), members, ask, note, json)
        return
    with writing(members, "pin", takeover, unfenced) as session:
        done = {str(id): checkpoint.pin(session, id, note) for id in parsed(checkpoints)}
    _say(done, "pinned", "was pinned already", json)


def _ask(ids: list[CheckpointId], members: VolumeOption, folder: Path, note: str, json: bool) -> None:
    from headrace.checkpoint.requests import ask
    from headrace.checkpoint.retention import not_there
    from headrace.cli.output import print_json

    with open_reading(members) as volume:
        for id in ids:
            if id.manifest not in volume:
                raise not_there(volume, id)
    files = {str(id): str(ask(folder, id, note)) for id in ids}
    if json:
        print_json({"asked": files})
        return
    for name, file in files.items():
        print(f"{shown(name)} is asked for: {shown(file)} goes when the job has pinned it, with its next save")


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
