"""`headrace checkpoint import`: a folder of torch.distributed.checkpoint becomes a checkpoint of a volume."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.checkpoint.common import need_torch
from headrace.cli.volume.common import AsJson, TakeOver, Unfenced, VolumeOption, shown, writing


def import_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="With `.metadata` in it.", show_default=False)],
    checkpoint: Annotated[
        str, typer.Argument(metavar="RUN/step-N", help="What it is to be in the volume.", show_default=False)
    ],
    members: VolumeOption = None,
    takeover: TakeOver = False,
    unfenced: Unfenced = False,
    json: AsJson = False,
) -> None:
    """Read a folder that torch.distributed.checkpoint wrote (FileSystemWriter) into a volume, in one commit.

    Nothing in the folder is carried out: its metadata, a pickle, is read by an interpreter that can only make records
    of DCP's classes, and tensors by `torch.load(weights_only=True)`. Needs PyTorch.

    Example: `headrace checkpoint import checkpoints/step-1000 pretrain/step-1000 --volume file:/data/a.img`
    """
    need_torch("import")
    import time

    from headrace.checkpoint import parse_checkpoint_id
    from headrace.cli.output import print_json
    from headrace.cli.progress import Progress, speed
    from headrace.torch.files.import_folder import import_dcp
    from headrace.units import format_bytes

    started = time.monotonic()
    id = parse_checkpoint_id(checkpoint)
    with writing(members, "import", takeover, unfenced) as session, Progress("importing") as progress:

        def heard(done: int, total: int) -> None:
            progress.show(done / max(total, 1), speed(done, total, time.monotonic() - started))

        report = import_dcp(session, folder, id, heard=heard)
    if json:
        print_json({**vars(report), "seconds": time.monotonic() - started})
        return
    what = f"{report.tensors:,} tensors and {report.others:,} others, {format_bytes(report.data_bytes)}"
    files = f"{report.files:,} file{'' if report.files == 1 else 's'}"
    print(f"{shown(str(id))}: {what}, of {files}, commit {report.sequence}")
