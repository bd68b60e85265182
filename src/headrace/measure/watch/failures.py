"""Exceptions that leave a part of a step, for whoever wants to know."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any


class Telling:
    """A part that is told of: `listener(cause, error)`, in the thread that trains, before the exception goes on."""

    __slots__ = ("_cause", "_listener", "_part")

    def __init__(self, part: Any, cause: str, listener: Callable[[str, BaseException], None]) -> None:
        self._part, self._cause, self._listener = part, cause, listener

    def __enter__(self) -> None:
        self._part.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # It is in the part still, and so a dump says.
        try:
            if error is not None:
                self._listener(self._cause, error)
        finally:
            self._part.__exit__(kind, error, trace)
