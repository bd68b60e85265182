"""What every device can do. Everything above this room sees a `BlockDevice`, never NVMe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from headrace.device.events import Events

#: Anything with the buffer protocol, C-contiguous; writable where it is read into.
Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]


@runtime_checkable
class BlockDevice(Protocol):
    """A range of logical blocks: read, written, flushed by offset.

    Offsets and lengths are bytes. Single calls need offsets and lengths that are multiples of `block_bytes`;
    batches (`headrace.device.batch`) may end inside a block: reads are cut, writes padded with zeros.
    Thread-safe. Every call has a deadline (the device's I/O time-out) and raises `headrace.errors.DeviceError`.
    """

    @property
    def uri(self) -> str:
        """The address that opens this device again, secrets left out."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def block_bytes(self) -> int:
        """Logical block: 512 or 4096; a write of one is the unit that can be torn by a power cut."""

    @property
    def volatile_cache(self) -> bool:
        """True where a write is durable only after a flush (or with `fua`)."""

    @property
    def read_only(self) -> bool: ...

    def loss_count(self) -> int:
        """Associations lost so far. When it moved between a write and the end of the flush behind it, the write may be
        gone although both succeeded: write again. (`ARCHITECTURE.md`, "When is it durable".)"""

    def read_into(self, offset: int, buffer: Buffer) -> None: ...

    def write(self, offset: int, data: Buffer, *, fua: bool = False) -> None: ...

    def flush(self) -> None: ...

    def deallocate(self, offset: int, length: int) -> None:
        """Tell the device that the bytes are not needed; what a read then gives is undefined."""

    def close(self) -> None: ...

    def events(self) -> Events:
        """What it did lately, of `headrace.device.events.EVENT`: in the order in which it ended; then what is under
        way. `UsageError`: this device records nothing."""

    def describe(self) -> dict[str, Any]:
        """The path in use, for people and machines: transport, engine, digests, queues, counters."""


U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
