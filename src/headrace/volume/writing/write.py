"""Writing an object's bytes: data, checksum table, flush, and the proof for the commit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.device import BlockDevice, write_batch
from headrace.device.joined import raw_of_blocks
from headrace.device.protocol import Buffer
from headrace.device.reference import U8, as_bytes
from headrace.errors import UsageError
from headrace.volume import layout
from headrace.volume.data.absent import refuse, solid
from headrace.volume.data.durable import write_durably
from headrace.volume.data.extents import U32, Extents, Pieces
from headrace.volume.writing.grant import Grant, Receipt
from headrace.volume.writing.paced import write_paced
from headrace.volume.writing.parts import Parts, write_parts


def buffer_bytes(buffer: Buffer | Parts) -> int:
    """Length in bytes of anything with the buffer protocol, or of parts."""
    if isinstance(buffer, (np.ndarray, Parts)):
        return int(buffer.nbytes)
    return memoryview(buffer).nbytes


def contiguous(buffer: Buffer, where: str) -> U8:
    """The bytes of a buffer, never a copy. UsageError where they do not lie one after another."""
    try:
        if buffer_bytes(buffer) == 0:
            return np.zeros(0, np.uint8)
        return as_bytes(buffer)
    except UsageError as error:
        raise UsageError(error.what, where=where, found=error.found, next_step="copy it, to lie in one piece") from None
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(
            "a buffer must be C-contiguous bytes",
            where=where,
            found=str(error),
            next_step="copy it, to lie in one piece",
        ) from None


def members_of(devices: Sequence[BlockDevice], *extents: Extents) -> list[BlockDevice]:
    """The devices that these extents lie on."""
    indices: set[int] = set()
    for each in extents:
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
    refuse(devices, pieces.member, f"blob {birth:#x}")
    write_batch(solid(devices), batch, [buffer], checksums)


def write_grant(devices: Sequence[BlockDevice], grant: Grant, buffer: Buffer | Parts) -> Receipt:
    """Write a grant's bytes and its checksum table until they are durable."""
    if buffer_bytes(buffer) != grant.length_bytes:
        raise UsageError(
            "the buffer does not fit its grant",
            where=f"object {grant.name!r}",
            expected=f"{grant.length_bytes} bytes",
            found=f"{buffer_bytes(buffer)} bytes",
        )
    view = buffer if isinstance(buffer, Parts) else contiguous(buffer, f"object {grant.name!r}")
    data, tables = grant.data_extents(), grant.table_extents()
    writer = BlobWriter(devices, data, tables, view, birth=grant.birth, volume_id=grant.volume_id)
    write_durably(members_of(devices, data, *tables), writer)
    if isinstance(view, Parts):
        view.written = writer.raw()
    return Receipt(
        session=grant.session,
        transaction=grant.transaction,
        name=grant.name,
        birth=grant.birth,
        length_bytes=grant.length_bytes,
        roots=writer.roots.astype("<u4").tobytes(),
    )


class BlobWriter:
    """Writes all of a blob and its checksum table from one buffer or from parts, the same bytes each time it is called.
    Nothing is flushed.
    """

    def __init__(
        self,
        devices: Sequence[BlockDevice],
        data: Extents,
        tables: Sequence[Extents],
        buffer: Buffer | Parts,
        *,
        birth: int,
        volume_id: bytes,
    ) -> None:
        self._devices, self._data, self._tables, self._buffer = devices, data, tables, buffer
        self._birth, self._volume_id = birth, volume_id
        self._checksums = np.zeros(-(-data.length_bytes // data.block_bytes), np.uint32)
        #: uint32, complete after the first call.
        self.roots: U32 = self._checksums

    def raw(self) -> int:
        """The raw CRC32C (`headrace.device.joined`) of all bytes, as they were when they were last written."""
        return raw_of_blocks(
            self._checksums,
            block_bytes=self._data.block_bytes,
            total_bytes=self._data.length_bytes,
            volume_id=self._volume_id,
            birth=self._birth,
        )

    def __call__(self) -> None:
        birth, volume_id, sums = self._birth, self._volume_id, self._checksums
        buffer = self._buffer
        if isinstance(buffer, Parts) and buffer.pace is not None:
            write_paced(self._devices, self._data, buffer, sums, buffer.pace, birth=birth, volume_id=volume_id)
        elif isinstance(buffer, Parts):
            write_parts(self._devices, self._data, buffer, sums, birth=birth, volume_id=volume_id)
        else:
            write_extents(self._devices, self._data, buffer, sums, birth=birth, volume_id=volume_id)
        self.roots = write_table(self._devices, self._tables, sums, birth=birth, volume_id=volume_id)


def write_table(
    devices: Sequence[BlockDevice], tables: Sequence[Extents], checksums: U32, *, birth: int, volume_id: bytes
) -> U32:
    """Write every copy of a checksum table (none: it lies in the entry); returns the roots. Nothing is flushed."""
    if not tables:
        return checksums
    pieces = Pieces.join([table.whole() for table in tables])
    batch = pieces.batch(
        buffer=np.zeros(1, np.uint32),
        buffer_offset=np.zeros(1, np.int64),
        birth=birth,
        block_bytes=tables[0].block_bytes,
        volume_id=volume_id,
        mark=layout.TABLE_BLOCK,
    )
    roots = np.zeros(batch.checksum_count, np.uint32)
    refuse(devices, pieces.member, f"blob {birth:#x}")
    write_batch(solid(devices), batch, [np.ascontiguousarray(checksums, "<u4").view(np.uint8)], roots)
    # Copies are of one content, and so are their roots.
    return roots[: len(roots) // len(tables)]
