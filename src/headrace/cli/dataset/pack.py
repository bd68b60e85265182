"""`headrace dataset pack`: which documents share a sample, stored beside the dataset."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.volume.common import AsJson, TakeOver, Unfenced, VolumeOption, open_writing, shown

if TYPE_CHECKING:
    from headrace.dataset import PackManifest


class Layout(Enum):
    packed = "packed"
    padded = "padded"


class Long(Enum):
    split = "split"
    truncate = "truncate"
    drop = "drop"


def pack(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The dataset.", show_default=False)],
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", "-l", metavar="N", help="Inputs of a sample.", show_default=False)
    ],
    members: VolumeOption = None,
    layout: Annotated[
        Layout, typer.Option(help="Several documents in a sample, or each in one of its own and padding behind it.")
    ] = Layout.packed,
    long: Annotated[
        Long, typer.Option(help="Documents that are longer: cut without losing a target, cut off, or left out.")
    ] = Long.split,
    replace: Annotated[bool, typer.Option("--replace", help="Make it again where there is one.")] = False,
    takeover: TakeOver = False,
    unfenced: Unfenced = False,
    json: AsJson = False,
) -> None:
    """Compute which whole documents share a sample of N inputs, and store that as `NAME.packed-N` beside the dataset.

    Best fit: hardly a place stays empty. Tokens stay where they are; the same dataset gives the same samples. Loaders
    take them with `DocumentLoader(volume, NAME, sequence_length=N)`.

    Example: `headrace dataset pack corpus --sequence-length 4096 --volume file:/data/a.img`
    """
    from headrace.cli.output import print_json
    from headrace.cli.progress import Progress
    from headrace.dataset import PackOptions, pack_stream
    from headrace.dataset.tokens.packs import packing_name

    options = PackOptions(sequence_length=sequence_length, layout=layout.value, long=long.value)
    with (
        open_writing(members) as volume,
        volume.session(
            run_id="headrace dataset pack", takeover="if-dead" if takeover else "refuse", unfenced=unfenced
        ) as session,
        Progress("packing") as progress,
    ):
        manifest = pack_stream(
            session, name, options, replace=replace, progress=lambda done: progress.show(done, "packing documents")
        )
    stored = packing_name(name, manifest.layout, manifest.sequence_length)
    if json:
        print_json({"name": stored, **vars(manifest), "fill": manifest.fill})
    else:
        _show(stored, manifest)


def _show(stored: str, manifest: PackManifest) -> None:
    from headrace.cli.output import print_facts

    longer = {"split": "cut", "truncate": "cut off", "drop": "left out"}[manifest.long]
    print_facts(
        {
            "packing": shown(stored),
            "samples": f"{manifest.samples:,} of {manifest.sequence_length:,} inputs, {manifest.fill:.2%} filled",
            "documents": f"{manifest.documents:,}, {manifest.long_documents:,} of them too long and {longer}",
            "left out": f"{manifest.left_out_documents:,}",
            "most in one sample": f"{manifest.most_pieces:,}",
        }
    )
