"""The environment that holds the peers from PyPI: `.venv-peers`, made when a suite first needs it (network).

It sees the packages of the environment this runs in, so that torch is not installed twice.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
from importlib import metadata

from benchmarks.programs import ROOT

PEERS = ROOT / ".venv-peers"
WANTED = ROOT / "benchmarks" / "peers.txt"


def python() -> str:
    """Its Python; SystemExit that says what pip said where it cannot be made."""
    program = PEERS / "bin" / "python"
    stamp = PEERS / ".ready"
    key = hashlib.sha256(WANTED.read_bytes() + sys.version.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == key:
        return str(program)
    print("benchmarks: making .venv-peers (the loaders to compare with; a few minutes)", file=sys.stderr, flush=True)
    steps = [
        [sys.executable, "-m", "venv", "--clear", str(PEERS)],
        [str(program), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(WANTED), _torch()],
    ]
    for number, step in enumerate(steps):
        done = subprocess.run(step, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            said = "\n".join(done.stderr.splitlines()[-8:])
            raise SystemExit(f"benchmarks: cannot make {PEERS.name}: `{' '.join(step[:4])} ...` said:\n{said}")
        if number == 0:
            ours = sysconfig.get_paths()["purelib"]
            theirs = next(PEERS.glob("lib/python*/site-packages"))
            (theirs / "project.pth").write_text(f"{ours}\n")
    stamp.write_text(key)
    return str(program)


def _torch() -> str:
    """The version that is here already, so that pip takes no other."""
    return f"torch=={metadata.version('torch').partition('+')[0]}"


def versions() -> dict[str, str]:
    """What was installed, by name: a comparison without them means little."""
    code = (
        "import json, sys; from importlib import metadata\n"
        "print(json.dumps({name: metadata.version(name) for name in sys.argv[1:]}))"
    )
    names = [line.strip() for line in WANTED.read_text().splitlines() if line.strip() and not line.startswith("#")]
    done = subprocess.run([python(), "-c", code, *names], capture_output=True, text=True, check=True)
    got: dict[str, str] = json.loads(done.stdout)
    return got
