"""Recorded machines as one text file each, and back.

/sys/class/nvme/nvme0 -> ../../devices/pci0000:00/0000:00:04.0/nvme/nvme0
/sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0/state = live
/proc/self/mountinfo <<
22 1 259:1 / / rw,relatime - ext4 /dev/nvme0n1p1 rw
.
/sys/fs/cgroup/                       a folder that is there

python -m tests.doctor.machines DIR > machines/NAME.machine      of what `headrace doctor --record DIR` wrote
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).with_name("machines")
NAMES = sorted(file.stem for file in FOLDER.glob("*.machine"))


def unpack(name: str, folder: Path) -> Path:
    """The machine as a folder, which is given back."""
    return unpack_text((FOLDER / f"{name}.machine").read_text(), folder)


def unpack_text(text: str, folder: Path) -> Path:
    lines = iter(text.splitlines())
    for line in lines:
        if not line or line.startswith("#"):
            continue
        path, _, rest = line.partition(" ")
        where = folder / path.strip("/")
        if path.endswith("/"):
            where.mkdir(parents=True, exist_ok=True)
            continue
        where.parent.mkdir(parents=True, exist_ok=True)
        sign, _, value = rest.partition(" ")
        said = value + "\n" if sign != "<<" else "".join(f"{one}\n" for one in iter(lambda: next(lines), "."))
        # Of several machines in one text, the first counts.
        if where.is_symlink() or where.exists():
            continue
        if sign == "->":
            where.symlink_to(value)
        else:
            assert sign in ("=", "<<"), line
            where.write_text(said)
    return folder


def pack(folder: Path) -> str:
    said = []
    for where, folders, files in sorted(os.walk(folder)):
        here = "/" + str(Path(where).relative_to(folder)).removeprefix(".")
        here = here.rstrip("/")
        names = sorted([*files, *(one for one in folders if (Path(where) / one).is_symlink())])
        if not names and not folders and here:
            said.append(f"{here}/")
        for name in names:
            path = Path(where) / name
            if path.is_symlink():
                said.append(f"{here}/{name} -> {path.readlink()}")
                continue
            text = path.read_text().removesuffix("\n")
            said.append(f"{here}/{name} <<\n{text}\n." if "\n" in text or not text else f"{here}/{name} = {text}")
    return "\n".join(said) + "\n"


if __name__ == "__main__":
    sys.stdout.write(pack(Path(sys.argv[1])))
