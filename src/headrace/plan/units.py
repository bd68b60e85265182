"""Units of a plan's quantities, and quantities as people write them. SI prefixes: storage is sold in them.

A unit is a product of bases with whole exponents, such as B/s or B/s/gpu. Shares and counts have none.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from headrace.units import format_seconds

BASES = ("B", "s", "token", "sample", "read", "gpu", "node", "param", "flop", "price")

_PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_WORDS = (("trillion", 1e12), ("billion", 1e9), ("million", 1e6))
_COUNTED = {"param": "parameters", "token": "tokens"}


@dataclass(frozen=True)
class Unit:
    """`Unit.of("B/s/gpu")`. `kind` is only how it is shown: "share" as percent, "duration" as minutes and hours."""

    exponents: tuple[tuple[str, int], ...]
    kind: str = field(default="", compare=False)

    @staticmethod
    def of(text: str, kind: str = "") -> Unit:
        exponents: dict[str, int] = {}
        for index, part in enumerate(text.split("/") if text else []):
            if part and part != "1":
                if part not in BASES:
                    raise ValueError(f"{part!r} is no base of a unit: {', '.join(BASES)}")
                exponents[part] = exponents.get(part, 0) + (-1 if index else 1)
        return Unit(tuple(sorted((base, power) for base, power in exponents.items() if power)), kind)

    def scale(self, base: str, factor: float) -> float:
        """By what a figure in this unit changes when there are `factor` times as many of `base`."""
        return float(factor ** dict(self.exponents).get(base, 0))

    def __str__(self) -> str:
        if self.kind == "flop rate":
            return "FLOP/s"
        above = [base for base, power in self.exponents for _ in range(power)]
        below = [base for base, power in self.exponents for _ in range(-power)]
        # Time is said first of what is below: B/s/gpu.
        below.sort(key=lambda base: base != "s")
        return "/".join([" ".join(above) or ("1" if below else ""), *below])


BYTES = Unit.of("B")
RATE = Unit.of("B/s")
LINK = Unit.of("B/s", "link")
RATE_PER_GPU = Unit.of("B/s/gpu")
RATE_PER_NODE = Unit.of("B/s/node")
SECONDS = Unit.of("s", "duration")
COUNT = Unit.of("")
SHARE = Unit.of("", "share")
GPUS = Unit.of("gpu")
GPU_TIME = Unit((("gpu", 1), ("s", 1)), "gpu time")
NODES = Unit.of("node")
GPUS_PER_NODE = Unit.of("gpu/node")
TOKENS = Unit.of("token")
TOKEN_RATE = Unit.of("token/s/gpu")
SAMPLE_RATE = Unit.of("sample/s/gpu")
BYTES_PER_TOKEN = Unit.of("B/token")
BYTES_PER_SAMPLE = Unit.of("B/sample")
PARAMETERS = Unit.of("param")
BYTES_PER_PARAMETER = Unit.of("B/param")
FLOP_RATE = Unit.of("flop/s/gpu", "flop rate")
PRICE = Unit.of("price")
SHARE_OF_GPU = Unit.of("B/gpu")
PRICE_PER_SECOND = Unit.of("price/s", "hourly")
PRICE_PER_GPU_HOUR = Unit.of("price/gpu/s", "hourly")


#: Smaller ones are told as being smaller: what they are is of no account.
_LEAST_SHARE = 1e-6


def significant(value: float, digits: int = 3) -> str:
    """1234 -> "1,234", 0.01234 -> "0.0123": so many digits, never an exponent where a person would write none."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    size = math.floor(math.log10(abs(value)))
    if size >= 15 or size < -6:
        return f"{value:.{digits - 1}e}"
    text = f"{round(value, digits - 1 - size):,.{max(0, digits - 1 - size)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def show(value: float, unit: Unit, digits: int = 3) -> str:
    """A figure with its unit, as a person reads it."""
    if unit.kind == "share":
        if 0 < value < _LEAST_SHARE:
            return f"<{significant(100 * _LEAST_SHARE)} %"
        if 0.99 < value < 1:
            # What is missing is what counts.
            digits += math.floor(-math.log10(1 - value)) - 1
        return f"{significant(100 * value, digits)} %"
    if unit.kind == "duration":
        if value >= 172_800:
            return f"{significant(value / 86_400, digits)} d"
        return format_seconds(value) if value else "0 s"
    if unit.kind == "gpu time":
        return f"{significant(value / 3600, digits)} GPU hours"
    if unit.kind == "link":
        return f"{significant(value * 8 / 1e9, max(digits, 4))} Gbit/s"
    if unit.kind == "hourly":
        return f"{significant(value * 3600, digits)} an hour"
    name = str(unit)
    if unit.exponents == BYTES_PER_PARAMETER.exponents:
        return f"{significant(value, 4)} {name}"
    if not name:
        return f"{significant(value, digits)}"
    if name in _COUNTED:
        for word, factor in _WORDS:
            if value >= factor:
                return f"{significant(value / factor, digits)} {word} {_COUNTED[name]}"
        return f"{significant(value, max(digits, 6))} {_COUNTED[name]}"
    if name.startswith(("token", "sample", "read")) and abs(value) < 1e6:
        return f"{significant(value, max(digits, 5) if value >= 1e3 else digits)} {name}"
    if name.startswith(("gpu", "node")):
        return f"{significant(value, max(digits, 8))} {name}"
    if name.startswith("price"):
        return significant(value, digits)
    for prefix, factor in _PREFIXES:
        if abs(value) >= factor:
            gap = "" if name.startswith(("B", "FLOP")) else " "
            return f"{significant(value / factor, digits)} {prefix}{gap}{name}"
    return f"{significant(value, digits)} {name}"


