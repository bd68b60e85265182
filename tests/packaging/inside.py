"""What a user does with the wheel alone, inside the cage: serve, make a volume, write, read, verify."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

from headrace.testing.serve import serving
from headrace.units import MIB
from headrace.volume import Volume

NQN = "nqn.2024-01.headrace:cage"


def check_the_cage() -> None:
    """This is the machine that the test is about; else the test shows nothing."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    assert os.geteuid() != 0
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[kind], 16) == 0, f"{kind} {status[kind]}"
    assert ctypes.CDLL(None).syscall(425, 1, ctypes.create_string_buffer(120)) == -1, "io_uring is not forbidden"
    for place in (Path.home(), Path("/tmp"), Path("/"), Path(sys.prefix)):
        try:
            (place / "headrace-cage").write_text("x")
        except OSError:
            continue
        raise AssertionError(f"{place} can be written")
    shm = os.statvfs("/dev/shm")
    assert shm.f_blocks * shm.f_frsize == 64 * MIB
    assert not shutil.which("cc") and not shutil.which("cargo")
    assert sys.prefix in (sys.modules["headrace"].__file__ or ""), "this headrace is not the one of the wheel"


def use(*namespaces: str) -> str:
    payload = bytes(range(256)) * (5 * MIB // 256) + b"tail"
    with serving(NQN, *namespaces) as target:
        uris = [target.uri(nsid, hdgst=1, ddgst=1) for nsid in range(1, len(namespaces) + 1)]
        Volume.create(uris, name="cage").close()
        with Volume.open(uris, write=True) as volume:
            session = volume.session(run_id="cage")
            try:
                with session.transaction() as tx:
                    tx.put("greeting", payload)
            finally:
                session.close()
        with Volume.open(uris) as volume:
            assert volume.read("greeting") == payload
        exit_status = target.stop()
        assert exit_status == 0, f"serve ended with {exit_status}\n{target.output()}"
        return target.output()


def main() -> None:
    check_the_cage()
    headrace = Path(sys.prefix) / "bin/headrace"
    subprocess.run([headrace, "--help"], check=True, stdout=subprocess.DEVNULL)
    use("mem:64MiB")
    said = use("/dev/shm/namespace.img:40MiB")
    assert "pread" in said, f"serve does not say which engine it fell back to:\n{said}"
    print("CAGE ok")


if __name__ == "__main__":
    main()
