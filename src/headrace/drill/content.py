"""What a shard holds: anybody can say it again."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def content(name: str, length_bytes: int) -> npt.NDArray[np.uint8]:
    """Of the shard of this name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, length_bytes, np.uint8)