# ---- what people write ----------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"([0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]{1,4})?|\.[0-9]+)\s*(.*)", re.S)
_BYTES = {
    "": 1.0,
    "B": 1.0,
    **{f"{p.upper()}B": f for p, f in _PREFIXES},
    **{f"{p}iB": 1024.0**n for n, p in enumerate("KMGTP", start=1)},
}
_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_TIMES = {
    "": 1.0,
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "min": 60.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86_400.0,
    "day": 86_400.0,
    "days": 86_400.0,
    "hours": 3600.0,
    "hour": 3600.0,
    "w": 604_800.0,
}
_RATES = {
    **{f"{name}/s" if name else "": factor for name, factor in _BYTES.items()},
    **{f"{p.upper()}bit/s": f / 8 for p, f in _PREFIXES},
    "bit/s": 1 / 8,
}
_FLOPS = {"": 1.0, "TFLOP/s": 1e12, "TFLOPS": 1e12, "PFLOP/s": 1e15, "PFLOPS": 1e15, "GFLOP/s": 1e9, "GFLOPS": 1e9}

#: How a figure of a kind may be written: suffixes and what they stand for, and an example.
KINDS: dict[str, tuple[dict[str, float], str]] = {
    "bytes": (_BYTES, "64MiB or 1.5TB"),
    "rate": (_RATES, "2GB/s or 100Gbit/s"),
    "count": (_COUNTS, "8B or 70e9"),
    "duration": (_TIMES, "90s, 30min or 2h"),
    "flops": (_FLOPS, "400TFLOP/s"),
    "number": ({"": 1.0}, "1.5"),
    "share": ({"": 1.0, "%": 0.01}, "0.01 or 1%"),
}


def parse_one(text: str, kind: str) -> float:
    """ "2 GB/s" -> 2e9 for the kind "rate"; ValueError says what was expected. Never infinite, never a NaN."""
    suffixes, example = KINDS[kind]
    found = _NUMBER.fullmatch(text.strip())
    expected = f"expected a figure such as {example}"
    if len(text) > 100 or found is None:
        raise ValueError(expected)
    suffix = found[2].strip()
    match = suffixes.get(suffix)
    if match is None:
        close = [factor for name, factor in suffixes.items() if name.lower() == suffix.lower()]
        # What is told apart by its case alone (B and b) is not guessed.
        if len(set(close)) != 1:
            raise ValueError(expected)
        match = close[0]
    value = float(found[1].replace("_", "")) * match
    if not math.isfinite(value):
        raise ValueError(f"{expected}, not one without end")
    return value
