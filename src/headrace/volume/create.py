"""Making a volume: areas first, superblocks last, so that it is there whole or not at all."""

from __future__ import annotations

import secrets
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.device import BlockAddress, BlockDevice, FileAddress, parse_address
from headrace.errors import NotAVolume, UsageError, VolumeDamaged, VolumeTooNew
from headrace.settings import check_text
from headrace.units import format_bytes
from headrace.volume import layout
from headrace.volume.data.durable import write_through
from headrace.volume.layout import ALIGN, RESERVED_BYTES, AreaHeader, Member, Record, Superblock, align_up
from headrace.volume.media.foreign import foreign_signature
from headrace.volume.media.members import read_superblock
from headrace.volume.writing import fence
from headrace.volume.writing.heartbeat import INTERVAL_S, new_heartbeat

MIN_STRIPE = 64 << 10
MIN_AREA = 128 << 10
#: The log is short, whatever the volume holds: what is not recent is in tables.
MAX_DEFAULT_AREA = 1 << 20
#: Two pairs (`catalog/commit.py`, `refuge`).
AREA_COUNT = 4
#: Data regions begin and end at multiples of this.
_DATA_ALIGN = 64 << 10


def create(devices: Sequence[BlockDevice], *, name: str, stripe_bytes: int, log_bytes: int | None, force: bool) -> None:
    """Write an empty volume. UsageError where a device holds something already, or is held by another host, unless
    `force`. From then on the targets refuse the writes of everybody but the next session.
    """
    superblocks = plan_volume(devices, name=name, stripe_bytes=stripe_bytes, log_bytes=log_bytes, force=force)
    for device in devices:
        if device.read_only:
            raise UsageError(
                "the device can only be read", where=device.uri, next_step="give one that may be written to"
            )
    held = fence.take(devices, judged=None, anybody=force)
    try:
        _write(held.devices, superblocks, _never_used(superblocks[0], held))
    finally:
        held.close()


def _never_used(superblock: Superblock, held: fence.Fence) -> bytes:
    """The heartbeat block: under which key the members are held although no session has ever been."""
    if held.ticket(superblock.volume_id, 0) is None:
        return bytes(ALIGN)
    now = new_heartbeat(0, "headrace volume create", INTERVAL_S, nonce=held.hostid.bytes, key=held.key)
    return now._replace(state=layout.CLOSED).encode(superblock.volume_id)


def _write(devices: Sequence[BlockDevice], superblocks: Sequence[Superblock], heartbeat: bytes) -> None:
    blank = bytes(ALIGN)
    for device in devices:
        for offset in layout.superblock_offsets(device.size_bytes):
            write_through(device, offset, blank)
    first = superblocks[0]
    nothing = layout.encode_operations([], 0, layout.Totals(0, 0))
    snapshot, _ = Record(layout.SNAPSHOT, 0, 0, 1, 0, 0, nothing).encode(first.volume_id, 1)
    header = AreaHeader(1, first.log_epoch, 0, 1, 0, first.created_ns).encode(first.volume_id, 0)
    for copy in range(layout.LOG_COPIES):
        device = devices[first.log_member[copy]]
        write_through(device, first.log_offset[copy], heartbeat)
        for area in range(1, first.area_count):
            write_through(device, first.area_offset(copy, area), blank)
        write_through(device, first.area_offset(copy, 0) + ALIGN, snapshot)
        write_through(device, first.area_offset(copy, 0), header)
    for device, superblock in zip(devices, superblocks, strict=True):
        for offset in layout.superblock_offsets(device.size_bytes):
            write_through(device, offset, superblock.encode())


def plan_volume(
    devices: Sequence[BlockDevice], *, name: str, stripe_bytes: int, log_bytes: int | None, force: bool
) -> list[Superblock]:
    """What `create` would write, and everything that it would refuse; only reads."""
    check(devices, name=name, stripe_bytes=stripe_bytes, force=force)
    area = area_bytes(min(device.size_bytes for device in devices[: layout.LOG_COPIES]), log_bytes)
    return plan(devices, name=name, stripe_bytes=stripe_bytes, area=area)


