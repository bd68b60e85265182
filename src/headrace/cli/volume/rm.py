"""`headrace volume rm`: objects end, all in one commit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.volume.common import (
    AsJson,
    Degraded,
    TakeOver,
    Unfenced,
    VolumeOption,
    Yes,
    confirm,
    holding,
    open_reading,
    open_writing,
    shown,
)

if TYPE_CHECKING:
    from headrace.volume import ObjectInfo, Volume


def rm(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Objects, or patterns with `*`, `?` and `[...]`.", show_default=False),
    ] = None,
    members: VolumeOption = None,
    prefix: Annotated[
        list[str] | None,
        typer.Option("--prefix", "-r", help="All names that begin so; may be given again.", show_default=False),
    ] = None,
    literal: Annotated[bool, typer.Option("--literal", help="NAME is never a pattern.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Say what would be deleted, and stop.")] = False,
    yes: Yes = False,
    takeover: TakeOver = False,
    unfenced: Unfenced = False,
    degraded: Degraded = False,
    json: AsJson = False,
) -> None:
    """Delete objects: all of them in one commit, or none.

    Patterns and prefixes ask first on a terminal, and need `--yes` elsewhere. `*` goes over `/`, too.

    Example: `headrace volume rm run/step-00000010/rank-0.data --volume file:/data/a.img`
    """
    from headrace.cli.output import print_json
    from headrace.errors import UsageError
    from headrace.units import format_bytes

    if not names and not prefix:
        raise UsageError("nothing to delete was named", expected="NAME... or --prefix", next_step="see --help")
    patterns = [] if literal else [name for name in names or () if any(c in name for c in "*?[")]
    exact = [name for name in dict.fromkeys(names or ()) if name not in patterns]
    with open_reading(members, degraded=degraded) if dry_run else open_writing(members, degraded=degraded) as volume:
        gone = {name: volume.stat(name).length_bytes for name in exact}
        gone |= {entry.name: entry.length_bytes for entry in _matching(volume, patterns, prefix or ())}
        what = f"{len(gone):,} object{'' if len(gone) == 1 else 's'}, {format_bytes(sum(gone.values()))}"
        if not dry_run:
            if patterns or prefix:
                # Asked before the volume is held for writing: nobody waits for an answer of ours.
                confirm(f"Delete {what}?", yes)
            with holding(volume, "rm", takeover, unfenced) as session, session.transaction() as transaction:
                for name in gone:
                    transaction.delete(name)
    if json:
        print_json({"deleted": not dry_run, "objects": len(gone), "bytes": sum(gone.values()), "names": [*gone]})
        return
    if dry_run:
        for name in gone:
            print(shown(name))
    elif patterns or prefix:
        print(f"deleted {what}")


def _matching(volume: Volume, patterns: Iterable[str], prefixes: Iterable[str]) -> list[ObjectInfo]:
    """Objects that a pattern or prefix means; ObjectNotFound where one means none."""
    import re
    from fnmatch import translate

    from headrace.errors import ObjectNotFound

    found = []
    for text, is_pattern in [(prefix, False) for prefix in prefixes] + [(pattern, True) for pattern in patterns]:
        # What stands before the first wildcard bounds what is looked at.
        start = re.split(r"[*?\[]", text, maxsplit=1)[0] if is_pattern else text
        accept = re.compile(translate(text)) if is_pattern else None
        matching = [entry for entry in volume.list(start) if accept is None or accept.match(entry.name)]
        if not matching:
            raise ObjectNotFound(
                f"no object has a name like {text!r}", next_step="`headrace volume ls` lists what is there"
            )
        found += matching
    return found
