"""`headrace checkpoint export`: a checkpoint as a folder of files."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.checkpoint.common import Checkpoint, chosen, need_torch
from headrace.cli.sizes import parse_size
from headrace.cli.volume.common import AsJson, Degraded, VolumeOption, open_reading, shown


class Format(Enum):
    dcp = "dcp"
    safetensors = "safetensors"


class Dtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def export(
    checkpoint: Checkpoint,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="To be made.", show_default=False)],
    members: VolumeOption = None,
    format_: Annotated[
        Format,
        typer.Option("--format", "-f", help="What `dcp.load` reads with FileSystemReader, or files of whole tensors."),
    ] = Format.dcp,
    prefix: Annotated[
        str, typer.Option(help="safetensors: tensors whose names begin so, without it.", show_default=True)
    ] = "model.",
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="safetensors: of floating point tensors. [default: as saved]", show_default=False),
    ] = None,
    shard_size: Annotated[str, typer.Option(help="safetensors: bytes of tensors in one file.")] = "5GB",
    degraded: Degraded = False,
    json: AsJson = False,
) -> None:
    """Write a checkpoint to a folder that is not there yet: for torch.distributed.checkpoint, or as safetensors.

    Every byte is verified on its way. The folder has its name when it is whole and durable; a process that is killed
    leaves a hidden one beside it, which the next export of that name deletes. Needs PyTorch.

    Example: `headrace checkpoint export pretrain out/model --format safetensors --volume file:/data/a.img`
    """
    need_torch("export")
    import time

    import headrace.torch.files.export_folder as exports
    from headrace.cli.output import print_json
    from headrace.cli.progress import Progress, speed
    from headrace.torch.metadata import dtype_of
    from headrace.units import format_bytes

    started = time.monotonic()
    shard_bytes = parse_size("--shard-size", shard_size)
    with open_reading(members, degraded=degraded) as volume, Progress("exporting") as progress:
        id = str(chosen(volume, checkpoint))

        def heard(done: int, total: int) -> None:
            progress.show(done / max(total, 1), speed(done, total, time.monotonic() - started))

        if format_ is Format.dcp:
            report = exports.export_dcp(volume, id, folder, heard=heard)
        else:
            report = exports.export_safetensors(
                volume,
                id,
                folder,
                prefix=prefix,
                dtype=None if dtype is None else dtype_of(dtype.value),
                shard_bytes=shard_bytes,
                heard=heard,
            )
    if json:
        print_json({**vars(report), "folder": str(folder), "seconds": time.monotonic() - started})
        return
    print(
        f"{shown(id)}: {report.tensors:,} tensors, {format_bytes(report.data_bytes)}, in "
        f"{len(report.files):,} file{'' if len(report.files) == 1 else 's'} of {shown(str(folder))}"
    )
