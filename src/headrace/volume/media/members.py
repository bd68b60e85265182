"""Members of a volume: opened by address, recognised by their superblocks, put in order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.device import BlockDevice, open_device
from headrace.errors import DeviceError, HeadraceError, NotAVolume, UsageError, VolumeDamaged, VolumeTooNew
from headrace.volume import layout
from headrace.volume.data.absent import AbsentMember, present
from headrace.volume.data.durable import write_through
from headrace.volume.layout import SUPERBLOCK_BYTES, Epoch, Superblock, superblock_offsets
from headrace.volume.media import epochs
from headrace.volume.media.foreign import foreign_signature

#: A comma before a scheme, a path or nothing.
_BETWEEN_ADDRESSES = re.compile(r",(?=\s*(?:[A-Za-z][A-Za-z0-9+.-]*://|block:|file:|mem:|/|,|$))")


@dataclass
class Members:
    """The members in order (`AbsentMember` where one is missing), and what their superblocks say."""

    devices: list[BlockDevice]
    #: That of the current epoch.
    superblock: Superblock
    #: Each member's own, as far as they are there.
    blocks: dict[int, Superblock]
    #: Copies of the log that are read and written.
    copies: tuple[int, ...]
    #: Of members that have another history than `keep`, which was asked for.
    given_up: list[Epoch] = field(default_factory=list)
    #: What is wrong with single copies of superblocks; the next session mends it.
    warnings: list[str] = field(default_factory=list)
    #: What is not there, or not up to date.
    notes: list[str] = field(default_factory=list)


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
    return open_some(uris, read_only=read_only, degraded=False)[0]


def open_some(uris: Sequence[str], *, read_only: bool, degraded: bool) -> tuple[list[BlockDevice], list[str]]:
    """All or none; `degraded`: those that can be opened, at least one, and why others cannot."""
    devices: list[BlockDevice] = []
    failed: list[str] = []
    try:
        for uri in uris:
            try:
                devices.append(open_device(uri, read_only=read_only))
            except DeviceError as error:
                if not degraded or (not devices and uri == uris[-1]):
                    raise
                failed.append(str(error))
    except BaseException:
        close_all(devices)
        raise
    return devices, failed


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
                found=foreign_signature(device),
                next_step="check the address, or make one with `headrace volume create`",
            )
        )
    best = max(found, key=lambda superblock: superblock.generation)
    said = []
    for problem in problems:
        what = "there is none" if isinstance(problem, NotAVolume) else problem.what
        if problem.expected is not None:
            what += f": expected {problem.expected}, found {problem.found}"
        said.append(f"a copy of the superblock is bad at {problem.where or device.uri}: {what}")
    if any(one.generation < best.generation for one in found):
        said.append(f"a copy of the superblock is older than the other at {device.uri}")
    return best, said


def recognise(devices: Sequence[BlockDevice], *, degraded: bool = False, keep: int | None = None) -> Members:
    """Put the members in order. NotAVolume where one is missing (and not `degraded`), given twice, or belongs to
    another volume; VolumeDiverged where they have no common history, unless `keep` is a member whose history goes on.
    """
    placed: dict[int, BlockDevice] = {}
    blocks: dict[int, Superblock] = {}
    first: Superblock | None = None
    warnings: list[str] = []
    notes: list[str] = []
    unread: list[HeadraceError] = []
    for device in present(devices):
        try:
            superblock, problems = read_superblock(device)
        except (DeviceError, VolumeDamaged) as error:
            if not degraded:
                raise
            unread.append(error)
            notes.append(f"left out: {error}")
            continue
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
        if _shape(superblock) != _shape(first):
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
        placed[index], blocks[index] = device, superblock
    if first is None:
        raise unread[0]
    missing = [index for index in range(len(first.members)) if index not in placed]
    if missing and not degraded:
        raise NotAVolume(
            "members of the volume are missing",
            where=", ".join(device.uri for device in devices),
            expected=f"{len(first.members)} members",
            found=f"{len(placed)}; number {', '.join(map(str, missing))} not among them",
            next_step="give all addresses, in any order, or go on without some with degraded=True (--degraded)",
        )
    best, given_up = epochs.newest(blocks, keep)
    copies = epochs.counting(best, blocks)
    notes += [f"member {index} is missing (id {best.members[index].id.hex()})" for index in missing]
    for index in epochs.lagging(best, blocks):
        notes.append(
            f"member {index} was away: it knows {epochs.said(blocks[index].epoch)}, not {epochs.said(best.epoch)}"
        )
    for copy in range(layout.LOG_COPIES):
        if copy not in copies:
            notes.append(
                f"log copy {copy} (member {best.log_member[copy]}) does not count; a session with it rebuilds it"
            )
    ordered: list[BlockDevice] = [
        placed.get(index) or AbsentMember(index, row) for index, row in enumerate(best.members)
    ]
    return Members(ordered, best, blocks, copies, given_up, warnings, notes)


def _shape(superblock: Superblock) -> tuple[object, ...]:
    """What all members have in common for good."""
    log = superblock.log_member, superblock.log_offset, superblock.area_bytes, superblock.area_count
    return superblock.members, superblock.stripe_bytes, log


def mend_superblocks(devices: Sequence[BlockDevice]) -> None:
    """Write the bytes of the newest good copy over a bad or an older one, on every member; it is not touched itself.
    One that cannot be read is bad, too, and good again once it was written."""
    for device in present(devices):
        found: dict[int, tuple[int, bytes]] = {}
        for offset in superblock_offsets(device.size_bytes):
            buffer = np.empty(SUPERBLOCK_BYTES, np.uint8)
            try:
                device.read_into(offset, buffer)
                found[offset] = Superblock.decode(buffer.tobytes(), device.uri).generation, buffer.tobytes()
            except (NotAVolume, VolumeDamaged, DeviceError):
                found[offset] = 0, b""
        best = max(found.values())
        for offset, one in found.items():
            if one[0] < best[0]:
                write_through(device, offset, best[1])


def write_superblocks(devices: Sequence[BlockDevice], superblock: Superblock, order: Sequence[int]) -> None:
    """The same superblock to these members, one after another, each as its own."""
    for index in order:
        data = replace(superblock, member_index=index).encode()
        for offset in superblock_offsets(devices[index].size_bytes):
            write_through(devices[index], offset, data)
