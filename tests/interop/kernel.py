"""A kernel NVMe/TCP target in a guest, for the length of a `with` block."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.testing.serve import free_port


class KernelTarget:
    """A kernel nvmet target in a guest, listening on 127.0.0.1:`port`, and on the other `ports`."""

    def __init__(
        self, nqn: str, ports: Sequence[int], share: Path | None, images: Sequence[Path], guest: _Guest
    ) -> None:
        self.nqn = nqn
        self.images = tuple(images)
        self._guest = guest
        self.ports = tuple(ports)
        self.port = self.ports[0]
        self._share = share
        self._commands = 0

    def do(self, script: str, timeout_s: float = 60) -> str:
        """Run a shell script as root in the guest (which was started with a share); its output."""
        assert self._share is not None, "started without a share"
        self._commands += 1
        name = self._share / f"command-{self._commands}"
        draft = name.with_suffix(".draft")
        draft.write_text("cd /sys/kernel/config/nvmet 2>/dev/null\n" + script)
        draft.rename(name.with_suffix(".cmd"))
        deadline = time.monotonic() + timeout_s
        while not name.with_suffix(".status").exists():
            assert time.monotonic() < deadline, f"the guest did not run: {script}"
            time.sleep(0.05)
        output = name.with_suffix(".out").read_text()
        assert name.with_suffix(".status").read_text().strip() == "0", f"{script}\n{output}"
        return output

    def power_off(self) -> None:
        """The whole machine; what its disks were told stays."""
        self._guest.stop()

    def power_on(self) -> None:
        self._guest.start()

    def down(self) -> None:
        """nvmet is taken down, and unloaded: what it remembers is gone, the media stay."""
        self.do("nvmet_down", timeout_s=120)

    def up(self) -> None:
        """The same target again."""
        self.do("set -e; nvmet_up", timeout_s=120)

    def count_conflicts(self) -> None:
        """From now on the kernel notes each command that it answers with Reservation Conflict."""
        self.do(
            """
            grep -q tracefs /proc/mounts || mount -t tracefs trace /sys/kernel/tracing
            cd /sys/kernel/tracing/events/nvmet/nvmet_req_complete
            # With Do Not Retry and More, and without.
            echo 'status == 0x83 || status == 0x2083 || status == 0x4083 || status == 0x6083' > filter || exit 1
            echo 1 > enable
            """
        )

    def conflicts(self) -> int:
        """Those that it has noted."""
        return int(self.do("grep -c nvmet_req_complete: /sys/kernel/tracing/trace || true"))

    @contextmanager
    def lossy(self, percent: float) -> Iterator[Callable[[], tuple[int, int]]]:
        """Of the packets to and from the guest so many are lost meanwhile. Gives a function: how many were, of those
        that came and of those that left."""
        # One packet is lost at a time, not a burst that the network device would have cut up; those that come take the
        # way through another device, for a queue can only be where something leaves.
        self.do(
            f"""
            set -e
            modprobe -a sch_netem sch_ingress cls_matchall act_mirred; modprobe ifb numifbs=1
            ip link set ifb0 up; ip link set eth0 gso_max_segs 1
            tc qdisc add dev eth0 ingress
            tc filter add dev eth0 parent ffff: matchall action mirred egress redirect dev ifb0
            for device in ifb0 eth0; do tc qdisc add dev $device root netem loss {percent}%; done
            """
        )

        def dropped() -> tuple[int, int]:
            came, left = (
                sum(queue["drops"] for queue in json.loads(self.do(f"tc -s -j qdisc show dev {device} root")))
                for device in ("ifb0", "eth0")
            )
            return came, left

        try:
            yield dropped
        finally:
            self.do("tc qdisc del dev eth0 root; tc qdisc del dev eth0 ingress; rmmod ifb")

    def set_ana(self, port_number: int, state: str) -> None:
        """State of the group of all namespaces at a port, counted from 1."""
        self.do(f"echo {state} > ports/{port_number}/ana_groups/1/ana_state")

    def uri(self, nsid: int = 1, **options: object) -> str:
        query = "&".join([f"nsid={nsid}", *(f"{key}={value}" for key, value in options.items())])
        return f"nvme+tcp://127.0.0.1:{self.port}/{self.nqn}?{query}"


@contextmanager
def kernel_target(
    lab: Path,
    nqn: str,
    *options: str,
    ports: Sequence[int] = (),
    share: Path | None = None,
    images: Sequence[Path] = (),
    boot_timeout_s: float = 150,
) -> Iterator[KernelTarget]:
    """`images`: files that are its namespaces."""
    ports = ports or (free_port(),)
    words = [word for port in ports for word in ("--port", str(port))]
    words += [word for image in images for word in ("--disk", str(image))]
    words += ["--share", str(share)] if share else []
    words = [*words, "--nqn", nqn, "--boot-timeout", str(boot_timeout_s), *options]
    target = KernelTarget(nqn, ports, share, images, _Guest(lab, words, boot_timeout_s))
    try:
        target.power_on()
        yield target
    finally:
        target.power_off()


class _Guest:
    def __init__(self, lab: Path, words: Sequence[str], boot_timeout_s: float) -> None:
        self._command = [lab, "target", *words]
        self._boot_timeout_s = boot_timeout_s
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        process = self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        seen: list[str] = []
        ready = threading.Event()

        def follow() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                seen.append(line)
                if line.startswith("READY"):
                    ready.set()
            ready.set()  # It ended: do not wait for the deadline.

        self._reader = threading.Thread(target=follow)
        self._reader.start()
        if not ready.wait(self._boot_timeout_s + 30) or not any(line.startswith("READY") for line in seen):
            pytest.fail("the kernel target did not get ready\n" + "".join(seen))

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._reader.join(15)
