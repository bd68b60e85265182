"""Writing an object's bytes: data, checksum table, flush, and the proof for the commit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.device import BlockDevice, write_batch
from headrace.device.protocol import Buffer
from headrace.errors import UsageError
from headrace.volume import layout
from headrace.volume.durable import write_durably
from headrace.volume.extents import U32, Extents
from headrace.volume.grant import Grant, Receipt


def buffer_bytes(buffer: Buffer) -> int:
    """Length in bytes of anything with the buffer protocol."""
    if isinstance(buffer, np.ndarray):
        return int(buffer.nbytes)
    return memoryview(buffer).nbytes


def members_of(devices: Sequence[BlockDevice], *extents: Extents | None) -> list[BlockDevice]:
    """The devices that these extents lie on."""
    indices: set[int] = set()
    for each in extents:
        if each is not None:
            indices.update(int(member) for member in np.unique(each.columns["member"]))
    return [devices[index] for index in sorted(indices)]


def write_extents(
    devices: Sequence[BlockDevice],
    extents: Extents,
    buffer: Buffer,
    checksums: U32,
    *,
    birth: int,
    volume_id: bytes,
    mark: int = 0,
    start: int = 0,
    first_block: int = 0,
) -> None:
    """Write `buffer` to `extents` from byte `start` on; `checksums` (uint32[blocks]) are filled. Nothing is flushed.

    `start` is a multiple of the checksum block, and so is the end, unless it is the end of the extents. `first_block`:
    index within its object of the extents' first checksum block.
    """
    length = buffer_bytes(buffer)
    if length == 0:
        return
    pieces = extents.pieces(np.full(1, start, np.int64), np.full(1, length, np.int64))
    if first_block:
        pieces = pieces._replace(start=pieces.start + first_block * extents.block_bytes)
    batch = pieces.batch(
        buffer=np.zeros(1, np.uint32),
        buffer_offset=np.zeros(1, np.int64),
        birth=birth,
        block_bytes=extents.block_bytes,
        volume_id=volume_id,
        mark=mark,
    )
    # Segments lie in the order of the object's bytes, so their checksums do too.
    write_batch(devices, batch, [buffer], checksums)


def write_grant(devices: Sequence[BlockDevice], grant: Grant, buffer: Buffer) -> Receipt:
    """Write a grant's bytes and its checksum table until they are durable."""
    if buffer_bytes(buffer) != grant.length_bytes:
        raise UsageError(
            "the buffer does not fit its grant",
            where=f"object {grant.name!r}",
            expected=f"{grant.length_bytes} bytes",
            found=f"{buffer_bytes(buffer)} bytes",
        )
    data, table = grant.data_extents(), grant.table_extents()
    checksums = np.zeros(grant.block_count, np.uint32)
    roots = np.zeros(grant.root_count, np.uint32)

    def write() -> None:
        nonlocal roots
        write_extents(devices, data, buffer, checksums, birth=grant.birth, volume_id=grant.volume_id)
        roots = write_table(devices, table, checksums, birth=grant.birth, volume_id=grant.volume_id)

    write_durably(members_of(devices, data, table), write)
    return Receipt(
        session=grant.session,
        transaction=grant.transaction,
        name=grant.name,
        birth=grant.birth,
        length_bytes=grant.length_bytes,
        roots=roots.astype("<u4").tobytes(),
    )


def write_table(
    devices: Sequence[BlockDevice], table: Extents | None, checksums: U32, *, birth: int, volume_id: bytes
) -> U32:
    """Write a checksum table (None: it lies in the entry); returns the roots. Nothing is flushed."""
    if table is None:
        return checksums
    roots = np.zeros(-(-table.length_bytes // table.block_bytes), np.uint32)
    encoded = np.ascontiguousarray(checksums, "<u4").view(np.uint8)
    write_extents(devices, table, encoded, roots, birth=birth, volume_id=volume_id, mark=layout.TABLE_BLOCK)
    return roots
