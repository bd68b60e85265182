"""`headrace checkpoint diff`: which tensors differ between two steps, and by how much."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.checkpoint.common import Checkpoint, chosen
from headrace.cli.volume.common import AsJson, Degraded, VolumeOption, open_reading, shown

if TYPE_CHECKING:
    from headrace.checkpoint.difference import Difference


def diff(
    first: Checkpoint,
    second: Checkpoint,
    members: VolumeOption = None,
    all_: Annotated[bool, typer.Option("--all", help="Show what is equal, too.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit status 1 where they differ.")] = False,
    degraded: Degraded = False,
    json: AsJson = False,
) -> None:
    """Which tensors differ between two checkpoints: in how many elements, by how much at most and on average. Also what
    only one of them has, and what has another dtype or shape. `--json`: one object a line.

    Both are read once, and verified, however each was sharded; memory is bounded. The average is over all elements.

    Example: `headrace checkpoint diff pretrain/step-1000 pretrain/step-2000 --volume file:/data/a.img`
    """
    import time

    from headrace.checkpoint import read_manifest
    from headrace.checkpoint.difference import differences
    from headrace.cli.output import print_json, print_table
    from headrace.cli.progress import Progress, speed

    started = time.monotonic()
    found: list[Difference] = []
    equal = 0
    with open_reading(members, degraded=degraded) as volume, Progress("comparing") as progress:
        one, two = (read_manifest(volume, chosen(volume, text)) for text in (first, second))
        total = two.summary.data_bytes
        for step in differences(volume, one, two):
            if step.found is not None:
                equal += step.found.kind == "equal"
                if all_ or step.found.kind != "equal":
                    found.append(step.found)
            text = speed(step.done_bytes, total, time.monotonic() - started)
            progress.show(min(1.0, step.done_bytes / max(total, 1)), text)
    differ = any(each.kind != "equal" for each in found)
    if json:
        for each in found:
            print_json(vars(each))
    elif found:
        columns = ("name", "", "elements", "differ", "max abs", "mean abs")
        print_table(columns, [_row(each) for each in found], right=(2, 3, 4, 5))
    elif not differ:
        print(f"{shown(str(one.summary.id))} and {shown(str(two.summary.id))}: all {equal:,} are equal")
    if differ and exit_code:
        raise typer.Exit(1)


def _row(each: Difference) -> list[str]:
    kind = {"dtype": "other dtype", "shape": "other shape", "kind": "tensor and bytes"}.get(each.kind, each.kind)
    if each.was:
        kind += f": {each.was}, {each.now}"
    if each.not_finite:
        kind += f", {each.not_finite:,} not finite"
    if not each.differing:
        return [shown(each.name), shown(kind), f"{each.elements:,}" if each.elements else "-", "-", "-", "-"]
    numbers = [f"{each.elements:,}", f"{each.differing:,}", f"{each.max_abs:.6g}", f"{each.mean_abs:.6g}"]
    return [shown(each.name), shown(kind), *numbers]
