"""The checker's reading of tables: every node of every copy, from the root down, written from the format's text."""

from __future__ import annotations

import struct

from headrace.device import crc32c
from headrace.errors import DeviceError, VolumeDamaged
from headrace.volume.layout import ALIGN, Root, Superblock
from headrace.volume.layout.table import Child, Node
from headrace.volume.repair.findings import Reader


def read_table(superblock: Superblock, root: Root, read: Reader) -> tuple[dict[bytes, bytes | None], bool]:
    """What a table says, from the top down, and whether that is all; a finding for each node that a copy lacks."""
    result: dict[bytes, bytes | None] = {}
    counted = deleted = blocks = 0
    whole = True
    where = f"table {root.birth:#x}"
    waiting = [(root.top, root.height - 1)]
    while waiting:
        child, level = waiting.pop()
        blocks += child.blocks
        if child.place + child.blocks > root.blocks or blocks > root.blocks:
            raise VolumeDamaged("a node of a table lies outside of it, or is there twice", where=where)
        node = _node(superblock, root, child, read)
        if node is None:
            whole = False
            continue
        if node.level != level:
            raise VolumeDamaged("a node of a table is on another level", where=where)
        keys = node.keys()
        if level:
            children = [node.child(index) for index in range(node.count)]
            waiting += [(one, level - 1) for one in reversed(children)]
            continue
        if result and next(reversed(result)) >= keys[0]:
            raise VolumeDamaged("the keys of a table do not ascend", where=where)
        values = node.values()
        counted += len(keys)
        deleted += values.count(None)
        result.update(zip(keys, values, strict=True))
    if whole and (counted, deleted) != (root.entry_count, root.deleted_count):
        raise VolumeDamaged(
            "a table has another count of keys than the log says",
            where=where,
            expected=f"{root.entry_count}, {root.deleted_count} of them deleted",
            found=f"{counted}, {deleted}",
        )
    return result, whole


def _place(root: Root, copy: int, block: int) -> tuple[int, int]:
    """Member and offset of a block of a copy."""
    for member, _, offset, length in root.copies[copy].tolist():
        if block < length // ALIGN:
            return member, offset + block * ALIGN
        block -= length // ALIGN
    raise VolumeDamaged("a node of a table lies outside of it", where=f"table {root.birth:#x}")


def _node(superblock: Superblock, root: Root, child: Child, read: Reader) -> Node | None:
    """From the first good copy; every copy is read."""
    good: bytes | None = None
    lacking: list[tuple[int, str, tuple[int, int] | None]] = []
    for copy in range(len(root.copies)):
        # A node never crosses from one extent into another.
        try:
            data = read(*_place(root, copy, child.place), child.blocks * ALIGN)
        except DeviceError as error:
            lacking.append((copy, f"cannot be read ({error.what})", None))
            continue
        crc = crc32c(data, crc32c(superblock.volume_id + struct.pack("<QQ", root.birth, child.place)))
        if crc == child.crc:
            good = data if good is None else good
        else:
            lacking.append((copy, "does not match its checksum", (child.crc, crc)))
    for copy, why, sums in lacking:
        what = f"copy {copy} of a node of table {root.birth:#x} {why}"
        read.note(what, *_place(root, copy, child.place), fatal=good is None, sums=sums)
    if good is None:
        return None
    try:
        node = Node(good)
        node.check()
    except ValueError as error:
        raise VolumeDamaged(
            "a node of a table makes no sense", where=f"table {root.birth:#x}", found=str(error)
        ) from error
    return node
