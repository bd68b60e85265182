"""A mount whose server is away: the bench says so, and waits for nobody."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from headrace.bench.places import mounts
from headrace.bench.places.mounts import Mount, away
from tests.waiting import PATIENCE_S

#: A file system in user space that nobody serves: whoever touches it waits, as on NFS that is mounted hard.
HUNG = """
    import ctypes, os, sys, time

    where, *arguments = sys.argv[1:]
    try:
        served = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        sys.exit(f"no FUSE: {error}")
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={served},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"gone:/data", where.encode(), b"fuse.hung", 0, options):
        sys.exit(f"no FUSE: {os.strerror(ctypes.get_errno())}")

    from headrace.bench.places import asking
    from headrace.cli import main

    asking.SILENT_S = 1.0
    begun = time.monotonic()
    status = main(arguments)
    print(f"{status} {time.monotonic() - begun:.1f}")
"""


@pytest.mark.parametrize("how", ["itself", "behind a link", "below"])
def test_a_mount_that_hangs_is_one_line(tmp_path: Path, how: str) -> None:
    mounted = tmp_path / "data" / "mounted"
    mounted.mkdir(parents=True)
    (tmp_path / "link").symlink_to("data/../data/mounted")
    path = {"itself": mounted, "behind a link": tmp_path / "link", "below": tmp_path / "data"}[how]
    begun = time.monotonic()
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", textwrap.dedent(HUNG), str(mounted),
         "bench", str(path), "--existing", "-p", "latency"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    if "no FUSE" in done.stderr or done.stderr.startswith("unshare"):
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.stdout.split()[0] == "1", (done.stdout, done.stderr)
    assert time.monotonic() - begun < PATIENCE_S
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"headrace: error: the file system gives nothing: gone:/data (fuse.hung), mounted at {mounted}"
    )
    assert "1 s without an answer" in line


def test_what_waits_is_found_without_touching_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through links, in whatever way they lead there; and what is beside it is none of it."""
    remote = tmp_path / "mnt" / "nfs"
    remote.mkdir(parents=True)
    (tmp_path / "a").symlink_to(remote)
    (tmp_path / "b").symlink_to("a/deep")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "mnt" / "nfs2").mkdir()
    nfs = Mount(kind="nfs4", source="server:/x", point=str(remote), options="rw,hard")
    local = Mount(kind="ext4", source="/dev/sda1", point="/", options="rw")
    monkeypatch.setattr(mounts, "_mounts", lambda: [local, nfs])
    for name in ("mnt/nfs", "mnt/nfs/deep/er", "a", "b/../c", "a/.", "mnt", "mnt/nfs2/../nfs"):
        assert away(f"{tmp_path}/{name}") == nfs, name
    for name in ("mnt/nfs2", "loop", "none", "none/../mnt/nfs2"):
        assert away(f"{tmp_path}/{name}") is None, name
    monkeypatch.chdir(tmp_path)
    assert away("a") == nfs and away("loop") is None
    assert os.path.lexists(remote)
