"""The whole of it: data, guest, judgement, picture."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.nfs_cure.data import make_data
from examples.nfs_cure.world import World

ROOT = Path(__file__).resolve().parent.parent.parent
LAB = ROOT / "tests" / "interop" / "linux-lab"
PRELUDE = ROOT / "tests" / "interop" / "guest.sh"
SCRIPT = Path(__file__).with_name("guest.sh")
NQN = "nqn.2024-01.lab:nfs-cure"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a guest needs for it."""

    #: For the script and for `inside.main`.
    env: dict[str, object]
    #: For QEMU: the two disks of the medium.
    words: list[str]


def make_setting(world: World, folder: Path) -> Setting:
    """The disks, made in `folder`, and how the guest hears of them."""
    words = []
    for serial, disk in zip(("files", "volume"), make_data(folder, world), strict=True):
        # One medium: what they give together is bounded.
        drive = f"-drive id={serial},file={disk},format=raw,if=none,cache=none,throttling.group=medium"
        drive += f",throttling.bps-read={world.disk_here}"
        device = f"-device virtio-blk-pci,drive={serial},logical_block_size=4096,physical_block_size=4096"
        words.append(f"--qemu={drive} {device}")
    env = {
        "WORLD": json.dumps(asdict(world)), "CURE_NQN": NQN, "FILES": "/dev/vda", "VOLUME": "/dev/vdb", "SETUP": SCRIPT,
    }  # fmt: skip
    return Setting(env=env, words=words)


def measured_of(output: str) -> list[dict[str, Any]]:
    """What the guest printed of each path."""
    return [json.loads(row) for row in re.findall(r"^MEASURED (.*)$", output, re.M)]


def measure(world: World, folder: Path, *, timeout_s: float, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Runs a guest of its own. `folder`/share/watch has what was watched."""
    share = folder / "share"
    share.mkdir(parents=True)
    tell("making the data")
    setting = make_setting(world, folder)
    script = folder / "script"
    script.write_text(PRELUDE.read_text() + '(. "/share2$SETUP") && machine_python -m examples.nfs_cure.inside\n')
    env = setting.env | {
        "MACHINE_PYTHON": sys.executable,
        "MACHINE_PATH": ":".join([str(ROOT), *filter(None, sys.path)]),
    }
    command = [str(LAB), "run", "--script", str(script), "--timeout", str(int(timeout_s))]
    command += ["--share", str(share), "--share", "/:ro"]
    command += [word for name, value in env.items() for word in ("--env", f"{name}={value}")] + setting.words
    tell("starting the guest")
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seen: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            seen.append(line)
            tell(line.rstrip())
        process.wait(30)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise SystemExit("the guest failed")
    return measured_of("".join(seen))
