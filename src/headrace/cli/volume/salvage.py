"""`headrace volume salvage`: what can still be had of a volume that does not open."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.volume.common import AsJson, Members, addresses_of, shown

if TYPE_CHECKING:
    from headrace.device import BlockDevice
    from headrace.volume.repair.salvage import Salvage, SalvagedObject

#: In the folder that is copied to: objects whose names are none of files.
_OTHER_NAMES = "other-names"
#: Deeper ones are not made.
_MOST_FOLDERS = 200


def salvage(
    members: Members = None,
    to: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Copy out what is found, into this new folder.", show_default=False),
    ] = None,
    prefix: Annotated[str, typer.Option(help="Only names that begin so.")] = "",
    json: AsJson = False,
) -> None:
    """List what still verifies of a volume that does not open, and copy it out. It writes nothing to the volume.

    Members that are gone may be left out; those that cannot be opened are. Every byte that is copied matches its
    checksum. An object of which a part is lost becomes `NAME.damaged`, with zeros for what is lost; one whose name no
    file can have goes to `other-names/`, and the line says where. `doubtful`: it may have been deleted since. Exit
    status 1 if anything is lost.

    Example: `headrace volume salvage file:/data/a.img --to /scratch/rescued`
    """
    from headrace.cli.output import print_json
    from headrace.cli.progress import Progress, speed
    from headrace.errors import DeviceError, UsageError, VolumeDamaged
    from headrace.units import format_bytes
    from headrace.volume.media.members import close_all
    from headrace.volume.repair.salvage import look

    if to is not None and to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UsageError("the folder is there, and not empty", where=str(to), next_step="give a new one")
    started = time.monotonic()
    with Progress("looking", quiet=json) as progress:
        devices, closed = _open(addresses_of(members))
        try:
            if not devices:
                raise DeviceError("no member of the volume can be opened, the first", found=closed[0])
            found = look(devices, searching=lambda text: progress.show(0.0, text, now=True))
            objects = [one for one in found.objects if one.name.startswith(prefix)]
            if not json:
                for line in [*closed, *found.lost]:
                    progress.say(f"lost: {shown(line)}")
            total, done, rows = sum(one.length_bytes for one in objects), 0, []
            for one in objects:
                row = _take(found, one, to)
                rows.append(row)
                done += one.length_bytes
                if not json:
                    notes = [row["why"]] if row["why"] else []
                    if row["file"] is not None and Path(row["file"]).parent.name == _OTHER_NAMES:
                        notes.append(f"is in {row['file']}")
                    note = "; ".join(notes)
                    progress.say(
                        "\t".join([_verdict(row), format_bytes(one.length_bytes), shown(one.name), note]).rstrip()
                    )
                progress.show(done / max(total, 1), speed(done, total, time.monotonic() - started))
        finally:
            close_all(devices)
    damaged = sum(row["lost_bytes"] > 0 for row in rows)
    bad = sum(bool(row["lost_bytes"] or row["why"]) for row in rows)
    if json:
        print_json({"volume": found.superblock.volume_id.hex(), "lost": [*closed, *found.lost], "objects": rows})
    else:
        whole = len(rows) - bad
        print(f"{whole:,} of {len(rows):,} objects are whole" + (f", and copied to {to}" if to is not None else ""))
    if bad or closed or found.lost:
        said = [f"{damaged:,} of {len(rows):,} objects are damaged"] if damaged else []
        said += [f"{bad - damaged:,} of {len(rows):,} objects were not copied"] if bad > damaged else []
        raise VolumeDamaged(
            ", and ".join(said) or "structures of the volume are lost, and every object that is still known is whole",
            next_step="make a new volume, and copy there what was salvaged"
            if to
            else "give --to to copy out what is left",
        )


def _open(uris: list[str]) -> tuple[list[BlockDevice], list[str]]:
    from headrace.device import open_device
    from headrace.errors import DeviceError

    devices: list[BlockDevice] = []
    closed = []
    for uri in uris:
        try:
            devices.append(open_device(uri, read_only=True))
        except DeviceError as error:
            closed.append(f"a member cannot be opened: {error}")
    return devices, closed


def _take(found: Salvage, one: SalvagedObject, to: Path | None) -> dict[str, Any]:
    """Read an object, into a file where `to` is given; what of it is good."""
    from headrace.volume.repair.salvage import summary

    row: dict[str, Any] = {
        "name": one.name, "length_bytes": one.length_bytes, "doubtful": one.doubtful, "lost_bytes": 0, "why": "",
        "file": None,
    }  # fmt: skip
    if to is None:
        _, row["lost_bytes"], row["why"] = summary(found.pieces(one.name))
        return row
    beside = to / ".partial"
    try:
        to.mkdir(parents=True, exist_ok=True)
        with beside.open("xb") as file:
            for piece in found.pieces(one.name):
                if piece.data is None:
                    row["lost_bytes"] += piece.length
                    row["why"] = row["why"] or piece.why
                    file.seek(piece.length, 1)
                else:
                    file.write(piece.data)
            file.truncate(one.length_bytes)
        row["file"] = str(_name(beside, to, one.name, ".damaged" if row["lost_bytes"] else ""))
    except (OSError, OverflowError, ValueError) as error:
        row["why"] = row["why"] or f"not copied: {getattr(error, 'strerror', None) or error}"
    finally:
        beside.unlink(missing_ok=True)
    return row


def _name(file: Path, to: Path, name: str, end: str) -> Path:
    """Give the file the object's name, and where that cannot be one of a file, or another object has the place, a name
    of its own. OSError.
    """
    import hashlib

    places = [to / _OTHER_NAMES / (hashlib.sha256(name.encode()).hexdigest()[:32] + end)]
    parts = name.split("/")
    if "\0" not in name and not {"", ".", ".."}.intersection(parts) and len(parts) <= _MOST_FOLDERS:
        places.insert(0, to / (name + end))
    for path in places:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                raise FileExistsError(17, "another object has this place", str(path))
            return file.rename(path)
        except (OSError, ValueError):
            if path is places[-1]:
                raise
    raise AssertionError


def _verdict(row: dict[str, Any]) -> str:
    if row["lost_bytes"]:
        return "LOST" if row["lost_bytes"] >= row["length_bytes"] else "DAMAGED"
    return "doubtful" if row["doubtful"] else "NOT COPIED" if row["why"] else "good"
