"""The peers from PyPI to compare with (`benchmarks/peers.txt`): made when a suite first needs them (network)."""

from __future__ import annotations

from scripts.environments import PEERS, CannotMake


def python() -> str:
    """Their Python; SystemExit that says what pip said where it cannot be made."""
    try:
        return str(PEERS.make())
    except CannotMake as error:
        raise SystemExit(f"benchmarks: cannot make {PEERS.folder.name}: {error}") from None
