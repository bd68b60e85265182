"""What can still be had of a volume that does not open: every object that some structure names, block by block.

A third reader, after `log.py` and `scrub.py`, and the most forgiving: it takes any superblock copy, any valid record of
any generation on any log copy, any valid node of a table, and goes on behind what is destroyed. It never writes. What
it hands out is verified all the same: bytes that match no checksum are lost, not guessed.

What it believes, in this order: the newest generation of the log whose snapshot is whole, and what comes after it.
Where that snapshot has holes, what older generations say comes first, and objects that only they know are `doubtful`:
they may have been deleted since. Where a record in the middle is destroyed, what comes behind it is taken all the same,
and so what was there before is doubtful, too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from headrace.device import BlockDevice, crc32c
from headrace.errors import DeviceError, HeadraceError, NotAVolume, VolumeDamaged, VolumeDiverged, VolumeTooNew
from headrace.volume import layout
from headrace.volume.data.extents import Extents
from headrace.volume.layout import ALIGN, AreaHeader, Blob, ObjectValue, Operation, Record, RecordHead, Superblock
from headrace.volume.layout.table import TABLE_COPIES, Child, Node, Root, Tables, TablesChanged, node_crc

#: Read at once where a whole device is searched, and where objects are read.
_SEARCH_BYTES = 4 << 20
_PIECE_BYTES = 1 << 20
#: Kinds of records that name tables (`layout.log`): all of them; and one that others became.
_TABLES = 7
_TABLES_CHANGED = 8
#: The operation of a commit that brings a table (`layout.entry`).
_ADOPT = 3


@dataclass(frozen=True)
class SalvagedObject:
    """An object that a structure names. `doubtful`: it may have been deleted or replaced since."""

    name: str
    length_bytes: int
    created_s: float
    sequence: int
    doubtful: bool


@dataclass(frozen=True)
class Piece:
    """Bytes of an object from `offset` on; `data` None: they are lost, and `why` says how."""

    offset: int
    length: int
    data: bytes | None
    why: str = ""


@dataclass
class Salvage:
    """Made by `look`. `lost`: what of the volume's own structures is gone, one line each."""

    superblock: Superblock
    lost: list[str]
    objects: list[SalvagedObject]
    _members: dict[int, BlockDevice] = field(default_factory=dict)
    _values: dict[str, bytes] = field(default_factory=dict)
    _blobs: dict[int, Blob] = field(default_factory=dict)

    def pieces(self, name: str) -> Iterator[Piece]:
        """All bytes of an object in order, each piece verified or lost. ObjectNotFound is a KeyError here: ask for what
        is listed.
        """
        try:
            value = ObjectValue.decode(self._values[name], name)
        except VolumeDamaged as error:
            yield Piece(0, 0, None, str(error))
            return
        position = 0
        slices = value.slices.tolist() if value.blob is None else [(value.blob.birth, 0, value.length_bytes)]
        for birth, start, length in slices:
            blob = value.blob if value.blob is not None else self._blobs.get(birth)
            if blob is None or start + length > blob.length_bytes:
                yield Piece(position, length, None, f"blob {birth:#x} is not known any more")
            else:
                yield from self._slice(blob, start, length, position)
            position += length

    def _slice(self, blob: Blob, start: int, length: int, position: int) -> Iterator[Piece]:
        try:
            data = _extents(blob.runs, blob.columns, blob.length_bytes, blob.checksum_block_bytes, self.superblock)
            checksums, page_lost = self._checksums(blob)
        except VolumeDamaged as error:
            yield Piece(position, length, None, str(error))
            return
        block = blob.checksum_block_bytes
        step = max(_PIECE_BYTES // block, 1) * block
        low = start // block * block
        while low < start + length:
            high = min(low + step, blob.length_bytes)
            for at, found, why in self._blocks(data, low, high - low, blob.birth, 0, checksums, page_lost):
                # A block may begin before the slice and end behind it.
                size = min(block, blob.length_bytes - at)
                first, last = max(at, start), min(at + size, start + length)
                if first < last:
                    part = None if found is None else found[first - at : last - at]
                    yield Piece(position + first - start, last - first, part, why)
            low = high

    def _checksums(self, blob: Blob) -> tuple[dict[int, int] | Sequence[int], str]:
        """By block, without those whose table page is lost, and why one is."""
        roots: list[int] = blob.roots.tolist()
        if not blob.table_page_bytes:
            return roots, ""
        count = -(-blob.length_bytes // blob.checksum_block_bytes)
        result: dict[int, int] = {}
        lost = ""
        for runs, columns in blob.tables:
            table = _extents(runs, columns, count * 4, blob.table_page_bytes, self.superblock)
            for at, page, why in self._blocks(table, 0, count * 4, blob.birth, layout.TABLE_BLOCK, roots, ""):
                lost = lost or why
                if page is not None:
                    values = np.frombuffer(page, "<u4").tolist()
                    result.update(zip(range(at // 4, at // 4 + len(values)), values, strict=True))
            if len(result) == count:
                return result, ""
        return result, lost

    def _blocks(
        self,
        extents: Extents,
        low: int,
        length: int,
        birth: int,
        mark: int,
        expected: dict[int, int] | Sequence[int],
        page_lost: str,
    ) -> Iterator[tuple[int, bytes | None, str]]:
        """(start, bytes or None, why) of every checksum block of a range that begins at one."""
        block = extents.block_bytes
        pieces = extents.pieces(np.array([low]), np.array([length]))
        rows = zip(
            *(column.tolist() for column in (pieces.member, pieces.offset, pieces.start, pieces.length)), strict=True
        )
        for member, offset, start, size in rows:
            for begin in range(0, size, max(_PIECE_BYTES, block)):
                count = min(max(_PIECE_BYTES, block), size - begin)
                found, why = _read(self._members, member, offset + begin, count)
                for at in range(0, count, block):
                    where = start + begin + at
                    if found is None:
                        yield where, None, why
                        continue
                    part = found[at : at + block]
                    index = where // block
                    known = expected.get(index) if isinstance(expected, dict) else _at(expected, index)
                    seed = layout.place_seed(self.superblock.volume_id, birth, mark | index)
                    if known is None:
                        yield where, None, f"its checksum is lost, with a page of the checksum table: {page_lost}"
                    elif crc32c(part, seed) != known:
                        yield (
                            where,
                            None,
                            f"it does not match its checksum (member {member} offset {offset + begin + at})",
                        )
                    else:
                        yield where, part, ""


def _at(values: Sequence[int], index: int) -> int | None:
    return values[index] if index < len(values) else None


def _extents(runs: layout.Rows, columns: layout.Rows, length: int, block_bytes: int, superblock: Superblock) -> Extents:
    return Extents(runs, columns, length_bytes=length, block_bytes=block_bytes, stripe_bytes=superblock.stripe_bytes)


def _read(members: dict[int, BlockDevice], member: int, offset: int, length: int) -> tuple[bytes | None, str]:
    device = members.get(member)
    if device is None:
        return None, f"member {member} is missing"
    size = layout.align_up(length, device.block_bytes)
    if offset + size > device.size_bytes:
        return None, f"member {member} ends before offset {offset + size}"
    buffer = np.empty(size, np.uint8)
    try:
        device.read_into(offset, buffer)
    except DeviceError as error:
        return None, f"member {member} cannot be read at offset {offset}: {error}"
    return buffer[:length].tobytes(), ""


# ---- members ---------------------------------------------------------------------------------------------------------


def look(devices: Sequence[BlockDevice], *, searching: Callable[[str], None] = lambda text: None) -> Salvage:
    """Find out what is still known. `devices`: as many members as there are; `searching` is told of long searches.

    Raises NotAVolume where no device has a superblock anywhere, and VolumeTooNew.
    """
    lost: list[str] = []
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
    best = max(blocks, key=lambda block: (block.log_epoch, block.generation))
    members: dict[int, BlockDevice] = {}
    strangers: list[BlockDevice] = []
    for device, each in zip(devices, found, strict=True):
        mine = [block for block in each if block.volume_id == best.volume_id]
        if not mine and each:
            lost.append(f"{device.uri}: it is a member of another volume, {each[0].volume_id.hex()}: left out")
        elif not mine:
            strangers.append(device)
        else:
            index = mine[0].member_index
            if index in members:
                lost.append(f"{device.uri} says that it is member {index}, as {members[index].uri} does: left out")
                continue
            members[index] = device
            if len(each) < 2:
                lost.append(f"member {index} ({device.uri}): one copy of its superblock")
    _place(best, members, strangers, lost)
    for index in range(len(best.members)):
        if index not in members:
            lost.append(f"member {index}: it is missing")
        elif members[index].size_bytes < best.members[index].size_bytes:
            lost.append(f"member {index} ({members[index].uri}): it is smaller than it was")
    state = _State(best, members, _copies(best, blocks, members, lost), lost)
    state.read()
    return state.result()


def _copies(
    best: Superblock, blocks: Sequence[Superblock], members: dict[int, BlockDevice], lost: list[str]
) -> list[int]:
    """The log copies to read: of the newest epoch that has one here. An older one knows objects that are gone, and two
    that went on without each other do not add up. VolumeDiverged.
    """
    own: dict[int, Superblock] = {}
    for block in blocks:
        if block.volume_id == best.volume_id:
            known = own.setdefault(block.member_index, block)
            own[block.member_index] = max(known, block, key=lambda one: one.generation)
    for index, block in own.items():
        if index in best.log_member and not any(block.epoch.same(epoch) for epoch in best.epochs):
            raise VolumeDiverged(
                "members of the volume went on without each other",
                where=f"member {best.member_index} and member {index}",
                found=f"epochs {best.log_epoch} and {block.log_epoch}",
                next_step="give the members of one side only, and then those of the other",
            )
    # A member without a superblock may have any copy.
    epochs = {
        copy: own[member].log_epoch if member in own else 0
        for copy, member in enumerate(best.log_member)
        if member in members and (member not in own or own[member].epoch.counts(copy))
    }
    newest = max(epochs.values(), default=0)
    for copy, epoch in epochs.items():
        if epoch < newest:
            of = f"it is of epoch {epoch}, not {newest}" if epoch else "nothing says which epoch it is of"
            lost.append(f"log copy {copy} (member {best.log_member[copy]}): {of}: left out")
    if newest and newest < best.log_epoch:
        lost.append(f"the log: what was committed since epoch {best.log_epoch} began, on members that are missing")
    return [copy for copy, epoch in epochs.items() if epoch == newest]


def _superblocks_of(device: BlockDevice) -> list[Superblock]:
    found = []
    for offset in layout.superblock_offsets(device.size_bytes):
        block = _superblock_at(device, offset)
        if block is not None:
            found.append(block)
    return found


def _superblock_at(device: BlockDevice, offset: int) -> Superblock | None:
    data, _ = _read({0: device}, 0, offset, layout.SUPERBLOCK_BYTES)
    return None if data is None else _decode(data, device.uri)


def _decode(data: bytes, where: str) -> Superblock | None:
    try:
        return Superblock.decode(data, where)
    except VolumeTooNew:
        raise
    except (NotAVolume, VolumeDamaged):
        return None


def _search(device: BlockDevice) -> list[Superblock]:
    """A superblock in another place: of a device that grew or shrank, or lies in another partition."""
    for start in range(0, device.size_bytes, _SEARCH_BYTES):
        data, _ = _read({0: device}, 0, start, min(_SEARCH_BYTES, device.size_bytes // ALIGN * ALIGN - start))
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


def _place(block: Superblock, members: dict[int, BlockDevice], strangers: list[BlockDevice], lost: list[str]) -> None:
    """Which missing member is a device without superblocks? Log copies show it themselves; of the others, the only one
    that is left with the right size.
    """
    for device in [*strangers]:
        free = [index for index in range(len(block.members)) if index not in members]
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
            members[fits[0]] = device
            lost.append(f"member {fits[0]} ({device.uri}): both copies of its superblock; known by what it holds")
        else:
            lost.append(
                f"{device.uri}: no superblock of this volume, and it cannot be told which member it is: left out"
            )


def _has_log(block: Superblock, copy: int, device: BlockDevice) -> bool:
    if block.log_offset[copy] + layout.RESERVED_BYTES + block.area_count * block.area_bytes > device.size_bytes:
        return False
    for area in range(block.area_count):
        data, _ = _read({0: device}, 0, block.area_offset(copy, area), ALIGN)
        if data is not None and AreaHeader.decode(data, block.volume_id, area) is not None:
            return True
    heartbeat, _ = _read({0: device}, 0, block.log_offset[copy], ALIGN)
    return heartbeat is not None and layout.Heartbeat.decode(heartbeat, block.volume_id) is not None


# ---- the log and the catalogue ---------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """A table, and what it was made of: of which it says all, as long as it is whole."""

    root: Root
    parts: Sequence[_Layer | Operation] = ()


def _become_one(steps: list[_Layer | Operation], changed: TablesChanged) -> None:
    """The new table stands where the newest of those was that it was made of. Changes between them are in it, too: a
    table has all that was recent when it came. So are deletions, which it need not say."""
    removed = set(changed.removed)
    layers = [index for index, step in enumerate(steps) if isinstance(step, _Layer)]
    places = [index for index in layers if steps[index].root.birth in removed]  # type: ignore[union-attr]
    # Where the log has lost all of those, it is older than all that is known.
    first, end = (places[0], places[-1] + 1) if places else (0, 0)
    first = max((index + 1 for index in layers if index < first), default=0)
    parts = steps[first:end]
    steps[first:end] = [_Layer(root, parts) for root in changed.added]


class _Generation(NamedTuple):
    """Records of one generation of the log, those of its snapshot first."""

    records: list[Record]
    #: Its snapshot is whole, and so stands for itself.
    whole: bool
    #: Blocks before which records are lost.
    gaps: list[int]


def _parts(records: dict[int, Record]) -> _Generation:
    position, previous = 1, 0
    base = records[min(records)].sequence
    snapshot: list[Record] = []
    rest: list[Record] = []
    gaps: list[int] = []
    whole = True
    for index in sorted(records):
        record = records[index]
        if index != position or record.previous != previous:
            gaps.append(index)
            whole &= bool(rest)
        (rest if rest or record.sequence != base else snapshot).append(record)
        position, previous = index + record.blocks, record.crc
    whole = whole and any(record.kind in (layout.SNAPSHOT, _TABLES) for record in snapshot)
    return _Generation(snapshot + rest, whole, gaps)


class _State:
    """What the records add up to, forgiving all that is not there."""

    def __init__(
        self, superblock: Superblock, members: dict[int, BlockDevice], copies: Sequence[int], lost: list[str]
    ) -> None:
        self.superblock = superblock
        self.members = members
        #: Of the log, those that are read.
        self.copies = copies
        self.lost = lost
        self.values: dict[bytes, bytes] = {}
        #: Keys of which it is not sure that they still hold.
        self.doubtful: set[bytes] = set()

    def read(self) -> None:
        records = self._records()
        if not records:
            self.lost.append("the log: no valid record on any copy")
        newest = max(records, default=0)
        parts = {generation: _parts(found) for generation, found in records.items()}
        # What came before a whole snapshot is not looked at: its tables may be overwritten long since.
        first = max((generation for generation in parts if parts[generation].whole), default=0)
        for generation in sorted(records):
            if generation >= first:
                self._generation(generation, parts[generation], newest)
        if records and not parts[newest].whole and len(records) > 1:
            self.lost.append("the newest snapshot of the catalogue: what older ones say stands in for it")

    def _records(self) -> dict[int, dict[int, Record]]:
        """By generation and block, from whichever copy has each."""
        found: dict[int, dict[int, Record]] = {}
        block = self.superblock
        for copy in self.copies:
            for area in range(block.area_count):
                start = block.area_offset(copy, area)
                member = block.log_member[copy]
                data = bytearray()
                for at in range(0, block.area_bytes, _SEARCH_BYTES):
                    size = min(_SEARCH_BYTES, block.area_bytes - at)
                    part, why = _read(self.members, member, start + at, size)
                    if part is None and member in self.members:
                        self.lost.append(f"log copy {copy}, area {area}: {why}")
                    data += bytes(size) if part is None else part
                self._area(bytes(data), found)
        return found

    def _area(self, data: bytes, found: dict[int, dict[int, Record]]) -> None:
        volume_id = self.superblock.volume_id
        for index in range(1, len(data) // ALIGN):
            at = index * ALIGN
            head = RecordHead.decode(data[at : at + layout.RECORD_BYTES], volume_id, index)
            if head is None or at + head.blocks * ALIGN > len(data):
                continue
            begin = at + layout.RECORD_BYTES
            record = head.with_payload(data[begin : begin + head.payload_bytes])
            if record is not None:
                found.setdefault(record.generation, {}).setdefault(index, record)

    def _generation(self, generation: int, parts: _Generation, newest: int) -> None:
        """Apply one generation's records in order."""
        if generation == newest:
            for index in parts.gaps:
                self.lost.append(f"the log: records before block {index} of generation {generation}, on every copy")
        # Older generations stand in where the snapshot has holes: they may know objects that are gone.
        self.doubtful.update(self.values)
        self._take(self._steps(generation, parts.records))
        if parts.gaps and parts.whole:
            self.doubtful.update(self.values)

    def _steps(self, generation: int, records: Sequence[Record]) -> list[_Layer | Operation]:
        """Tables and single changes in the order in which they take effect."""
        steps: list[_Layer | Operation] = []
        for record in records:
            where = f"log record {record.sequence} of generation {generation}"
            try:
                if record.kind == _TABLES:
                    # Oldest first, so that newer entries stand.
                    steps += map(_Layer, reversed(Tables.decode(record.payload, where).roots))
                elif record.kind == _TABLES_CHANGED:
                    _become_one(steps, TablesChanged.decode(record.payload, where))
                elif record.kind in (layout.COMMIT, layout.SNAPSHOT):
                    if self.superblock.version == 1:
                        _, operations = layout.decode_version1(record.payload, where)
                    else:
                        _, _, operations = layout.decode_operations(record.payload, where)
                    steps += [
                        _Layer(Root.decode(one.value, where)) if one.kind == _ADOPT else one for one in operations
                    ]
            except VolumeDamaged as error:
                self.lost.append(str(error))
        return steps

    def _take(self, steps: Iterable[_Layer | Operation]) -> None:
        for step in steps:
            if isinstance(step, _Layer):
                self._table(step)
            else:
                self._set(step.key, step.value if step.kind == layout.PUT else None)

    def _set(self, key: bytes, value: bytes | None) -> None:
        self.doubtful.discard(key)
        if value is None:
            self.values.pop(key, None)
        else:
            self.values[key] = value

    # ---- tables ----

    def _table(self, layer: _Layer) -> None:
        known = len(self.lost)
        entries = [*self._entries(layer.root, layer.root.top, layer.root.height - 1)]
        if len(self.lost) > known and layer.parts:
            # What it was made of stands in, where that is still there; some of it may have been deleted since.
            lost = [*self.lost]
            self._take(layer.parts)
            self.lost = lost
            self.doubtful.update(self.values)
        for key, value in entries:
            self._set(key, value)

    def _entries(self, root: Root, child: Child, level: int) -> Iterator[tuple[bytes, bytes | None]]:
        node = self._node(root, child)
        if node is None or node.level != level:
            self.lost.append(
                f"table {root.birth:#x} of the catalogue: a node at block {child.place}, on both copies"
                + (f", with {'about ' if level else ''}{root.entry_count} entries or fewer" if not level else "")
            )
            return
        if level == 0:
            yield from zip(node.keys(), node.values(), strict=True)
            return
        for index in range(node.count):
            yield from self._entries(root, node.child(index), level - 1)

    def _node(self, root: Root, child: Child) -> Node | None:
        for copy in range(TABLE_COPIES):
            data = self._node_bytes(root, copy, child)
            if data is None or node_crc(data, self.superblock.volume_id, root.birth, child.place) != child.crc:
                continue
            try:
                return Node(data)
            except ValueError:
                continue
        return None

    def _node_bytes(self, root: Root, copy: int, child: Child) -> bytes | None:
        left, place, result = child.blocks, child.place, b""
        for member, _, offset, length in root.copies[copy].tolist():
            blocks = length // ALIGN
            if place < blocks and left:
                count = min(left, blocks - place)
                part, _ = _read(self.members, member, offset + place * ALIGN, count * ALIGN)
                if part is None:
                    return None
                result += part
                left -= count
                place = 0
            else:
                place -= blocks
        return result if not left else None

    # ---- the result ----

    def result(self) -> Salvage:
        blobs: dict[int, Blob] = {}
        values: dict[str, bytes] = {}
        objects = []
        for key, value in sorted(self.values.items()):
            try:
                if key[:1] == layout.BLOB_KEY:
                    birth = struct.unpack(">Q", key[1:9].rjust(8, b"\0"))[0]
                    blobs[birth] = layout.decode_blob(value, birth)
                    continue
                name = layout.name_of(key)
                entry = ObjectValue.decode(value, name)
            except HeadraceError as error:
                self.lost.append(str(error))
                continue
            values[name] = value
            objects.append(
                SalvagedObject(name, entry.length_bytes, entry.created_ns / 1e9, entry.sequence, key in self.doubtful)
            )
        return Salvage(self.superblock, [*dict.fromkeys(self.lost)], objects, self.members, values, blobs)


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
