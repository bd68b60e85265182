"""What can still be had of a volume that does not open: every object that some structure names, block by block.

A third reader, after `log.py` and `scrub.py`, and the most forgiving: it takes any superblock copy (`salvage_media`),
any valid record of any generation on any log copy (`salvage_log`), any valid node of a table (`salvage_tables`), and
goes on behind what is destroyed. It never writes. What it hands out is verified all the same (`salvage_data`): bytes
that match no checksum are lost, not guessed. The image may be anybody's: nothing in it makes the work endless.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from headrace.device import BlockDevice
from headrace.errors import VolumeDamaged
from headrace.volume import layout
from headrace.volume.layout import Blob, ObjectValue, Superblock
from headrace.volume.repair.salvage_data import BlobReader, Piece
from headrace.volume.repair.salvage_log import Values, read_log
from headrace.volume.repair.salvage_media import Lost, Media, recognise

#: Blobs of several objects that are kept open: the objects of a pack mostly lie next to each other in a listing, too.
_OPEN_BLOBS = 16


@dataclass(frozen=True)
class SalvagedObject:
    """An object that a structure names. `doubtful`: it may have been deleted or replaced since."""

    name: str
    length_bytes: int
    created_s: float
    sequence: int
    doubtful: bool


class Salvage:
    """Made by `look`. `lost`: what of the volume's own structures is gone, one line each."""

    def __init__(self, superblock: Superblock, media: Media, values: Values, lost: Lost) -> None:
        self.superblock = superblock
        self.objects: list[SalvagedObject] = []
        self._media = media
        self._values: dict[str, bytes] = {}
        self._blobs: dict[int, Blob] = {}
        self._open: OrderedDict[int, BlobReader] = OrderedDict()
        for key, value, doubtful in values.items():
            try:
                self._add(key, value, doubtful)
            except VolumeDamaged as error:
                lost.say(str(error))
        self.lost = lost.lines

    def _add(self, key: bytes, value: bytes, doubtful: bool) -> None:
        if key[:1] == layout.BLOB_KEY:
            birth = int.from_bytes(key[1:], "big")
            self._blobs[birth] = layout.decode_blob(value, birth)
            return
        name = layout.name_of(key)
        entry = ObjectValue.decode(value, name)
        self._values[name] = value
        self.objects.append(SalvagedObject(name, entry.length_bytes, entry.created_ns / 1e9, entry.sequence, doubtful))

    def pieces(self, name: str) -> Iterator[Piece]:
        """All bytes of an object in order, each piece verified or lost. ObjectNotFound is a KeyError here: ask for what
        is listed.
        """
        value = ObjectValue.decode(self._values[name], name)
        position = 0
        slices = value.slices.tolist() if value.blob is None else [(value.blob.birth, 0, value.length_bytes)]
        for birth, start, length in slices:
            blob = value.blob if value.blob is not None else self._blobs.get(birth)
            if blob is None or start + length > blob.length_bytes:
                yield Piece(position, length, None, f"blob {birth:#x} is not known any more")
            else:
                try:
                    reader = self._reader(blob, keep=value.blob is None)
                except VolumeDamaged as error:
                    yield Piece(position, length, None, str(error))
                else:
                    yield from reader.pieces(start, length, position)
            position += length

    def _reader(self, blob: Blob, *, keep: bool) -> BlobReader:
        if not keep:
            return BlobReader(self.superblock, self._media, blob)
        if blob.birth not in self._open:
            self._open[blob.birth] = BlobReader(self.superblock, self._media, blob)
            while len(self._open) > _OPEN_BLOBS:
                self._open.popitem(last=False)
        self._open.move_to_end(blob.birth)
        return self._open[blob.birth]


def look(devices: Sequence[BlockDevice], *, searching: Callable[[str], None] = lambda text: None) -> Salvage:
    """Find out what is still known. `devices`: as many members as there are; `searching` is told of long searches.

    Raises NotAVolume where no device has a superblock anywhere, VolumeTooNew, and VolumeDiverged where members with a
    copy of the log went on without each other.
    """
    lost = Lost()
    superblock, media, copies = recognise(devices, lost, searching)
    return Salvage(superblock, media, read_log(superblock, media, copies, lost), lost)


def summary(pieces: Iterable[Piece]) -> tuple[int, int, str]:
    """Good bytes, lost bytes, and the first reason, of `Salvage.pieces`."""
    good = gone = 0
    first = ""
    for piece in pieces:
        if piece.data is None:
            gone += piece.length
            first = first or piece.why
        else:
            good += piece.length
    return good, gone, first


__all__ = ["Piece", "Salvage", "SalvagedObject", "look", "summary"]
