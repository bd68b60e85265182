"""How far an ingest is, for whoever shows it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class IngestProgress:
    """How far an ingest is."""

    #: "tokenizer" (training), "tokens", "records" or "commit".
    phase: str
    #: Or records.
    documents: int
    #: Of records: bytes.
    tokens: int
    text_bytes: int
    #: Since the phase began.
    seconds: float
    #: 0 to 1 of the phase, by bytes.
    fraction: float
    #: What an earlier run had done of it, which took no time of this one.
    documents_before: int = 0
    tokens_before: int = 0
    fraction_before: float = 0.0
    bad_records: int = 0
    #: "tokens", or "records".
    unit: str = "tokens"

    @property
    def tokens_per_s(self) -> float:
        return (self.tokens - self.tokens_before) / self.seconds if self.seconds > 0 else 0.0

    @property
    def documents_per_s(self) -> float:
        return (self.documents - self.documents_before) / self.seconds if self.seconds > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds until the phase ends at this speed; None where nobody can tell yet."""
        here = self.fraction - self.fraction_before
        return self.seconds * (1 - self.fraction) / here if here > 0.01 else None


class Teller:
    """Calls the caller's progress function, not too often. What it tells never goes back."""

    EVERY_S = 0.25

    def __init__(self, progress: Callable[[IngestProgress], None] | None) -> None:
        self._progress = progress
        self._phase = ""
        self._began = 0.0
        self._last = 0.0
        self._before = (0, 0, 0.0)
        self._fraction = 0.0
        self._unit = "tokens"

    def begin(self, phase: str, documents: int = 0, tokens: int = 0, fraction: float = 0.0) -> None:
        """A phase begins, with what was done before."""
        self._phase, self._began, self._last = phase, time.monotonic(), 0.0
        self._before = documents, tokens, fraction
        if phase in ("tokens", "records"):
            self._unit = phase
        self._fraction = fraction

    def due(self) -> bool:
        """Was nothing told for a while?"""
        return time.monotonic() - self._last >= self.EVERY_S

    def now(self, documents: int, tokens: int, text_bytes: int, fraction: float, bad_records: int = 0) -> None:
        self._last = time.monotonic()
        self._fraction = max(self._fraction, fraction)
        if self._progress is not None:
            documents_before, tokens_before, fraction_before = self._before
            self._progress(
                IngestProgress(
                    phase=self._phase,
                    documents=documents,
                    tokens=tokens,
                    text_bytes=text_bytes,
                    seconds=self._last - self._began,
                    fraction=self._fraction,
                    documents_before=documents_before,
                    tokens_before=tokens_before,
                    fraction_before=fraction_before,
                    bad_records=bad_records,
                    unit=self._unit,
                )
            )


def describe_progress(now: IngestProgress) -> str:
    """One line for people."""
    if now.phase == "tokenizer":
        return f"training a tokenizer: {now.documents:,} documents, {format_bytes(now.text_bytes)} read"
    if now.phase == "commit":
        return f"committing {now.tokens:,} tokens" if now.unit == "tokens" else f"committing {now.documents:,} records"
    left = now.left_s
    text = (
        f"{now.documents:,} records, {format_bytes(now.tokens)}, "
        f"{now.documents_per_s:,.0f} records/s, {format_bytes(round(now.tokens_per_s))}/s, "
        if now.unit == "records"
        else f"{now.documents:,} documents, {now.tokens:,} tokens, "
        f"{now.documents_per_s:,.0f} documents/s, {now.tokens_per_s:,.0f} tokens/s, "
    )
    if now.bad_records:
        text += f"{now.bad_records:,} bad records left out, "
    return text + (f"{format_seconds(max(left, 1.0))} left" if left is not None else "time left not known yet")
