"""What the commands of `headrace volume` share: naming a volume, opening it for writing, showing what it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.volume import Session, Volume

Members = Annotated[
    list[str] | None,
    typer.Argument(metavar="URI...", help="Address of each member. [default: $HEADRACE_VOLUME]", show_default=False),
]
VolumeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--volume",
        "-V",
        metavar="URI",
        help="Address of a member; once for each. [default: $HEADRACE_VOLUME]",
        show_default=False,
    ),
]
TakeOver = Annotated[
    bool, typer.Option("--takeover", help="Take the volume over from a job whose heart has stopped beating.")
]
Unfenced = Annotated[
    bool,
    typer.Option(
        "--unfenced", help="Write where the target has no reservations, too: nothing keeps an old writer out there."
    ),
]
Degraded = Annotated[bool, typer.Option("--degraded", help="Go on without members that are missing, or do not answer.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def addresses_of(given: Sequence[str] | None) -> list[str]:
    """The members that were given, else those of HEADRACE_VOLUME. UsageError where there are neither."""
    from headrace.errors import UsageError
    from headrace.settings import volume_addresses
    from headrace.volume.media.members import addresses

    text = volume_addresses()
    if given:
        return addresses(given)
    if text is None:
        raise UsageError(
            "no volume was named",
            expected="the address of each member, URI...",
            next_step="give them, or set HEADRACE_VOLUME; see --help",
        )
    return addresses(text)


def open_reading(given: Sequence[str] | None, *, degraded: bool = False) -> Volume:
    from headrace.volume import Volume

    return Volume.open(addresses_of(given), degraded=degraded)


@contextmanager
def open_writing(given: Sequence[str] | None, *, degraded: bool = False) -> Iterator[Volume]:
    from headrace.volume import Volume

    with Volume.open(addresses_of(given), write=True, degraded=degraded) as volume:
        yield volume


@contextmanager
def holding(volume: Volume, what: str, takeover: bool, unfenced: bool) -> Iterator[Session]:
    """A session, under the name of the command. What can be refused is refused before: then nothing was touched."""
    with volume.session(
        run_id=f"headrace volume {what}", takeover="if-dead" if takeover else "refuse", unfenced=unfenced
    ) as session:
        yield session


@contextmanager
def writing(given: Sequence[str] | None, what: str, takeover: bool, unfenced: bool) -> Iterator[Session]:
    """A session on the volume, under the name of the command."""
    with open_writing(given) as volume, holding(volume, what, takeover, unfenced) as session:
        yield session


def shown(text: str) -> str:
    """Text of a volume or a folder for people: nothing in it moves the cursor, ends a line or a column."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def confirm(question: str, yes: bool) -> None:
    """Ask on a terminal; UsageError where nobody can be asked, typer.Abort where the answer is no."""
    import sys

    from headrace.errors import UsageError

    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{question} Nobody is here to be asked", next_step="give --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise typer.Abort
