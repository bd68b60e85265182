"""A kernel NVMe/TCP target in a guest, for the length of a `with` block."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.testing.serve import free_port


class KernelTarget:
    """A kernel nvmet target in a guest, listening on 127.0.0.1:`port`."""

    def __init__(self, nqn: str, port: int) -> None:
        self.nqn = nqn
        self.port = port

    def uri(self, nsid: int = 1, **options: object) -> str:
        query = "&".join([f"nsid={nsid}", *(f"{key}={value}" for key, value in options.items())])
        return f"nvme+tcp://127.0.0.1:{self.port}/{self.nqn}?{query}"


@contextmanager
def kernel_target(lab: Path, nqn: str, *options: str, boot_timeout_s: float = 150) -> Iterator[KernelTarget]:
    port = free_port()
    process = subprocess.Popen(
        [lab, "target", "--port", str(port), "--nqn", nqn, "--boot-timeout", str(boot_timeout_s), *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    seen: list[str] = []
    ready = threading.Event()

    def follow() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            seen.append(line)
            if line.startswith("READY"):
                ready.set()
        ready.set()  # It ended: do not wait for the deadline.

    reader = threading.Thread(target=follow)
    reader.start()
    try:
        if not ready.wait(boot_timeout_s + 30) or not any(line.startswith("READY") for line in seen):
            pytest.fail("the kernel target did not get ready\n" + "".join(seen))
        yield KernelTarget(nqn, port)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(15)
