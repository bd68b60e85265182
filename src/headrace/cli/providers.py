"""`headrace providers`."""

from __future__ import annotations

import datetime
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.plan.catalogue import Offering, Word


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
    example: Annotated[
        bool, typer.Option("--example", help="Print a file of claims with every key, for claims of your own.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """What providers claim of their storage: each claim with its source, its date and its grade.

    Nothing here was measured by headrace. Grades: measured, contract, documentation, marketing (a provider's own word),
    blog (somebody else's; shown, never put into a plan). Entries older than a year are marked. A price, or a rate, that
    is not here is unknown.

    `headrace plan --provider NAME` plans with one of them, `headrace doctor --expect NAME` holds what is measured
    against it. Claims of your own: see --example.

    Example: `headrace providers --filter transport=nvme-tcp`
    """
    if example:
        from headrace.plan.example import example_catalogue

        print(example_catalogue(), end="")
        return
    from headrace.cli.output import print_json, print_table
    from headrace.plan import load_catalogue

    today = datetime.date.today()
    found = load_catalogue(catalogue or []).filtered(filter or [])
    if json:
        print_json({"providers": [one.to_json(today) for one in found]})
        return
    if sys.stdout.isatty():
        for one in found:
            _print(one, today)
        return
    rows = []
    for one in found:
        head = [one.key, one.kind, ", ".join(one.transport), one.seen]
        stated = one.title + (f": {one.note}" if one.note else "")
        for text, word in [(stated, one.word), *((str(claim), claim.word) for claim in one.claims)]:
            rows.append([*head, text, word.grade, _date(word, today), word.source])
    print_table(["offering", "kind", "transport", "seen as", "claim", "grade", "date", "source"], rows)


def _print(one: Offering, today: datetime.date) -> None:
    """For a terminal, however narrow: what all claims of an offering have in common is said once."""

    def say(text: str, indent: int) -> None:
        width = max(40, shutil.get_terminal_size().columns - 1)
        print(textwrap.fill(text, width, initial_indent=" " * indent, subsequent_indent=" " * (indent + 4)))

    say(f"{one.key}: {one.title}", 0)
    say(f"{one.kind}, by {', '.join(one.transport)}, seen as {one.seen}" + (f"; {one.note}" if one.note else ""), 2)
    say(f"[{_told(one.word, today)}]", 2)
    for claim in one.claims:
        say(f"{claim}" + ("" if claim.word == one.word else f"  [{_told(claim.word, today)}]"), 4)
    print()


def _told(word: Word, today: datetime.date) -> str:
    date = "date unknown" if word.date == "unknown" else _date(word, today)
    return f"{word.grade}, {date}: {word.source}"


def _date(word: Word, today: datetime.date) -> str:
    age = word.age(today)
    return word.date if not age or word.date == "unknown" else f"{word.date} ({age})"
