"""What a checker says, and how it reads: findings, the report, a limited rate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.device import BlockDevice
from headrace.errors import DeviceError
from headrace.volume import layout

#: Read at once.
PIECE_BYTES = 1 << 20
#: A rate that was not used may be made up for, by so many seconds of it.
_BURST_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is not as it should be. `fatal`: no other copy has it."""

    what: str
    member: int
    #: On the member, in bytes.
    offset: int
    fatal: bool
    #: The member's address.
    uri: str = ""
    object_name: str | None = None
    #: In the object, in bytes: where what is hit begins, and where it ends.
    object_offset: int | None = None
    object_end: int | None = None
    expected: str | None = None
    found: str | None = None
    #: Where it is a page of a checksum table: of which blob, and which page.
    birth: int | None = None
    page: int | None = None

    def __str__(self) -> str:
        text = f"{self.what}: member {self.member}"
        text += f" ({self.uri}) offset {self.offset}" if self.uri else f" offset {self.offset}"
        if self.object_name is not None:
            text += f", object {self.object_name!r}"
            if self.object_end is not None and self.fatal:
                text += f" bytes {self.object_offset} to {self.object_end}"
            elif self.object_offset is not None:
                text += f" offset {self.object_offset}"
        if self.expected is not None:
            text += f": expected {self.expected}, found {self.found}"
        return text


@dataclass
class ScrubReport:
    """`sequence`: of the commit that was checked."""

    sequence: int = 0
    object_count: int = 0
    bytes_read: int = 0
    #: First those of superblocks, heartbeats, log and catalogue, so many of them; then those of blobs.
    findings: list[Finding] = field(default_factory=list)
    structure_findings: int = 0

    @property
    def clean(self) -> bool:
        return not self.findings


class _Pace:
    """Not more than so many bytes a second."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        #: When what was read so far is paid for.
        self._due_s = time.monotonic()

    def pay(self, length: int) -> None:
        if self._bytes_per_s:
            # Time in which a slow device could not keep up is not made up for in a burst.
            self._due_s = max(self._due_s, time.monotonic() - _BURST_S) + length / self._bytes_per_s
            while (ahead := self._due_s - time.monotonic()) > 0:
                time.sleep(min(ahead, 1.0))


class Reader:
    """Reads at a limited rate, counts, and notes what is found."""

    def __init__(
        self,
        devices: Sequence[BlockDevice],
        report: ScrubReport,
        bytes_per_s: float | None = None,
        copies: Sequence[int] = range(layout.LOG_COPIES),
    ) -> None:
        self.devices = devices
        #: Of the log, those that count.
        self.copies = copies
        self.report = report
        self._pace = _Pace(bytes_per_s)

    def aside(self) -> Reader:
        """Another one, for what this one's report is not to say; both together keep to the rate."""
        other = Reader(self.devices, ScrubReport(), copies=self.copies)
        other._pace = self._pace
        return other

    def __call__(self, member: int, offset: int, length: int) -> bytes:
        """DeviceError, also where there is no such place."""
        if member >= len(self.devices):
            raise DeviceError(f"there is no member {member}")
        device = self.devices[member]
        if offset % layout.ALIGN or offset + layout.align_up(length, device.block_bytes) > device.size_bytes:
            raise DeviceError("there is no such place on the member", where=device.uri, found=f"offset {offset}")
        buffer = np.empty(layout.align_up(length, device.block_bytes), np.uint8)
        device.read_into(offset, buffer)
        self.report.bytes_read += length
        self._pace.pay(length)
        return buffer[:length].tobytes()

    def note(
        self,
        what: str,
        member: int,
        offset: int,
        *,
        fatal: bool,
        sums: tuple[int, int] | None = None,
        hit: tuple[str, int, int | None] | None = None,
        page: tuple[int, int] | None = None,
    ) -> None:
        """`sums`: the checksum that was expected, and the one that was found; `hit`: an object, and which bytes;
        `page`: of the checksum table of a blob, (birth, number).
        """
        name, start, end = hit or (None, None, None)
        self.report.findings.append(
            Finding(
                what=what,
                member=member,
                offset=offset,
                fatal=fatal,
                uri=self.devices[member].uri if member < len(self.devices) else "",
                object_name=name,
                object_offset=start,
                object_end=end,
                expected=None if sums is None else f"crc32c {sums[0]:#010x}",
                found=None if sums is None else f"{sums[1]:#010x}",
                birth=None if page is None else page[0],
                page=None if page is None else page[1],
            )
        )
