"""What else a device may hold: signatures that are looked for before a volume is made on it.

The places are those of `wipefs` (util-linux, libblkid/src/superblocks and /partitions). An unknown thing is not found:
this is a seat belt, not a proof that a device is free.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from headrace.device import BlockDevice

#: Read from the start of a device, and from its end.
_HEAD_BYTES, _TAIL_BYTES = 256 << 10, 768 << 10

#: (offset, bytes there, what it is)
_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0x438, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
    (0, b"XFSB", "an XFS file system"),
    (0x10040, b"_BHRfS_M", "a Btrfs file system"),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (0x36, b"FAT", "a FAT file system"),
    (0x52, b"FAT32", "a FAT file system"),
    (0x8001, b"CD001", "an ISO 9660 file system"),
    (0, b"hsqs", "a SquashFS image"),
    (0, b"LUKS\xba\xbe", "a LUKS encrypted device"),
    (0x1000, b"\xfc\x4e\x2b\xa9", "a member of a Linux RAID (md 1.2)"),
    (0, b"\xfc\x4e\x2b\xa9", "a member of a Linux RAID (md 1.1)"),
    (4096 - 10, b"SWAPSPACE2", "swap space"),
    (0, b"bluestore block device", "a Ceph BlueStore OSD"),
    (512, b"EFI PART", "a GPT partition table"),
    (4096, b"EFI PART", "a GPT partition table"),
    (0x1018, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81", "a bcache device"),
    (0x1018, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef", "a bcachefs file system"),
    (516, b"!Stra0tis\x86\xff\x02^\x41rh", "a Stratis pool"),
    (0, b"dmvdo001", "a VDO volume"),
    (0, b"integrt\0", "a dm-integrity device"),
    (3, b"-FVE-FS-", "a BitLocker volume"),
    (3, b"ReFS\0", "a ReFS file system"),
    (32, b"ORCLDISK", "a disk of Oracle ASM"),
    (32, b"NXSB", "an APFS container"),
    (1024, b"H+\0\x04", "an HFS+ file system"),
    (1024, b"\xe2\xe1\xf5\xe0", "an EROFS image"),
    (0x8000, b"JFS1", "a JFS file system"),
    (0x10000, b"\x01\x16\x19\x70", "a GFS2 file system"),
    *((block * 2, b"OCFSV2", "an OCFS2 file system") for block in (512, 1024, 2048, 4096)),
    (0, b"QFI\xfb", "a QCOW2 image"),
    (0, b"KDMV", "a VMDK image"),
    (0, b"vhdxfile", "a VHDX image"),
)


#: As `zpool` writes it on hosts of either order of bytes.
_ZFS = (b"\x0c\xb1\xba\x00\x00\x00\x00\x00", b"\x00\x00\x00\x00\x00\xba\xb1\x0c")
_MD = (b"\xfc\x4e\x2b\xa9", b"\xa9\x2b\x4e\xfc")
_DRBD = (b"\x83\x74\x02\x6b", b"\x83\x74\x02\x6c", b"\x83\x74\x02\x6d")


def foreign_signature(device: BlockDevice) -> str | None:
    """What the device holds, in words; None where nothing that is known is there. DeviceError."""
    # To the last block: a copy of a partition table is in it.
    size_bytes = device.size_bytes // device.block_bytes * device.block_bytes
    head = np.empty(min(_HEAD_BYTES, size_bytes), np.uint8)
    device.read_into(0, head)
    data = head.tobytes()
    for offset, magic, what in _SIGNATURES:
        if data[offset : offset + len(magic)] == magic:
            return what
    for sector in range(4):
        # The label is in one of the first four sectors.
        if data[sector * 512 : sector * 512 + 8] == b"LABELONE" and data[sector * 512 + 24 :][:8] == b"LVM2 001":
            return "an LVM physical volume"
    if data[510:512] == b"\x55\xaa" and any(data[446 + 16 * row + 4] for row in range(4)):
        return "an MBR partition table"
    # ZFS: the uberblocks of the first label, of which a young pool has written some.
    if _among(data, range(128 << 10, len(data), 1024), _ZFS):
        return "a ZFS pool"
    tail = np.empty(min(_TAIL_BYTES, size_bytes), np.uint8)
    device.read_into(size_bytes - len(tail), tail)
    return _at_the_end(tail.tobytes(), size_bytes)


def _at_the_end(data: bytes, size_bytes: int) -> str | None:
    """Of those who write there, or there, too. `data`: the last bytes of so many."""
    start = size_bytes - len(data)
    # md 0.90: the last whole 64 KiB but one; 1.0: 8 KiB before the end, at a multiple of 4 KiB.
    places = (size_bytes // (64 << 10) * (64 << 10) - (64 << 10), (size_bytes // 512 - 16) // 8 * 4096)
    if _among(data, (place - start for place in places), _MD):
        return "a member of a Linux RAID (md 0.90 or 1.0)"
    if _among(data, (len(data) - 512, len(data) - 4096), (b"EFI PART",)):
        return "a GPT partition table, at its end"
    if _among(data, [len(data) - 512], (b"\xde\x11\xde\x11", b"\x11\xde\x11\xde")):
        return "a member of a RAID (DDF)"
    if _among(data, (len(data) - 1024, len(data) - 8192), (b"Intel Raid ISM Cfg Sig. ",)):
        return "a member of a RAID (Intel)"
    if _among(data, [size_bytes // 4096 * 4096 - 4096 + 60 - start], _DRBD):
        return "a member of DRBD"
    # ZFS has two of its four labels here; their uberblocks are at multiples of 1 KiB, too.
    if _among(data, range(-start % 1024, len(data), 1024), _ZFS):
        return "a ZFS pool"
    return None


def _among(data: bytes, places: Iterable[int], magics: tuple[bytes, ...]) -> bool:
    """Is any of these, of one length, at any of the places?"""
    return any(place >= 0 and data[place : place + len(magics[0])] in magics for place in places)
