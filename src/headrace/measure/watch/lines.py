"""The file of a rank: lines are kept for a moment and written together, and no trouble of the file is training's."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from headrace.errors import UsageError

_log = logging.getLogger("headrace")


class Lines:
    """Appends to `path`. `UsageError` where it cannot be opened; what goes wrong later is logged, once, and is the end
    of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []
        self._process = os.getpid()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            size = os.fstat(self._file).st_size
            # A line that a kill has torn ends here.
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                self._lines.append("")
        except OSError as error:
            raise UsageError("a watch cannot write here", where=str(path), found=error.strerror) from None

    @property
    def closed(self) -> bool:
        return self._file < 0

    @property
    def own(self) -> bool:
        """Not what a fork has copied, which is the parent's to write."""
        return self._process == os.getpid()

    def add(self, line: str) -> None:
        if not self.closed:
            self._lines.append(line)

    def flush(self) -> None:
        if self.closed or not self.own or not self._lines:
            return
        data = "".join(f"{line}\n" for line in self._lines).encode()
        self._lines.clear()
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            _log.warning("headrace: the watch writes no more to %s: %s", self.path, error.strerror)
            self._shut()

    def close(self) -> None:
        """Again: does nothing."""
        self.flush()
        self._shut()

    def _shut(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
