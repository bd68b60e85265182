"""Environments beside the project's: what tests and benchmarks meet of PyPI, and what must not come between its own
packages.

    python scripts/environments.py NAME     make it; at once where it is up to date

Each is `.venv-NAME`. It sees the packages of the environment that this runs in, so that the large ones (torch, numpy)
are there once: the versions of those in `keeps` stay what they are. Its stamp is a digest of all that it was made from.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Seconds that pip may take.
LIMIT_S = 900.0


class CannotMake(Exception):
    """What was tried, and what it said."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    name: str
    #: One requirement a line.
    wanted: Path
    #: For people: what is in it.
    holds: str
    #: Packages that it may take no other version of than the one that is here.
    keeps: tuple[str, ...] = ("torch",)
    #: Requirements that are taken without what they name as their dependencies.
    alone: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return ROOT / f".venv-{self.name}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def missing(self) -> str | None:
        """Why it cannot be used; None where it can."""
        if self._ready():
            return None
        advice = f"`make test` makes it, or `python scripts/environments.py {self.name}`"
        failed = self.folder / ".failed"
        if failed.exists():
            return f"{self.folder.name} ({self.holds}) could not be made: {failed.read_text()} ({advice})"
        return f"{self.folder.name} ({self.holds}) is not up to date: {advice}"

    def make(self) -> Path:
        """Its Python, made where it is not up to date. `CannotMake`."""
        if self._ready():
            return self.python
        with _alone():
            if not self._ready():
                began = time.monotonic()
                print(f"{self.folder.name}: getting {self.holds} (once)", file=sys.stderr, flush=True)
                try:
                    self._make()
                except OSError as error:
                    raise CannotMake(f"{error.filename or self.folder}: {error.strerror or error}") from error
                print(f"{self.folder.name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return self.python

    def _lines(self) -> list[str]:
        lines = (line.partition("#")[0].strip() for line in self.wanted.read_text().splitlines())
        return [line for line in lines if line]

    def _kept(self) -> list[str]:
        return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in self.keeps]

    def _key(self) -> str:
        facts = [sys.version, sysconfig.get_paths()["purelib"], *self._lines(), *self._kept(), *self.alone]
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()

    def _ready(self) -> bool:
        stamp = self.folder / ".ready"
        return stamp.exists() and stamp.read_text() == self._key()

    def _make(self) -> None:
        self._run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(self.folder)])
        theirs = next(self.folder.glob("lib/python*/site-packages"))
        # `addsitedir`: with what its own .pth files name, this project among it.
        ours = sysconfig.get_paths()["purelib"]
        (theirs / "project.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        # Compiled when imported: most of it never is.
        install = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        try:
            self._run([*install, "--prefer-binary", *self._lines(), *self._kept()])
            if self.alone:
                self._run([*install, "--no-deps", *self.alone])
        except CannotMake as error:
            (self.folder / ".failed").write_text(str(error))
            raise
        (self.folder / ".ready").write_text(self._key())

    def _run(self, command: list[str]) -> None:
        told = " ".join(command[1:5]) + " ..."
        # A group of its own: it ends with all that it has started, also where this is ended.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            said = process.communicate(timeout=LIMIT_S)[1]
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise CannotMake(f"`{told}` had not ended after {LIMIT_S:.0f} s") from None
            raise
        if process.returncode:
            said = "\n".join(line[:300] for line in said.splitlines()[-8:])
            raise CannotMake(f"`{told}` said:\n{said}")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process at a time makes environments out of this one."""
    folder = os.open(sys.prefix, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


PEERS = Environment(name="peers", wanted=ROOT / "benchmarks" / "peers.txt", holds="the loaders to compare with")
FRAMEWORKS = Environment(
    name="frameworks",
    wanted=ROOT / "tests" / "frameworks" / "requirements.txt",
    holds="the frameworks that train from a volume in tests",
    keeps=("torch", "numpy"),
)
DLIO = Environment(
    name="dlio",
    wanted=ROOT / "benchmarks" / "dlio.txt",
    holds="the DLIO benchmark, and an MPI",
    keeps=("torch", "numpy"),
    # It names TensorFlow, DALI, torchvision and torchaudio, which training with PyTorch does not use (decision 0033).
    alone=("dlio-benchmark==2.0.0",),
)
ENVIRONMENTS = {each.name: each for each in (PEERS, FRAMEWORKS, DLIO)}


def main() -> int:
    names = sys.argv[1:]
    unknown = [name for name in names if name not in ENVIRONMENTS]
    if unknown or not names:
        print(f"usage: environments.py NAME..., of {', '.join(ENVIRONMENTS)}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        # As an exception, which ends what was started.
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    for name in names:
        try:
            ENVIRONMENTS[name].make()
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except CannotMake as error:
            print(f"cannot make .venv-{name}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
