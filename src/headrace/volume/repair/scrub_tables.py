"""The checker's reading of tables: every node of every copy, from the root down, written from the format's text."""

from __future__ import annotations

import struct
from collections.abc import Callable

from headrace.device import crc32c
from headrace.errors import DeviceError, VolumeDamaged
from headrace.volume.layout import ALIGN, Root, Superblock
from headrace.volume.layout.table import Child, Node

#: Member, offset, bytes. DeviceError.
Read = Callable[[int, int, int], bytes]
#: What is wrong, on which member, where; and whether no other copy has it.
Bad = Callable[[str, int, int, bool], None]


def read_table(superblock: Superblock, root: Root, read: Read, bad: Bad) -> dict[bytes, bytes | None]:
    """What a table says, from the top down; a finding for each node that a copy lacks."""
    result: dict[bytes, bytes | None] = {}
    counted = deleted = 0
    whole = True
    waiting = [(root.top, root.height - 1)]
    while waiting:
        child, level = waiting.pop()
        node = _node(superblock, root, child, read, bad)
        if node is None:
            whole = False
            continue
        if node.level != level:
            raise VolumeDamaged("a node of a table is on another level", where=f"table {root.birth:#x}")
        keys = node.keys()
        if level:
            children = [node.child(index) for index in range(node.count)]
            waiting += [(one, level - 1) for one in reversed(children)]
            continue
        if result and next(reversed(result)) >= keys[0]:
            raise VolumeDamaged("the keys of a table do not ascend", where=f"table {root.birth:#x}")
        values = node.values()
        counted += len(keys)
        deleted += values.count(None)
        result.update(zip(keys, values, strict=True))
    if whole and (counted, deleted) != (root.entry_count, root.deleted_count):
        raise VolumeDamaged("a table has another count of keys than the log says", where=f"table {root.birth:#x}")
    return result


def _node(superblock: Superblock, root: Root, child: Child, read: Read, bad: Bad) -> Node | None:
    """From the first good copy; every copy is read."""
    good: bytes | None = None
    lacking: list[tuple[int, int, int]] = []
    for copy, rows in enumerate(root.copies):
        parts: list[bytes] = []
        first = 0
        place = (0, 0)
        for member, _, offset, length in rows.tolist():
            low, high = max(child.place, first), min(child.place + child.blocks, first + length // ALIGN)
            if low < high:
                place = place if parts else (member, offset + (low - first) * ALIGN)
                try:
                    parts.append(read(member, offset + (low - first) * ALIGN, (high - low) * ALIGN))
                except DeviceError:
                    parts.append(b"")
            first += length // ALIGN
        data = b"".join(parts)
        identity = superblock.volume_id + struct.pack("<QQ", root.birth, child.place)
        if crc32c(data, crc32c(identity)) == child.crc:
            good = data if good is None else good
        else:
            lacking.append((copy, *place))
    for copy, member, offset in lacking:
        what = f"copy {copy} of a node of table {root.birth:#x} does not match its checksum"
        bad(what, member, offset, good is None)
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
