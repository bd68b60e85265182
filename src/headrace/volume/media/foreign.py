"""What else a device may hold: signatures that are looked for before a volume is made on it.

The places are those of `wipefs` (util-linux, libblkid/src/superblocks and /partitions). An unknown thing is not found:
this is a seat belt, not a proof that a device is free.
"""

from __future__ import annotations

import numpy as np

from headrace.device import BlockDevice

#: Read from the start of a device; every signature but one lies within.
_HEAD_BYTES = 132 << 10

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
)


def foreign_signature(device: BlockDevice) -> str | None:
    """What the device holds, in words; None where nothing that is known is there. DeviceError."""
    unit = max(device.block_bytes, 4096)
    head = np.empty(min(_HEAD_BYTES, device.size_bytes // unit * unit), np.uint8)
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
    # ZFS: the uberblocks of the first label begin at 128 KiB.
    if data[128 << 10 : (128 << 10) + 8] in (b"\x00\x00\x00\x00\x00\xba\xb1\x0c", b"\x0c\xb1\xba\x00\x00\x00\x00\x00"):
        return "a ZFS pool"
    return None
