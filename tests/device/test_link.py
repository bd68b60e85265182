"""How a device reaches its namespace: by which name, from where, as whom."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator

import pytest

from headrace.device import open_device
from headrace.errors import ConnectRefused, DeviceError, UsageError
from headrace.fabric import ListenOptions, MemoryMedia, NamespaceOptions, SubsystemOptions, Target, TargetOptions

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