def check(devices: Sequence[BlockDevice], *, name: str, stripe_bytes: int, force: bool) -> None:
    """Everything that can be refused before a byte is written."""
    if not 1 <= len(devices) <= layout.MAX_MEMBERS:
        raise UsageError("members of a volume", expected=f"1 to {layout.MAX_MEMBERS}", found=str(len(devices)))
    check_text("the name of a volume", name)
    if len(name.encode()) > 128:
        raise UsageError("the name of a volume", expected="at most 128 bytes of UTF-8", found=f"{len(name.encode())}")
    if not MIN_STRIPE <= stripe_bytes <= 1 << 30 or stripe_bytes & (stripe_bytes - 1):
        raise UsageError("stripe_bytes", expected="a power of two from 64 KiB to 1 GiB", found=str(stripe_bytes))
    # Every `mem:` device is another one, whatever its address.
    uris = [_identity(device) for device in devices if not device.uri.startswith("mem:")]
    if len(set(uris)) != len(uris) or len(set(map(id, devices))) != len(devices):
        raise UsageError("a member was given twice", where=", ".join(device.uri for device in devices))
    for device in devices:
        if device.block_bytes > ALIGN:
            raise UsageError("the logical block is too long", where=device.uri, expected=f"at most {ALIGN}")
        if force:
            continue
        what = "the device holds a volume"
        try:
            held = repr(read_superblock(device)[0].name)
        except NotAVolume:
            what = "the device holds something else"
            foreign = foreign_signature(device) if device.size_bytes >= ALIGN else None
            if foreign is None and fence.holder(device) is not None:
                what, foreign = "another host holds the device", "a reservation"
            if foreign is None:
                continue
            held = foreign
        except (VolumeDamaged, VolumeTooNew) as error:
            held = str(error)
        raise UsageError(
            what,
            where=device.uri,
            found=held,
            next_step="choose another device, or destroy what it holds with force=True (--force)",
        )


def _identity(device: BlockDevice) -> str:
    """The same for two addresses of one thing, as far as this can be known without writing to it."""
    address = parse_address(device.uri) if device.uri.startswith(("file:", "block:")) else None
    if isinstance(address, (FileAddress, BlockAddress)):
        try:
            found = Path(address.path).stat()
        except OSError:
            return device.uri
        # A device node by what it stands for, a file by where it is.
        return f"{found.st_rdev}" if stat.S_ISBLK(found.st_mode) else f"{found.st_dev}:{found.st_ino}"
    said = device.describe()
    # A namespace has one name behind all its portals.
    names = [str(said.get(key, "")) for key in ("uuid", "nguid")]
    return next((name for name in names if name.strip("0")), device.uri)


def area_bytes(smallest: int, wanted: int | None) -> int:
    """Bytes of one log area; there are four on each log copy."""
    if wanted is None:
        return max(MIN_AREA, min(MAX_DEFAULT_AREA, smallest // 64 // ALIGN * ALIGN))
    if wanted < MIN_AREA:
        raise UsageError("log_bytes", expected=f"at least {MIN_AREA}", found=str(wanted))
    return align_up(wanted)


def plan(devices: Sequence[BlockDevice], *, name: str, stripe_bytes: int, area: int) -> list[Superblock]:
    """The superblock of every member."""
    region = RESERVED_BYTES + AREA_COUNT * area
    log_member = (0, 1) if len(devices) > 1 else (0, 0)
    log_offset = [RESERVED_BYTES, RESERVED_BYTES]
    members = []
    for index, device in enumerate(devices):
        end = layout.superblock_offsets(device.size_bytes)[1]
        start = RESERVED_BYTES
        if index in log_member:
            start += region
        if len(devices) == 1:
            # Both copies on one member: far apart, so that what hits one place does not hit the other.
            end = (end - region) // _DATA_ALIGN * _DATA_ALIGN
            log_offset[1] = end
        start, end = align_up(start, _DATA_ALIGN), end // _DATA_ALIGN * _DATA_ALIGN
        if end - start < stripe_bytes:
            raise UsageError(
                "the device is too small to be a member",
                where=device.uri,
                expected=f"at least {format_bytes(start + stripe_bytes + device.size_bytes - max(end, 0))}",
                found=format_bytes(device.size_bytes),
                next_step="give a larger one, or a smaller stripe_bytes or log_bytes",
            )
        members.append(Member(secrets.token_bytes(16), device.size_bytes, start, end))
    volume_id, now, epoch = secrets.token_bytes(16), time.time_ns(), secrets.token_bytes(16)
    return [
        Superblock(
            volume_id=volume_id,
            name=name,
            generation=1,
            member_index=index,
            members=tuple(members),
            stripe_bytes=stripe_bytes,
            area_bytes=area,
            created_ns=now,
            log_offset=(log_offset[0], log_offset[1]),
            log_member=log_member,
            incompat=layout.PAIRED_CHECKSUMS | layout.AREAS,
            area_count=AREA_COUNT,
            epochs=(layout.Epoch(1, began_ns=now, identity=epoch),),
        )
        for index in range(len(devices))
    ]
