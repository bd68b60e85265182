"""`headrace providers`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def providers(
    filter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Only those for which it holds: provider, name, kind, transport, seen, grade or what; may be given "
            "again.",
            show_default=False,
        ),
    ] = None,
    catalogue: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Claims of your own, as TOML, too; may be given again.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """What providers claim of their storage: each claim with its source, its date and its grade.

    Nothing here was measured by headrace. Grades: measured, contract, documentation, marketing (a provider's own word),
    blog (somebody else's; shown, never put into a plan). Entries older than a year are marked. A price, or a rate, that
    is not here is unknown. `headrace plan --provider NAME` plans with one of them.

    Example: `headrace providers --filter transport=nvme-tcp`
    """
    import datetime

    from headrace.cli.output import print_json, print_table
    from headrace.plan import load_catalogue

    today = datetime.date.today()
    found = load_catalogue(catalogue or []).filtered(filter or [])
    if json:
        print_json({"providers": [one.to_json(today) for one in found]})
        return
    rows = []
    for one in found:
        head = [one.key, one.kind, ", ".join(one.transport), one.seen]
        stated = one.title + (f": {one.note}" if one.note else "")
        for text, word in [(stated, one.word), *((str(claim), claim.word) for claim in one.claims)]:
            age = word.age(today)
            date = word.date if not age or word.date == "unknown" else f"{word.date} ({age})"
            rows.append([*head, text, word.grade, date, word.source])
    print_table(["offering", "kind", "transport", "seen as", "claim", "grade", "date", "source"], rows)
