"""Salvage, the members: which of them are there, and which copies of the log are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from headrace.device import BlockDevice
from headrace.errors import DeviceError, NotAVolume, VolumeDamaged, VolumeDiverged, VolumeTooNew
from headrace.volume import layout
from headrace.volume.layout import ALIGN, AreaHeader, Superblock
from headrace.volume.media import epochs
from headrace.volume.repair.sides import given_up

#: Read at once where a whole device is searched.
_SEARCH_BYTES = 4 << 20
#: Lines of what is lost, at most: who has lost more than that has no use for more.
_MOST_LINES = 1000


class Lost:
    """What of the volume's own structures is gone: one line each, and each once."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}
        self._more = 0

    def say(self, text: str) -> None:
        if len(self._lines) < _MOST_LINES:
            self._lines[text] = None
        else:
            self._more += text not in self._lines

    @property
    def lines(self) -> list[str]:
        return [*self._lines] + ([f"and {self._more:,} things more"] if self._more else [])


class Media:
    """The members that are there, by number."""

    def __init__(self, members: dict[int, BlockDevice]) -> None:
        self.members = members

    def read(self, member: int, offset: int, length: int) -> tuple[bytes | None, str]:
        """The bytes, or None and why."""
        device = self.members.get(member)
        if device is None:
            return None, f"member {member} is missing"
        size = layout.align_up(length, device.block_bytes)
        # Before memory is taken for it.
        if not 0 <= offset <= device.size_bytes - size or offset % ALIGN:
            return None, f"member {member} ends before offset {offset + size}, or nothing begins at {offset}"
        buffer = np.empty(size, np.uint8)
        try:
            device.read_into(offset, buffer)
        except DeviceError as error:
            return None, f"member {member} cannot be read at offset {offset}: {error}"
        return buffer[:length].tobytes(), ""

    def get(self, member: int, offset: int, length: int) -> bytes:
        """DeviceError where there is nothing to be had."""
        data, why = self.read(member, offset, length)
        if data is None:
            raise DeviceError(why)
        return data

    @property
    def size_bytes(self) -> int:
        return sum(device.size_bytes for device in self.members.values())


def recognise(
    devices: Sequence[BlockDevice], lost: Lost, searching: Callable[[str], None]
) -> tuple[Superblock, Media, list[int]]:
    """The superblock of the current epoch, the members, and the log copies to read. NotAVolume where no device has a
    superblock anywhere, VolumeTooNew, VolumeDiverged.
    """
    found = [_superblocks_of(device) for device in devices]
    if not any(found):
        for place, device in enumerate(devices):
            searching(f"no superblock at either end: searching all of {device.uri}")
            found[place] = _search(device)
    blocks = [block for each in found for block in each]
    if not blocks:
        raise NotAVolume(
            "none of these devices has a superblock of a volume anywhere",
            where=", ".join(device.uri for device in devices),
            next_step="without one nothing can be verified, and so nothing be salvaged",
        )
    best = max(blocks, key=_newest)
    media = Media({})
    strangers: list[BlockDevice] = []
    for device, each in zip(devices, found, strict=True):
        mine = [block for block in each if block.volume_id == best.volume_id]
        if not mine and each:
            lost.say(f"{device.uri}: it is a member of another volume, {each[0].volume_id.hex()}: left out")
        elif not mine:
            strangers.append(device)
        else:
            index = mine[0].member_index
            if index in media.members:
                also = media.members[index].uri
                lost.say(f"{device.uri} says that it is member {index}, as {also} does: left out")
                continue
            media.members[index] = device
            if len(each) < 2:
                lost.say(f"member {index} ({device.uri}): one copy of its superblock")
    _place(best, media, strangers, lost)
    own = _own(best, blocks)
    left = given_up(own, media.get)
    for index in left:
        lost.say(f"member {index}: it went on without the others, and nothing was committed there: left out")
    best = max((block for index, block in own.items() if index not in left), key=_newest)
    for index in range(len(best.members)):
        if index not in media.members:
            lost.say(f"member {index}: it is missing")
        elif media.members[index].size_bytes < best.members[index].size_bytes:
            lost.say(f"member {index} ({media.members[index].uri}): it is smaller than it was")
    return best, media, _copies(best, own, left, media, lost)


def _newest(block: Superblock) -> tuple[int, int, bool]:
    return block.log_epoch, block.generation, block.member_index in block.log_member


