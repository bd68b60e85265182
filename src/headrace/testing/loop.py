"""Loop devices for tests: a block device of this machine's kernel over a file, gone when the test ends.

Needs root and loop devices; `LoopDevice.problem()` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path


def _run(*command: str) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


class LoopDevice:
    """`losetup` over a new sparse file `image`, or over one that is there (no size); `path` is the device."""

    def __init__(
        self, image: Path, size_bytes: int | None, *, sector_bytes: int = 512, read_only: bool = False
    ) -> None:
        self.image = image
        if size_bytes is not None:
            with image.open("wb") as file:
                file.truncate(size_bytes)
        # With a look for partitions, so that those which are added go with the device.
        options = ["--partscan", *(["--read-only"] if read_only else [])]
        self.path = _run("losetup", "--find", "--show", "--sector-size", str(sector_bytes), *options, str(image))

    def add_partition(self, number: int, first_sector: int, sectors: int, node: Path) -> str:
        """A partition, told to the kernel without a table; `node` is its device node."""
        _run("addpart", self.path, str(number), str(first_sector), str(sectors))
        name = Path(self.path).name
        major, minor = Path(f"/sys/block/{name}/{name}p{number}/dev").read_text().split(":")
        os.mknod(node, 0o600 | stat.S_IFBLK, os.makedev(int(major), int(minor)))
        return str(node)

    def resize(self, size_bytes: int) -> None:
        os.truncate(self.image, size_bytes)
        _run("losetup", "--set-capacity", self.path)

    def close(self) -> None:
        if self.path:
            _run("losetup", "--detach", self.path)
            self.path = ""

    def __enter__(self) -> LoopDevice:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @staticmethod
    @cache
    def problem() -> str:
        """Why there can be none here; empty: there can."""
        if os.geteuid() != 0:
            return "loop devices need root"
        if not shutil.which("losetup"):
            return "losetup is not installed"
        with tempfile.TemporaryDirectory() as folder:
            try:
                LoopDevice(Path(folder) / "probe", 1 << 20).close()
            except OSError as error:
                return f"no loop device can be made: {error}"
        return ""
