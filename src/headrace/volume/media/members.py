"""Members of a volume: opened by address, recognised by their superblocks, put in order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.device import BlockDevice, open_device
from headrace.errors import DeviceError, HeadraceError, NotAVolume, UsageError, VolumeDamaged, VolumeTooNew
from headrace.volume.data.durable import write_through
from headrace.volume.layout import SUPERBLOCK_BYTES, Superblock, superblock_offsets

#: A comma before a scheme, a path or nothing.
_BETWEEN_ADDRESSES = re.compile(r",(?=\s*(?:[A-Za-z][A-Za-z0-9+.-]*://|block:|file:|mem:|/|,|$))")


@dataclass
class Members:
    """The members in order, the superblock of the first, and what is wrong with single copies."""

    devices: list[BlockDevice]
    superblock: Superblock
    warnings: list[str] = field(default_factory=list)


def addresses(uris: str | Sequence[str]) -> list[str]:
    """One address, several separated by commas, or a sequence of addresses.

    A comma within an address separates its portals: `nvme+tcp://A,B/NQN,nvme+tcp://C/NQN` are two addresses.
    """
    listed = _BETWEEN_ADDRESSES.split(uris) if isinstance(uris, str) else list(uris)
    result = [uri.strip() for uri in listed if uri.strip()]
    if not result:
        raise UsageError("a volume needs the address of at least one member")
    return result


def open_all(uris: Sequence[str], *, read_only: bool) -> list[BlockDevice]:
    """All or none."""
    devices: list[BlockDevice] = []
    try:
        for uri in uris:
            devices.append(open_device(uri, read_only=read_only))
    except BaseException:
        close_all(devices)
        raise
    return devices


def close_all(devices: Sequence[BlockDevice]) -> None:
    """Close every one, then raise the first error."""
    errors: list[HeadraceError] = []
    for device in devices:
        try:
            device.close()
        except HeadraceError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def read_superblock(device: BlockDevice) -> tuple[Superblock, list[str]]:
    """The newest valid copy, and what is wrong with the other. Raises as `Superblock.decode`, or DeviceError."""
    found: list[Superblock] = []
    problems: list[HeadraceError] = []
    if device.size_bytes < 2 * SUPERBLOCK_BYTES:
        raise NotAVolume("the device is too small to be a member of a volume", where=device.uri)
    for offset in superblock_offsets(device.size_bytes):
        where = f"{device.uri} offset {offset}"
        buffer = np.empty(SUPERBLOCK_BYTES, np.uint8)
        try:
            device.read_into(offset, buffer)
            found.append(Superblock.decode(buffer.tobytes(), where))
        except (NotAVolume, VolumeDamaged, VolumeTooNew, DeviceError) as error:
            problems.append(error)
    for problem in problems:
        if isinstance(problem, VolumeTooNew):
            raise problem
    if not found:
        damaged = [problem for problem in problems if not isinstance(problem, NotAVolume)]
        raise (
            damaged[0]
            if damaged
            else NotAVolume(
                "this is not a headrace volume",
                where=device.uri,
                next_step="check the address, or make one with `headrace volume create`",
            )
        )
    return max(found, key=lambda superblock: superblock.generation), [str(problem) for problem in problems]


def recognise(devices: Sequence[BlockDevice]) -> Members:
    """Put the members in order. NotAVolume where one is missing, given twice, or belongs to another volume."""
    placed: dict[int, BlockDevice] = {}
    first: Superblock | None = None
    warnings: list[str] = []
    for device in devices:
        superblock, problems = read_superblock(device)
        warnings.extend(problems)
        if first is None:
            first = superblock
        if superblock.volume_id != first.volume_id:
            raise NotAVolume(
                "the members belong to different volumes",
                where=device.uri,
                expected=f"volume {first.volume_id.hex()}",
                found=f"volume {superblock.volume_id.hex()}",
            )
        if (superblock.members, superblock.stripe_bytes, superblock.area_bytes, superblock.log_offset) != (
            first.members,
            first.stripe_bytes,
            first.area_bytes,
            first.log_offset,
        ):
            raise VolumeDamaged("the members' superblocks contradict each other", where=device.uri)
        index = superblock.member_index
        if index in placed:
            raise NotAVolume("a member was given twice", where=f"{placed[index].uri} and {device.uri}")
        if device.size_bytes < superblock.members[index].size_bytes:
            raise VolumeDamaged(
                "the member is smaller than it was",
                where=device.uri,
                expected=f"{superblock.members[index].size_bytes} bytes",
                found=f"{device.size_bytes} bytes",
            )
        placed[index] = device
    assert first is not None
    missing = [index for index in range(len(first.members)) if index not in placed]
    if missing:
        raise NotAVolume(
            "members of the volume are missing",
            where=", ".join(device.uri for device in devices),
            expected=f"{len(first.members)} members",
            found=f"{len(placed)}; number {', '.join(map(str, missing))} not among them",
            next_step="give the addresses of all members, in any order",
        )
    ordered = [placed[index] for index in range(len(first.members))]
    if first.member_index != 0:
        first, _ = read_superblock(ordered[0])
    return Members(ordered, first, warnings)


def mend_superblocks(devices: Sequence[BlockDevice]) -> None:
    """Write the bytes of the good copy over a bad one, on every member; the good one is not touched."""
    for device in devices:
        good: list[tuple[int, bytes]] = []
        bad = []
        for offset in superblock_offsets(device.size_bytes):
            buffer = np.empty(SUPERBLOCK_BYTES, np.uint8)
            device.read_into(offset, buffer)
            try:
                good.append((Superblock.decode(buffer.tobytes(), device.uri).generation, buffer.tobytes()))
            except (NotAVolume, VolumeDamaged):
                bad.append(offset)
        for offset in bad if good else ():
            write_through(device, offset, max(good)[1])
