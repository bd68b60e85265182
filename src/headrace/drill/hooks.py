"""What only the user can do: restart a target, cut a link, heal it. A command, or a person at a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from headrace.drill.report import DrillFailed

#: For a command, and for a person.
PATIENCE_S = 600.0
#: Of what a command printed, its end.
_SAID_BYTES = 4096

#: Asks a person to do something, and waits for so many seconds; False: it was not done.
Ask = Callable[[str, float], bool]


@dataclass(frozen=True)
class Hook:
    """`command`: for the shell. `ask`: where there is none."""

    what: str
    command: str | None = None
    ask: Ask | None = None
    #: Where it can be done here.
    do: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        return any(way is not None for way in (self.do, self.command, self.ask))

    def __call__(self) -> None:
        """DrillFailed where it was not done."""
        if self.do is not None:
            self.do()
            return
        if self.command is None:
            if self.ask is None or not self.ask(self.what, PATIENCE_S):
                raise DrillFailed(f"nobody did it: {self.what}", next_step="give a command for it; see --help")
            return
        # Not a pipe: a target that the command starts may hold that for as long as it lives.
        with tempfile.TemporaryFile() as output:
            status = self._run(self.command, output)
            output.seek(max(0, output.seek(0, os.SEEK_END) - _SAID_BYTES))
            said = output.read().decode(errors="replace").strip().splitlines()
        if status:
            raise DrillFailed(
                f"the command to {self.what} failed",
                where=self.command,
                found=f"exit status {status}" + (f", {said[-1]}" if said else ""),
            )

    def _run(self, command: str, output: IO[bytes]) -> int:
        # A session of its own, of which nothing is left where it does not end by itself.
        shell = subprocess.Popen(
            command, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            return shell.wait(PATIENCE_S)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise DrillFailed(
                    f"the command to {self.what} does not end", where=command, expected=f"within {PATIENCE_S:g} s"
                ) from None
            raise
