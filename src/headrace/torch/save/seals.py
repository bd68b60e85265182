"""What the items of a save were when they were copied, compared with what was written.

A copy is checksummed once, and the volume checksums every block as it writes it. Both are CRC32C, which is linear: what
the object should be follows from the first, what it is from the second, and no byte is looked at a third time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.device import crc32c
from headrace.device.joined import raw_of
from headrace.errors import CheckpointFailed
from headrace.volume import Parts


@dataclass
class Seals:
    """Of all items of one rank, or of none: `None` among the checksums stands for an item that nobody checksummed."""

    names: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    memory: list[memoryview] = field(default_factory=list)
    sums: list[int | None] = field(default_factory=list)

    def add(self, name: str, start: int, memory: memoryview, sum: int | None) -> None:
        self.names.append(name)
        self.starts.append(start)
        self.memory.append(memory)
        self.sums.append(sum)

    @property
    def complete(self) -> bool:
        return None not in self.sums

    def take(self) -> None:
        """Checksum what nobody has, now."""
        self.sums = [crc32c(memory) if sum is None else sum for memory, sum in zip(self.memory, self.sums, strict=True)]

    def compare(self, parts: Parts) -> None:
        """After the write. CheckpointFailed, with the tensor, where it is not what was checksummed."""
        if not self.complete or parts.written is None:
            return
        lengths = [len(memory) for memory in self.memory]
        ends = [start + length for start, length in zip(self.starts, lengths, strict=True)]
        sums = [sum for sum in self.sums if sum is not None]
        if raw_of(sums, 0, ends, lengths, parts.length_bytes) == parts.written:
            return
        for name, memory, sum in zip(self.names, self.memory, sums, strict=True):
            if (found := crc32c(memory)) != sum:
                raise CheckpointFailed(
                    f"the copy of {name!r} changed before it was written",
                    expected=f"CRC32C {sum:#010x}, as it was copied",
                    found=f"{found:#010x}",
                    next_step="find out who writes into memory that is not theirs; nothing of this save is visible",
                )
        raise CheckpointFailed(
            "the copy of the state changed while it was written, and back again",
            next_step="find out who writes into memory that is not theirs; nothing of this save is visible",
        )
