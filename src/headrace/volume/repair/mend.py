"""Writing bad copies again where another copy is good: the same bytes to the same places, by a session.

Opening a session mends superblocks, heartbeats, the log, and nodes of the catalogue's tables. What it does not read are
the checksum tables of blobs, which would be all of them: those a checker found.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np

from headrace.device import crc32c
from headrace.errors import DeviceError, ObjectNotFound
from headrace.volume import layout
from headrace.volume.data.objects import StoredBlob
from headrace.volume.repair.findings import Finding
from headrace.volume.volume import Volume
from headrace.volume.writing.session import Session


def mend(session: Session, findings: Iterable[Finding]) -> list[str]:
    """Write what the checker (`scrub`) found bad in one copy and good in another. Returns what could not be mended, one
    line each. Raises what ends a session.
    """
    left: list[str] = []
    pages = {(one.birth, one.page): one.object_name for one in findings if not one.fatal and one.birth is not None}
    session.mend_tables()
    for (birth, page), name in pages.items():
        assert birth is not None and page is not None and name is not None
        try:
            # Nothing is deleted, and no space used again, while the session's lock is held.
            with session.lock:
                _mend_page(session, name, birth, page)
        except DeviceError as error:
            left.append(f"page {page} of the checksum table of blob {birth:#x}: {error}")
    return left + [text for text in session.volume.info().warnings if "catalogue" in text]


def _mend_page(session: Session, name: str, birth: int, page: int) -> None:
    volume = session.volume
    for blob in _blobs(session, name, birth):
        places = [_place(blob, copy, page) for copy in range(len(blob.tables))]
        copies = [_read(volume, member, offset, length) for member, offset, length in places]
        identity = volume.superblock.volume_id + struct.pack("<QQ", birth, layout.TABLE_BLOCK | page)
        root = int(blob.entry.roots[page])
        good = [data for data in copies if data is not None and crc32c(data, crc32c(identity)) == root]
        for (member, offset, _), data in zip(places, copies, strict=True):
            if good and data != good[0]:
                session.write_structure(member, offset, good[0])


def _blobs(session: Session, name: str, birth: int) -> list[StoredBlob]:
    """The blob, where it is still there. What of it is bad may be in no object: then `name` is that of none."""
    value = session.catalog.get(layout.blob_key(birth))
    if value is not None:
        return [StoredBlob(layout.decode_blob(value, birth), session.volume.stripe_bytes)]
    try:
        return [blob for blob in session.volume.stored(name).blobs if blob.entry.birth == birth]
    except ObjectNotFound:
        return []


def _place(blob: StoredBlob, copy: int, page: int) -> tuple[int, int, int]:
    size = blob.entry.table_page_bytes
    pieces = blob.tables[copy].pieces(np.array([page * size]), np.array([1]))
    return int(pieces.member[0]), int(pieces.offset[0]), int(pieces.length[0])


def _read(volume: Volume, member: int, offset: int, length: int) -> bytes | None:
    buffer = np.empty(layout.align_up(length), np.uint8)
    try:
        volume.devices[member].read_into(offset, buffer)
    except DeviceError:
        return None
    return buffer[:length].tobytes()
