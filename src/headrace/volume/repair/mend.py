"""Writing bad copies again where another copy is good: the same bytes to the same places, by a session.

Opening a session mends superblocks, heartbeats, the log, and nodes of the catalogue's tables. What it does not read are
the checksum tables of blobs, which would be all of them: those a checker found.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from headrace.device import crc32c
from headrace.errors import DeviceError, ObjectNotFound
from headrace.volume import layout
from headrace.volume.data.objects import StoredBlob
from headrace.volume.repair.findings import Finding
from headrace.volume.volume import Volume
from headrace.volume.writing.session import Session


@dataclass(frozen=True)
class Unmended:
    """A copy that could not be written again, and why: of this page of the checksum table of a blob, or, where `birth`
    is None, of the catalogue.
    """

    why: str
    birth: int | None = None
    page: int | None = None

    def __str__(self) -> str:
        if self.birth is None:
            return self.why
        return f"page {self.page} of the checksum table of blob {self.birth:#x}: {self.why}"


def mend(session: Session, findings: Iterable[Finding]) -> list[Unmended]:
    """Write what the checker (`scrub`) found bad in one copy and good in another. Returns what could not be mended.
    Raises what ends a session.
    """
    left: list[Unmended] = []
    pages = {(one.birth, one.page): one.object_name for one in findings if not one.fatal and one.birth is not None}
    session.mend_tables()
    for (birth, page), name in pages.items():
        assert birth is not None and page is not None and name is not None
        try:
            # Nothing is deleted, and no space used again, while the session's lock is held.
            with session.lock:
                if not _mend_page(session, name, birth, page):
                    left.append(Unmended("no copy of it is good any more", birth, page))
        except DeviceError as error:
            left.append(Unmended(str(error), birth, page))
    return left + [Unmended(text) for text in session.volume.info().warnings if "catalogue" in text]


def _mend_page(session: Session, name: str, birth: int, page: int) -> bool:
    """Of a blob that is still there; False where no copy is good."""
    volume = session.volume
    for blob in _blobs(session, name, birth):
        places = [_place(blob, copy, page) for copy in range(len(blob.tables))]
        copies = [_read(volume, member, offset, length) for member, offset, length in places]
        identity = volume.superblock.volume_id + struct.pack("<QQ", birth, layout.TABLE_BLOCK | page)
        root = int(blob.entry.roots[page])
        good = next((data for data in copies if data is not None and crc32c(data, crc32c(identity)) == root), None)
        if good is None:
            return False
        for (member, offset, _), data in zip(places, copies, strict=True):
            if data != good:
                session.write_structure(member, offset, good)
    return True


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
