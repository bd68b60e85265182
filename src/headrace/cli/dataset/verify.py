"""`headrace dataset verify`: does all of a dataset fit together."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.volume.common import AsJson, Degraded, VolumeOption, open_reading, shown


def verify(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The dataset.", show_default=False)],
    members: VolumeOption = None,
    degraded: Degraded = False,
    json: AsJson = False,
) -> None:
    """Read all of a dataset and hold every part against every other. Exit status 1 if anything does not fit.

    The index against the tokens, the tokens against the manifest's SHA-256 and vocabulary, the end of every document,
    the tokenizer, and each packing against the documents. Every block that is read is checked against its checksum.

    Example: `headrace dataset verify corpus --volume file:/data/a.img`
    """
    from headrace.cli.output import print_json
    from headrace.cli.progress import Progress
    from headrace.dataset import inspect
    from headrace.errors import DatasetError

    done: dict[str, str | None] = {}
    with open_reading(members, degraded=degraded) as volume, Progress("verifying") as progress:
        for step in inspect.verify(volume, name):
            done.setdefault(step.what, None)
            if step.problem is not None:
                done[step.what] = str(step.problem)
                if not json:
                    progress.say(f"DAMAGED {shown(step.what)}: {shown(str(step.problem))}")
            progress.show(step.fraction, f"verifying {shown(step.what)}")
    problems = {what: problem for what, problem in done.items() if problem is not None}
    if json:
        print_json({"name": name, "checked": list(done), "damaged": problems})
    elif not problems:
        print(f"{shown(name)}: {', '.join(shown(what) for what in done)} fit together")
    if problems:
        what, problem = next(iter(problems.items()))
        raise DatasetError(
            f"{len(problems)} of {len(done)} parts of the dataset are damaged, the first: {shown(what)}",
            where=shown(name),
            found=shown(problem),
            next_step="pack it again where that is a packing; else ingest it again, or restore it from another copy",
        )