def _own(best: Superblock, blocks: Sequence[Superblock]) -> dict[int, Superblock]:
    """Each member's newer one."""
    own: dict[int, Superblock] = {}
    for block in blocks:
        if block.volume_id == best.volume_id:
            known = own.setdefault(block.member_index, block)
            own[block.member_index] = max(known, block, key=lambda one: one.generation)
    return own


def _copies(
    best: Superblock, own: Mapping[int, Superblock], left: Sequence[int], media: Media, lost: Lost
) -> list[int]:  # fmt: skip
    """The log copies to read: of the newest epoch that has one here. An older one knows objects that are gone, and two
    that went on without each other do not add up. VolumeDiverged.
    """
    for index, block in own.items():
        if index in left or epochs.known(best, block):
            continue
        if index in best.log_member:
            raise VolumeDiverged(
                "members of the volume went on without each other",
                where=f"member {best.member_index} and member {index}",
                found=f"epochs {best.log_epoch} and {block.log_epoch}",
                next_step="give the members of one side only, and then those of the other",
            )
        lost.say(
            f"member {index}: it went on in another history, {epochs.said(block.epoch)}, which member "
            f"{best.member_index} does not know: what was written to it then fails the checksums of this one"
        )
    # A member without a superblock may have any copy.
    numbers = {
        copy: own[member].log_epoch if member in own else 0
        for copy, member in enumerate(best.log_member)
        if member in media.members and member not in left and (member not in own or own[member].epoch.counts(copy))
    }
    newest = max(numbers.values(), default=0)
    for copy, epoch in numbers.items():
        if epoch < newest:
            of = f"it is of epoch {epoch}, not {newest}" if epoch else "nothing says which epoch it is of"
            lost.say(f"log copy {copy} (member {best.log_member[copy]}): {of}: left out")
    if newest and newest < best.log_epoch:
        lost.say(f"the log: what was committed since epoch {best.log_epoch} began, on members that are missing")
    return [copy for copy, epoch in numbers.items() if epoch == newest]


def _superblocks_of(device: BlockDevice) -> list[Superblock]:
    found = []
    for offset in layout.superblock_offsets(device.size_bytes):
        data, _ = Media({0: device}).read(0, offset, layout.SUPERBLOCK_BYTES)
        block = None if data is None else _decode(data, device.uri)
        if block is not None:
            found.append(block)
    return found


def _decode(data: bytes, where: str) -> Superblock | None:
    try:
        return Superblock.decode(data, where)
    except VolumeTooNew:
        raise
    except (NotAVolume, VolumeDamaged):
        return None


def _search(device: BlockDevice) -> list[Superblock]:
    """A superblock in another place: of a device that grew or shrank, or lies in another partition."""
    media = Media({0: device})
    for start in range(0, device.size_bytes, _SEARCH_BYTES):
        data, _ = media.read(0, start, min(_SEARCH_BYTES, device.size_bytes // ALIGN * ALIGN - start))
        if data is None:
            continue
        at = data.find(layout.MAGIC)
        while at >= 0:
            if at % ALIGN == 0:
                block = _decode(data[at : at + layout.SUPERBLOCK_BYTES], device.uri)
                if block is not None:
                    return [block]
            at = data.find(layout.MAGIC, at + 1)
    return []


def _place(block: Superblock, media: Media, strangers: list[BlockDevice], lost: Lost) -> None:
    """Which missing member is a device without superblocks? Log copies show it themselves; of the others, the only one
    that is left with the right size.
    """
    for device in strangers:
        free = [index for index in range(len(block.members)) if index not in media.members]
        marked = [
            index
            for index in free
            for copy in range(layout.LOG_COPIES)
            if block.log_member[copy] == index and _has_log(block, copy, device)
        ]
        sized = [index for index in free if block.members[index].size_bytes == device.size_bytes]
        plain = [index for index in sized if index not in block.log_member]
        fits = marked or (plain if len(plain) == 1 else []) or (sized if len(sized) == 1 else [])
        if fits:
            media.members[fits[0]] = device
            lost.say(f"member {fits[0]} ({device.uri}): both copies of its superblock; known by what it holds")
        else:
            lost.say(f"{device.uri}: no superblock of this volume, and it cannot be told which member it is: left out")


def _has_log(block: Superblock, copy: int, device: BlockDevice) -> bool:
    media = Media({0: device})
    for area in range(block.area_count):
        data, _ = media.read(0, block.area_offset(copy, area), ALIGN)
        if data is not None and AreaHeader.decode(data, block.volume_id, area) is not None:
            return True
    heartbeat, _ = media.read(0, block.log_offset[copy], ALIGN)
    return heartbeat is not None and layout.Heartbeat.decode(heartbeat, block.volume_id) is not None
