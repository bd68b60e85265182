"""What the catalogue says as a whole: every slice within a blob, every blob in use, no space with two owners."""

from __future__ import annotations

from headrace.errors import VolumeDamaged
from headrace.volume import layout
from headrace.volume.layout import Blob, ObjectValue, Root, Superblock, Totals
from headrace.volume.repair.findings import Reader
from headrace.volume.repair.scrub_data import Use, contradiction, space


class Contents:
    """What is there: the blobs of every object, and every blob with the objects that it is part of."""

    def __init__(self) -> None:
        self.objects: dict[str, list[int]] = {}
        self.blobs: dict[int, Use] = {}


def contents_of(
    superblock: Superblock, values: dict[bytes, bytes], totals: Totals | None, read: Reader, *, whole: bool = True
) -> Contents:  # fmt: skip
    """Objects and blobs of the catalogue; a finding for each that contradicts itself or another. Not `whole`: nodes of
    tables are lost, and with them what objects refer to.
    """

    def wrong(what: str, name: str | None = None) -> None:
        hit = None if name is None else (name, 0, None)
        read.note(what, superblock.log_member[0], superblock.log_offset[0], fatal=True, hit=hit)

    result = Contents()
    blobs = result.blobs
    #: Births of blobs that lost nodes said something of, and who refers to them.
    lost: dict[int, list[str]] = {}

    def add(blob: Blob, name: str | None) -> None:
        blobs[blob.birth] = Use(blob)
        said = contradiction(superblock, blob)
        if said is not None:
            wrong(f"blob {blob.birth:#x} contradicts itself: {said}", name)

    for key, value in values.items():
        if key[:1] == layout.BLOB_KEY:
            birth = int.from_bytes(key[1:], "big")
            try:
                add(layout.decode_blob(value, birth), None)
            except VolumeDamaged as error:
                wrong(str(error))
    for key, value in sorted(values.items()):
        if key[:1] == layout.BLOB_KEY:
            continue
        try:
            name = layout.name_of(key)
            entry = ObjectValue.decode(value, name)
        except VolumeDamaged as error:
            wrong(str(error))
            continue
        result.objects[name] = []
        position = 0
        if entry.blob is not None:
            if entry.blob.birth in blobs:
                wrong(f"blob {entry.blob.birth:#x} is there twice", name)
                continue
            add(entry.blob, name)
        slices = entry.slices.tolist() if entry.blob is None else [(entry.blob.birth, 0, entry.length_bytes)]
        for birth, start, length in slices:
            if birth not in blobs and not whole:
                lost.setdefault(birth, []).append(name)
                continue
            if birth not in blobs or start + length > blobs[birth].blob.length_bytes:
                wrong(f"a slice leaves blob {birth:#x}, or there is none", name)
                continue
            blobs[birth].slices.append((name, position, start, length))
            result.objects[name].append(birth)
            position += length
    for birth, names in lost.items():
        more = f" and of {len(set(names)) - 1:,} more" if len(set(names)) > 1 else ""
        wrong(f"where the bytes are{more} (blob {birth:#x}) only a lost node of the catalogue said", names[0])
    if not whole:
        return result
    for birth, use in blobs.items():
        if not use.slices:
            wrong(f"nothing refers to blob {birth:#x}")
    found = Totals(len(result.objects), sum(use.blob.stored_bytes for use in blobs.values()))
    if totals is not None and totals != found:
        wrong(f"the log counts {totals}, and there are {found}")
    return result


def check_space(superblock: Superblock, blobs: dict[int, Use], roots: list[Root], read: Reader) -> None:
    """No two blobs or tables share space, and all of it is data space."""
    taken: list[tuple[int, int, int, str]] = []
    for root in roots:
        for member, offset, length in root.space():
            taken.append((member, offset, offset + length, f"table {root.birth:#x}"))
    for use in blobs.values():
        if contradiction(superblock, use.blob) is not None:
            continue
        name = use.slices[0][0] if use.slices else f"blob {use.blob.birth:#x}"
        for runs, columns in ((use.blob.runs, use.blob.columns), *use.blob.tables):
            taken += [
                (member, offset, offset + size, name) for member, offset, size in space(superblock, runs, columns)
            ]
    taken.sort()
    last = (-1, 0, 0, "")
    for member, start, end, name in taken:
        hit = (name, 0, None)
        if member >= len(superblock.members):
            read.note("no such member", member, start, fatal=True, hit=hit)
            continue
        room = superblock.members[member]
        if start < room.data_offset or end > room.data_end:
            read.note("an object lies outside the data", member, start, fatal=True, hit=hit)
        if last[0] == member and start < last[2]:
            read.note(f"shared with {last[3]!r}", member, start, fatal=True, hit=hit)
        last = (member, start, end, name)
