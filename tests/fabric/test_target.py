"""The embedded target in this process, found by discovery."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from headrace.device import open_device
from headrace.errors import ConnectRefused, DeviceError, DeviceTimeout, HeadraceError, UsageError
from headrace.fabric import (
    FileMedia,
    ListenOptions,
    MemoryMedia,
    NamespaceOptions,
    SubsystemOptions,
    Target,
    TargetOptions,
    discover,
)
from tests.waiting import until

NQNS = ["nqn.2026-01.io.example:one", "nqn.2026-01.io.example:two"]


def options(*listen: ListenOptions, size_bytes: int = 1 << 20, **more: object) -> TargetOptions:
    return TargetOptions(
        listen=listen or [ListenOptions()],
        subsystems=[
            SubsystemOptions(nqn=nqn, namespaces=[NamespaceOptions(media=MemoryMedia(size_bytes=size_bytes))])
            for nqn in NQNS
        ],
        **more,  # type: ignore[arg-type]
    )


def test_discovery_finds_what_is_served() -> None:
    with Target(options()) as target:
        host, port = target.addresses[0]
        log = discover([(host, port)])
        assert sorted(r.subnqn for r in log.records if r.subtype == "nvm") == NQNS
        record = next(r for r in log.records if r.subnqn == NQNS[0])
        assert (record.trtype, record.adrfam, record.traddr, record.trsvcid) == ("tcp", "ipv4", host, str(port))
        assert record.uri == target.uri(NQNS[0])
        with open_device(record.uri) as device:
            device.read_into(0, bytearray(4096))


def test_signals_are_left_to_the_main_thread() -> None:
    """One that a thread of the target took would not wake whoever waits in Python: `headrace serve` would go on."""
    tasks = Path("/proc/self/task")
    mask, before = signal.pthread_sigmask(signal.SIG_BLOCK, []), set(tasks.iterdir())
    with Target(options()):
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
        started = set(tasks.iterdir()) - before
        assert len(started) >= 2
        for task in started:
            fields = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            for number in (signal.SIGINT, signal.SIGTERM):
                assert int(fields["SigBlk"], 16) & 1 << (number - 1), fields["Name"]


def test_discovery_of_nobody_and_of_the_mute() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        port = mute.getsockname()[1]
        with pytest.raises(ConnectRefused, match=str(port)):
            discover([("127.0.0.1", port)], connect_timeout_s=2)
        mute.listen()
        with pytest.raises(DeviceTimeout):
            discover([("127.0.0.1", port)], connect_timeout_s=0.3)
    with pytest.raises(UsageError):
        discover([("127.0.0.1", 0)])
    with pytest.raises(UsageError):
        discover([("127.0.0.1", 1)], connect_timeout_s=0)


def test_discovery_of_something_else() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def answer() -> None:
            peer, _ = other.accept()
            with peer:
                peer.recv(1024)
                peer.sendall(b"SSH-2.0-OpenSSH_9.9\r\n" * 20)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(DeviceError) as caught:
            discover([("127.0.0.1", other.getsockname()[1])], connect_timeout_s=5)
        assert not isinstance(caught.value, DeviceTimeout)
        thread.join()


def test_two_listeners_and_ipv6() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
    with Target(options(ListenOptions(host="::1"), ListenOptions())) as target:
        hosts = [host for host, _ in target.addresses]
        assert hosts == ["::1", "127.0.0.1"]
        with open_device(target.uri(NQNS[1])) as device:
            assert device.uri.startswith("nvme+tcp://[::1]:")
            device.flush()


def test_status_is_json_and_stop_ends_it() -> None:
    target = Target(options())
    assert set(NQNS) <= set(json.dumps(target.status()).split('"'))
    host, port = target.addresses[0]
    target.stop()
    target.stop()
    with pytest.raises(OSError), socket.create_connection((host, port), 2):
        pass


def test_a_dropped_target_frees_its_port() -> None:
    target = Target(options())
    host, port = target.addresses[0]
    del target
    gc.collect()
    with Target(options(ListenOptions(host=host, port=port))):
        pass


def test_a_port_in_use() -> None:
    with Target(options()) as target:
        host, port = target.addresses[0]
        with pytest.raises(HeadraceError) as caught:
            Target(options(ListenOptions(host=host, port=port)))
        assert str(port) in str(caught.value)


def test_what_the_native_side_refuses(tmp_path: Path) -> None:
    for make in (
        lambda: options(size_bytes=1000),
        lambda: options(mdts_bytes=5000),
        lambda: options(worker_threads=0),
    ):
        with pytest.raises(UsageError):
            Target(make())
    missing = NamespaceOptions(media=FileMedia(path=str(tmp_path / "missing")))
    with pytest.raises(DeviceError, match="missing"):
        Target(TargetOptions(subsystems=[SubsystemOptions(nqn=NQNS[0], namespaces=[missing])]))


def test_files_persist_and_say_their_engine(tmp_path: Path) -> None:
    media = FileMedia(path=str(tmp_path / "disk"), size_bytes=1 << 20, create=True)
    subsystems = [SubsystemOptions(nqn=NQNS[0], namespaces=[NamespaceOptions(media=media)])]
    for turn in range(2):
        with Target(TargetOptions(subsystems=subsystems, io_engine="pread")) as target:
            assert "pread" in json.dumps(target.status())
            with open_device(target.uri()) as device:
                if turn == 0:
                    device.write(4096, b"k" * 4096)
                    device.flush()
                kept = bytearray(4096)
                device.read_into(4096, kept)
                assert kept == b"k" * 4096


def test_a_forked_child_leaves_the_target_alone() -> None:
    with Target(options()) as target:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                target.stop()
                del target
                gc.collect()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with open_device(target.uri(NQNS[0])) as device:
            device.flush()


def test_a_device_follows_what_is_changed() -> None:
    """Our host at our target: ANA states choose its path, a larger namespace makes a larger device."""
    two = [ListenOptions(name="a"), ListenOptions(name="b")]
    with Target(options(*two)) as target:
        portals = ",".join(f"{host}:{port}" for host, port in target.addresses)
        with open_device(f"nvme+tcp://{portals}/{NQNS[0]}?nsid=1") as device:
            data = bytearray(4096)
            device.write(0, b"w" * 4096)
            for bad, good in (("a", "b"), ("b", "a")):
                target.set_ana_state(NQNS[0], 1, "optimized", portal=good)
                target.set_ana_state(NQNS[0], 1, "inaccessible", portal=bad)
                device.read_into(0, data)
                assert data == b"w" * 4096
            target.set_ana_state(NQNS[0], 1, "optimized")
            target.resize_namespace(NQNS[0], 1, 2 << 20)
            until(lambda: device.size_bytes == 2 << 20, "the device stays as small as it was")
            device.write(1 << 20, b"n" * 4096)
