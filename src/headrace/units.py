"""Every unit, once."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_SUFFIXES = {"": 1, "b": 1, "k": KIB, "kib": KIB, "m": MIB, "mib": MIB, "g": GIB, "gib": GIB, "t": TIB, "tib": TIB,
             "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}  # fmt: skip


def parse_bytes(text: str) -> int:
    """`"64MiB"`, `"64M"` (binary), `"64MB"` (decimal), `"4096"` -> bytes; ValueError on anything else."""
    stripped = text.strip().lower().replace("_", "")
    digits = stripped.rstrip("abcdefghijklmnopqrstuvwxyz ")
    suffix = stripped[len(digits) :].strip()
    if suffix not in _SUFFIXES:
        raise ValueError(f"{text!r} is not a size: expected a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    try:
        value = float(digits) * _SUFFIXES[suffix]
    except ValueError:
        raise ValueError(f"{text!r} is not a size: expected a number like 64MiB") from None
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{text!r} is out of range: expected 0 to 16 EiB")
    return int(value)


def format_bytes(count: float) -> str:
    """1536 -> `"1.5 KiB"`; whole bytes below 1 KiB."""
    if abs(count) < KIB:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if abs(count) < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} PiB"


def format_rate(bytes_per_s: float) -> str:
    """1.46e9 -> `"1.46 GB/s"`: decimal, as links, media and providers have it."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if abs(bytes_per_s) < 999.5:
            break
        bytes_per_s, unit = bytes_per_s / 1000, larger
    return f"{bytes_per_s:.3g} {unit}/s" if unit != "B" else f"{bytes_per_s:.0f} B/s"


def format_seconds(seconds: float) -> str:
    """0.00042 -> `"420 us"`, 75 -> `"75.0 s"`, 240 -> `"4.0 min"`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
