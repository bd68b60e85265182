"""How a device reaches its namespace: by which name, from where, as whom."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from headrace.device import open_device
from headrace.errors import ConnectRefused, DeviceError, DeviceTimeout, UsageError
from headrace.fabric import ListenOptions, MemoryMedia, NamespaceOptions, SubsystemOptions, Target, TargetOptions
from headrace.testing.serve import serving

NQN = "nqn.2026-01.io.example:disk"
UUID = "01234567-89ab-cdef-0123-456789abcdef"


@pytest.fixture
def target() -> Iterator[Target]:
    spaces = [
        NamespaceOptions(media=MemoryMedia(size_bytes=1 << 20), nsid=1),
        NamespaceOptions(media=MemoryMedia(size_bytes=2 << 20), nsid=9, uuid=UUID),
    ]
    with Target(TargetOptions(subsystems=[SubsystemOptions(nqn=NQN, namespaces=spaces)])) as running:
        yield running


def address(target: Target, query: str) -> str:
    return target.uri().partition("?")[0] + f"?{query}"


def test_by_uuid_and_by_nguid(target: Target) -> None:
    with open_device(address(target, f"uuid={UUID}")) as device:
        assert device.size_bytes == 2 << 20
        told = device.describe()
        assert told["nsid"] == 9
        assert told["address"].endswith(f"?uuid={UUID}") and device.uri.endswith(f"?uuid={UUID}")
        nguid = told["nguid"]
        again = pickle.loads(pickle.dumps(device))
        assert again.size_bytes == 2 << 20
        again.close()
    if nguid.strip("0"):
        with open_device(address(target, f"nguid={nguid}")) as device:
            assert device.describe()["nsid"] == 9
    other = uuid.uuid4()
    with pytest.raises(ConnectRefused, match="2 namespaces") as caught:
        open_device(address(target, f"uuid={other}"))
    assert str(other) in str(caught.value)


def test_from_an_address_with_a_type_of_service(target: Target) -> None:
    with open_device(address(target, "host_traddr=127.0.0.2&tos=184&hpda=7&maxr2t=3&policy=round-robin")) as device:
        device.write(0, b"x" * 8192)
        got = bytearray(8192)
        device.read_into(0, got)
        assert got == b"x" * 8192
        link = device.describe()["link"]
        assert (link["host_traddr"], link["tos"], link["hpda"], link["maxr2t"]) == ("127.0.0.2", 184, 7, 3)
        peers = str(target.status())
        assert "127.0.0.2" in peers, peers


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("host_traddr=203.0.113.77", "host_traddr"),
        ("host_traddr=::1", "different families"),
        ("host_iface=nosuchiface0", "host_iface"),
    ],
)
def test_our_own_side_is_named(target: Target, query: str, says: str) -> None:
    with pytest.raises((DeviceError, UsageError)) as caught:
        open_device(address(target, query + "&connect_timeout=2"))
    assert says in str(caught.value)


def test_an_interface_is_bound_to(target: Target) -> None:
    try:
        device = open_device(address(target, "host_iface=lo"))
    except DeviceError as error:
        # Allowed to everybody since Linux 5.7; a profile may still forbid it, and then it is said so.
        assert "host_iface" in str(error)
        return
    with device:
        device.write(0, b"y" * 4096)
        assert device.describe()["link"]["host_iface"] == "lo"


def test_an_identity_of_its_own_is_kept(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOSTNQN", "nqn.2026-01.io.example:site")
    mine = uuid.uuid4()
    with open_device(target.uri(), hostid=mine) as device:
        assert device.describe()["hostnqn"] == "nqn.2026-01.io.example:site"
        assert device.describe()["hostid"] == mine.hex
        text = pickle.dumps(device)
    # Also where the site's name has changed meanwhile: the two belong together.
    monkeypatch.setenv("HEADRACE_HOSTNQN", "nqn.2026-01.io.example:elsewhere")
    with pickle.loads(text) as again:
        assert (again.describe()["hostnqn"], again.describe()["hostid"]) == ("nqn.2026-01.io.example:site", mine.hex)
    with open_device(target.uri(), hostnqn="nqn.2026-01.io.example:me") as device:
        assert device.describe()["hostnqn"] == "nqn.2026-01.io.example:me"
    with open_device(target.uri()) as device, pickle.loads(pickle.dumps(device)) as again:
        assert again.describe()["hostnqn"] == "nqn.2026-01.io.example:elsewhere"
    with pytest.raises(UsageError, match="hostnqn"):
        open_device(target.uri(), hostnqn="")
    with pytest.raises(UsageError, match="zeros"):
        open_device(target.uri(), hostid=uuid.UUID(int=0))
    with open_device("mem:1MiB", hostid=mine) as device:
        assert device.size_bytes == 1 << 20


def test_names_that_have_several_addresses(target: Target) -> None:
    """`localhost` may be ::1 first, where nobody listens."""
    port = target.addresses[0][1]
    with open_device(f"nvme+tcp://localhost:{port}/{NQN}?nsid=1") as device:
        assert device.size_bytes == 1 << 20
    with (
        Target(
            TargetOptions(
                listen=[ListenOptions(host="::1")],
                subsystems=[
                    SubsystemOptions(nqn=NQN, namespaces=[NamespaceOptions(media=MemoryMedia(size_bytes=1 << 20))])
                ],
            )
        ) as six,
        open_device(six.uri()) as device,
    ):
        assert device.describe()["peer"].startswith("[::1]")


def _black_holes(stack: ExitStack) -> list[int]:
    """Ports of 127.0.0.1: one that takes connections and never says a word, one that does not even take them."""
    mute = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
    full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    port = full.getsockname()[1]
    for _ in range(4):
        # Nobody accepts: what does not fit into the backlog waits for an answer to its SYN.
        filler = stack.enter_context(socket.socket())
        filler.setblocking(False)
        filler.connect_ex(("127.0.0.1", port))
    return [mute.getsockname()[1], port]


def test_keep_alive_holds_through_a_held_gil_and_anothers_connect() -> None:
    """KATO a second, for four seconds: the target would have dropped us more than once."""
    with ExitStack() as stack:
        served = stack.enter_context(serving(NQN, "mem:1MiB"))
        device = stack.enter_context(open_device(served.uri(keepalive="1")))
        before = device.describe()
        errors: list[Exception] = []

        def connect(port: int) -> None:
            try:
                open_device(f"nvme+tcp://127.0.0.1:{port}/{NQN}?connect_timeout=4")
            except DeviceError as error:
                errors.append(error)

        threads = [threading.Thread(target=connect, args=(port,)) for port in _black_holes(stack)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        # PyDLL keeps the GIL during the call.
        ctypes.PyDLL(None).usleep(2_500_000)
        for thread in threads:
            thread.join(30)
        assert [type(error) for error in errors] == [DeviceTimeout, DeviceTimeout]
        device.read_into(0, bytearray(4096))
        after = device.describe()
        assert device.loss_count() == 0
        assert (after["cntlid"], after["reconnects"]) == (before["cntlid"], 0)


def test_without_keep_alive_the_same_target_lets_go() -> None:
    """What the test above would see: a host that is stopped for longer than KATO is dropped, and comes back."""
    script = """
import sys, time
from headrace.device import open_device
with open_device(sys.argv[1]) as device:
    print("ready", flush=True)
    sys.stdin.readline()
    device.read_into(0, bytearray(4096))
    print(device.loss_count(), flush=True)
"""
    with serving(NQN, "mem:1MiB") as served:
        command = [sys.executable, "-c", script, served.uri(keepalive="0.5")]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(3)
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.5)
            process.stdin.write("\n")
            process.stdin.flush()
            assert int(process.stdout.readline()) >= 1
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
