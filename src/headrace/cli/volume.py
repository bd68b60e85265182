"""`headrace volume`: make a volume, look into it, check it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.sizes import parse_size

if TYPE_CHECKING:
    from headrace.volume import ObjectInfo, Volume

app = typer.Typer(
    help="Create a volume, look into it, check it.\n\n"
    "A volume is named by the addresses of all its members: `nvme+tcp://HOST:PORT[,HOST:PORT]/NQN?nsid=1`, "
    "`file:/PATH`.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Members = Annotated[list[str], typer.Argument(metavar="URI...", help="Address of each member.", show_default=False)]
TakeOver = Annotated[
    bool, typer.Option("--takeover", help="Take the volume over from a job whose heart has stopped beating.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

#: Objects are copied and checked in pieces of this many bytes.
PIECE_BYTES = 8 << 20


@app.command()
def create(
    members: Members,
    name: Annotated[str, typer.Option(help="A name for people.")] = "",
    stripe: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes on one member before the next one's turn.")
    ] = "1MiB",
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite a volume that is there. Its objects are lost.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Make an empty volume over these devices.

    Example: `headrace volume create 'nvme+tcp://10.0.0.1:4420/nqn.2026-01.org.example:a?nsid=1' --name training`
    """
    from headrace.volume import Volume

    with Volume.create(members, name=name, stripe_bytes=parse_size("--stripe", stripe), force=force) as volume:
        _show_info(volume, json)


@app.command()
def info(members: Members, json: AsJson = False) -> None:
    """What a volume is, how full, and who writes to it.

    Example: `headrace volume info file:/data/a.img file:/data/b.img`
    """
    from headrace.volume import Volume

    with Volume.open(members) as volume:
        _show_info(volume, json)


@app.command("ls")
def list_objects(
    members: Members,
    prefix: Annotated[str, typer.Option(help="Only names that begin so.")] = "",
    json: AsJson = False,
) -> None:
    """The objects of a volume: length and name, in order of names.

    Example: `headrace volume ls file:/data/a.img --prefix run/`
    """
    from headrace.cli.output import print_json, print_table
    from headrace.units import format_bytes
    from headrace.volume import Volume

    with Volume.open(members) as volume:
        entries = volume.list(prefix)
    if json:
        print_json([_as_dict(entry) for entry in entries])
        return
    print_table(
        ["size", "bytes", "name"],
        [[format_bytes(entry.length_bytes), str(entry.length_bytes), entry.name] for entry in entries],
        right=(0, 1),
    )


@app.command("rm")
def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Objects to delete.", show_default=False)],
    members: Annotated[
        list[str], typer.Option("--volume", "-V", metavar="URI", help="Address of a member; once for each.")
    ],
    takeover: TakeOver = False,
) -> None:
    """Delete objects: all of them in one commit, or none.

    Example: `headrace volume rm run/step-00000010/rank-0.data --volume file:/data/a.img`
    """
    from headrace.volume import Volume

    with (
        Volume.open(members, write=True) as volume,
        volume.session(run_id="headrace volume rm", takeover="if-dead" if takeover else "refuse") as session,
        session.transaction() as transaction,
    ):
        for name in dict.fromkeys(names):
            transaction.delete(name)


@app.command()
def cat(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The object.", show_default=False)],
    members: Annotated[
        list[str], typer.Option("--volume", "-V", metavar="URI", help="Address of a member; once for each.")
    ],
) -> None:
    """Write an object to standard output; every block is verified before it is written.

    Example: `headrace volume cat models/demo.safetensors --volume file:/data/a.img > demo.safetensors`
    """
    from headrace.errors import UsageError
    from headrace.volume import Volume

    if sys.stdout.isatty():
        raise UsageError("an object is bytes and standard output a terminal", next_step="redirect it: ... > FILE")
    with Volume.open(members) as volume:
        length = volume.stat(name).length_bytes
        buffer = memoryview(bytearray(min(PIECE_BYTES, length)))
        for offset in range(0, length, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, length - offset)]
            volume.read_into(name, offset, piece)
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


@app.command()
def verify(
    members: Members,
    prefix: Annotated[str, typer.Option(help="Only names that begin so.")] = "",
    json: AsJson = False,
) -> None:
    """Read every object and check every block against its checksum. Exit status 1 if anything is damaged.

    Example: `headrace volume verify file:/data/a.img`
    """
    from headrace.cli.output import print_json, print_table
    from headrace.errors import VolumeDamaged
    from headrace.units import format_bytes
    from headrace.volume import Volume

    rows: list[tuple[str, int, str | None]] = []
    with Volume.open(members) as volume:
        for entry in volume.list(prefix):
            rows.append((entry.name, entry.length_bytes, _damage(volume, entry)))
    damaged = [row for row in rows if row[2] is not None]
    if json:
        print_json(
            {
                "objects": len(rows),
                "bytes": sum(length for _, length, _ in rows),
                "damaged": [{"name": name, "error": error} for name, _, error in damaged],
            }
        )
    else:
        print_table(
            ["size", "verdict", "name"],
            [[format_bytes(length), "good" if error is None else "DAMAGED", name] for name, length, error in rows],
            right=(0,),
        )
    if damaged:
        raise VolumeDamaged(f"{len(damaged)} of {len(rows)} objects are damaged, the first: {damaged[0][2]}")


def _damage(volume: Volume, entry: ObjectInfo) -> str | None:
    """What is wrong with an object, None where every block is good."""
    from headrace.errors import ChecksumMismatch

    buffer = memoryview(bytearray(min(PIECE_BYTES, entry.length_bytes)))
    try:
        for offset in range(0, entry.length_bytes, PIECE_BYTES):
            volume.read_into(entry.name, offset, buffer[: min(PIECE_BYTES, entry.length_bytes - offset)])
    except ChecksumMismatch as error:
        return str(error)
    return None


def _as_dict(entry: ObjectInfo) -> dict[str, object]:
    return {"name": entry.name, "length_bytes": entry.length_bytes, "sequence": entry.sequence}


def _show_info(volume: Volume, json: bool) -> None:
    from dataclasses import asdict
    from datetime import datetime, timezone

    from headrace.cli.output import print_facts, print_json
    from headrace.units import format_bytes

    info = volume.info()
    if json:
        print_json(asdict(info))
        return

    def when(seconds: float) -> str:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")

    facts = {
        "name": info.name,
        "id": info.id,
        "created": when(info.created_s),
        "format": f"version {info.version}",
    }
    for member in info.members:
        marks = [format_bytes(member.size_bytes)]
        marks += ["log copy"] if member.log_copy else []
        marks += ["volatile write cache"] if member.volatile_cache else []
        facts[f"member {member.index}"] = f"{member.uri} ({', '.join(marks)})"
    facts["stripe"] = format_bytes(info.stripe_bytes)
    space = (
        f"{format_bytes(info.used_bytes)} of {format_bytes(info.capacity_bytes)}, {format_bytes(info.free_bytes)} free"
    )
    if info.quarantined_bytes:
        space += f", {format_bytes(info.quarantined_bytes)} in quarantine"
    facts["used"] = space
    facts["objects"] = f"{info.object_count:,}, commit {info.sequence}"
    if info.writer is not None:
        writer = info.writer
        facts["writer"] = (
            f"{writer.state}: {writer.run_id!r}, process {writer.pid} on {writer.host}, since {when(writer.started_s)}"
        )
    facts["fence"] = info.fence
    for number, warning in enumerate(info.warnings, start=1):
        facts[f"warning {number}"] = warning
    print_facts(facts)
