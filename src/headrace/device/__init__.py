"""Block devices by address, and batches of transfers over many of them.

Everything above sees a `BlockDevice`, never NVMe.
"""

from headrace._native import crc32c
from headrace.device.address import (
    BlockAddress,
    FileAddress,
    MemoryAddress,
    NvmeTcpAddress,
    NvmeTcpOptions,
    Portal,
    parse_address,
)
from headrace.device.batch import Batch
from headrace.device.beat import Beat, start_beat
from headrace.device.events import EVENT, EventKind, EventPath, EventRecord, Events, status_text
from headrace.device.flush import flush_all
from headrace.device.kernel_reservations import KernelReservations
from headrace.device.lock import FileLock, lock_file
from headrace.device.native import NativeDevice, open_devices
from headrace.device.open import lanes, open_device
from headrace.device.paths import PathInfo, PathLatency, TrafficClass, UnderWay, UnsettledRange
from headrace.device.protocol import BlockDevice, Buffer
from headrace.device.ranges import ChecksumPages, Source, make_source, submit_ranges
from headrace.device.reservations import (
    AdminResult,
    Registrant,
    ReservationCapabilities,
    ReservationReport,
    Reservations,
    ReservationType,
    new_key,
)
from headrace.device.transfer import Transfer, read_batch, submit_read, submit_write, write_batch
from headrace.device.waiting import describe_wait, paths_of, troubled_paths

__all__ = [
    "EVENT",
    "AdminResult",
    "Batch",
    "Beat",
    "BlockAddress",
    "BlockDevice",
    "Buffer",
    "ChecksumPages",
    "EventKind",
    "EventPath",
    "EventRecord",
    "Events",
    "FileAddress",
    "FileLock",
    "KernelReservations",
    "MemoryAddress",
    "NativeDevice",
    "NvmeTcpAddress",
    "NvmeTcpOptions",
    "PathInfo",
    "PathLatency",
    "Portal",
    "Registrant",
    "ReservationCapabilities",
    "ReservationReport",
    "ReservationType",
    "Reservations",
    "Source",
    "TrafficClass",
    "Transfer",
    "UnderWay",
    "UnsettledRange",
    "crc32c",
    "describe_wait",
    "flush_all",
    "lanes",
    "lock_file",
    "make_source",
    "new_key",
    "open_device",
    "open_devices",
    "parse_address",
    "paths_of",
    "read_batch",
    "start_beat",
    "status_text",
    "submit_ranges",
    "submit_read",
    "submit_write",
    "troubled_paths",
    "write_batch",
]
