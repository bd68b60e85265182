"""Addresses: what is taken, what is refused, and that writing one back gives the same."""

from __future__ import annotations

import math
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.device import (
    BlockAddress,
    FileAddress,
    MemoryAddress,
    NvmeTcpAddress,
    NvmeTcpOptions,
    Portal,
    open_device,
    parse_address,
)
from headrace.errors import HeadraceError, UsageError

NQN = "nqn.2026-01.io.example:disk"
UUID = uuid.UUID("01234567-89ab-cdef-0123-456789abcdef")


@pytest.mark.parametrize(
    ("uri", "host", "port"),
    [
        (f"nvme+tcp://127.0.0.1:4421/{NQN}?nsid=1", "127.0.0.1", 4421),
        (f"nvme+tcp://[::1]:4421/{NQN}", "::1", 4421),
        (f"nvme+tcp://[fe80::1%eth0]/{NQN}", "fe80::1%eth0", 4420),
        (f"nvme+tcp://storage.example/{NQN}", "storage.example", 4420),
    ],
)
def test_hosts_and_ports(uri: str, host: str, port: int) -> None:
    address = parse_address(uri)
    assert address == NvmeTcpAddress(portals=(Portal(host, port),), subsysnqn=NQN)
    assert parse_address(address.uri) == address


def test_several_portals_of_every_kind() -> None:
    address = parse_address(f"nvme+tcp://10.0.0.1:4420,[fe80::1%eth0]:4421,storage.example/{NQN}?uuid={UUID}")
    assert isinstance(address, NvmeTcpAddress)
    assert address.portals == (("10.0.0.1", 4420), ("fe80::1%eth0", 4421), ("storage.example", 4420))
    assert address.options.uuid == UUID
    assert address.uri == (f"nvme+tcp://10.0.0.1:4420,[fe80::1%eth0]:4421,storage.example:4420/{NQN}?uuid={UUID}")


def test_every_option() -> None:
    address = parse_address(
        f"nvme+tcp://h:1/{NQN}?nsid=3&hdgst=1&ddgst=1&queues=2&depth=32&keepalive=7.5&connect_timeout=1&io_timeout=2"
        "&loss_timeout=forever&policy=round-robin&host_traddr=fe80::7&host_iface=eth0.5&tos=184&hpda=31&maxr2t=3&poll_us=50"
    )
    assert isinstance(address, NvmeTcpAddress)
    assert address.options == NvmeTcpOptions(
        nsid=3, header_digest=True, data_digest=True, queues=2, depth=32, keep_alive_s=7.5, connect_timeout_s=1,
        io_timeout_s=2, loss_timeout_s=math.inf, policy="round-robin", host_traddr="fe80::7", host_iface="eth0.5",
        tos=184, hpda=31, maxr2t=3, poll_us=50,
    )  # fmt: skip
    assert parse_address(address.uri) == address


_NAMES = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,30}", fullmatch=True)
_V6 = st.ip_addresses(v=6).map(str)
_HOSTS = _NAMES | st.ip_addresses(v=4).map(str) | _V6 | st.builds("{}%{}".format, _V6, _NAMES)
_PORTALS = st.lists(st.builds(Portal, _HOSTS, st.integers(1, 65535)), min_size=1, max_size=16, unique=True)
_NQNS = st.text(
    st.characters(min_codepoint=33, exclude_characters="\x7f", exclude_categories=["Cs"]), min_size=1
).filter(lambda nqn: len(nqn.encode()) <= 223)
_TIMES = st.floats(0.1, 3600)
_NAMESPACES = (
    st.builds(dict, nsid=st.integers(1, 0xFFFF_FFFE))
    | st.builds(dict, uuid=st.uuids())
    | st.builds(dict, nguid=st.from_regex(r"[0-9a-f]{31}1", fullmatch=True))
)
_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "header_digest": st.booleans(),
        "data_digest": st.booleans(),
        "queues": st.integers(1, 128),
        "depth": st.integers(1, 1024),
        "policy": st.sampled_from(["queue-depth", "round-robin"]),
        "host_traddr": st.ip_addresses().map(str),
        "host_iface": st.from_regex(r"[!-.0-~]{1,15}", fullmatch=True),
        "tos": st.integers(0, 255),
        "hpda": st.integers(0, 31),
        "maxr2t": st.integers(0, 255),
        "poll_us": st.integers(0, 100_000),
        "keep_alive_s": _TIMES,
        "connect_timeout_s": _TIMES,
        "io_timeout_s": _TIMES,
        "loss_timeout_s": _TIMES | st.just(math.inf),
    },
)


@given(_PORTALS, _NQNS, _NAMESPACES, _OPTIONS)
def test_what_is_written_is_read_back(
    portals: list[Portal], nqn: str, namespace: dict[str, object], options: dict[str, object]
) -> None:
    address = NvmeTcpAddress(
        portals=tuple(portals),
        subsysnqn=nqn,
        options=NvmeTcpOptions(**namespace, **options),  # type: ignore[arg-type]
    )
    assert parse_address(address.uri) == address
    assert parse_address(address.uri).uri == address.uri


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_a_usage_error(text: str) -> None:
    for uri in (text, f"nvme+tcp://{text}", f"nvme+tcp://h/{text}", f"nvme+tcp://h/{NQN}?{text}"):
        try:
            address = parse_address(uri)
        except UsageError:
            continue
        assert parse_address(address.uri) == address


def test_default_options_are_not_written_back() -> None:
    assert parse_address(f"nvme+tcp://h/{NQN}?queues=1&hdgst=0").uri == f"nvme+tcp://h:4420/{NQN}?nsid=1"


def test_files_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_address("file:/a/b%20c%3F?block=512&create=1MiB&engine=pread") == FileAddress(
        path="/a/b c?", block_bytes=512, create_bytes=1 << 20, engine="pread"
    )
    assert parse_address("file:///a") == parse_address("file:/a") == FileAddress(path="/a")
    monkeypatch.chdir(tmp_path)
    assert parse_address("file:b") == FileAddress(path=str(tmp_path / "b"))
    odd = FileAddress(path="/x/100%?#&=;é")
    assert parse_address(odd.uri) == odd
    assert parse_address("mem:64MiB") == MemoryAddress(size_bytes=64 << 20)
    assert parse_address("mem:1024?block=512") == MemoryAddress(size_bytes=1024, block_bytes=512)


@pytest.mark.parametrize(
    ("uri", "path", "block", "engine", "again"),
    [
        ("/dev/nvme1n1", "/dev/nvme1n1", None, "auto", "block:/dev/nvme1n1"),
        ("block:/dev/dm-0?block=512", "/dev/dm-0", 512, "auto", "block:/dev/dm-0?block=512"),
        ("/dev/sdb?engine=pread", "/dev/sdb", None, "pread", "block:/dev/sdb?engine=pread"),
        (
            "/dev/disk/by-id/a%20b?engine=io_uring&block=4096",
            "/dev/disk/by-id/a b",
            4096,
            "io_uring",
            "block:/dev/disk/by-id/a%20b?block=4096&engine=io_uring",
        ),
    ],
)
def test_block_devices(uri: str, path: str, block: int | None, engine: str, again: str) -> None:
    address = parse_address(uri)
    assert address == BlockAddress(path=path, block_bytes=block, engine=engine)
    assert address.uri == again and parse_address(again) == address


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("", "not the address of a device"),
        ("/srv/disk", "not the address of a device"),
        ("/dev/sda?create=1MiB", "unknown option 'create'"),
        ("/dev/sda?block=1000", "logical block"),
        ("/dev/sda?engine=magic", "I/O engine"),
        ("block:", "without an absolute path"),
        ("block:sda", "without an absolute path"),
        ("block:/dev/a%00b", "without an absolute path"),
        ("http://x/y", "not the address of a device"),
        ("nvme+tcp:h", "not an NVMe/TCP address"),
        ("nvme+tcp://h:x/" + NQN, "not an NVMe/TCP address"),
        ("nvme+tcp://::1/" + NQN, "not an NVMe/TCP address"),
        ("nvme+tcp://h:0/" + NQN, "port"),
        ("nvme+tcp://h:65536/" + NQN, "port"),
        ("nvme+tcp://h/", "not an NVMe/TCP address"),
        ("nvme+tcp://h/a%20b", "NVMe qualified name"),
        ("nvme+tcp://h/nqn." + "x" * 220, "NVMe qualified name"),
        (f"nvme+tcp://h/{NQN}?colour=1", "unknown option 'colour'"),
        (f"nvme+tcp://h/{NQN}?block=512", "unknown option 'block'"),
        (f"nvme+tcp://h/{NQN}?nsid", "name=value"),
        (f"nvme+tcp://h/{NQN}?nsid=1&nsid=2", "twice"),
        (f"nvme+tcp://h/{NQN}?nsid=0", "nsid is out of range"),
        (f"nvme+tcp://h/{NQN}?nsid=-1", "nsid has a wrong value"),
        (f"nvme+tcp://h/{NQN}?hdgst=yes", "hdgst has a wrong value"),
        (f"nvme+tcp://h/{NQN}?io_timeout=nan", "io_timeout has a wrong value"),
        (f"nvme+tcp://h/{NQN}?io_timeout=0", "io_timeout is out of range"),
        (f"nvme+tcp://h/{NQN}?queues=1000", "queues is out of range"),
        (f"nvme+tcp://h,/{NQN}", "not an NVMe/TCP address"),
        (f"nvme+tcp://h:4420,h/{NQN}", "twice"),
        (f"nvme+tcp://{','.join(f'h{i}' for i in range(17))}/{NQN}", "too many portals"),
        (f"nvme+tcp://[10.0.0.1]/{NQN}", "not an NVMe/TCP address"),
        (f"nvme+tcp://[1:2]/{NQN}", "not a host"),
        (f"nvme+tcp://user:secret@h/{NQN}", "not an NVMe/TCP address"),
        ("nvme+tcp://h/%ff", "not an NVMe/TCP address"),
        (f"nvme+tcp://h/{NQN}?host_iface=%ff", "name=value"),
        (f"nvme+tcp://h/{NQN}?nsid=1&uuid={UUID}", "two names"),
        (f"nvme+tcp://h/{NQN}?uuid=1", "uuid has a wrong value"),
        (f"nvme+tcp://h/{NQN}?uuid={'0' * 8}-0000-0000-0000-{'0' * 12}", "uuid names nothing"),
        (f"nvme+tcp://h/{NQN}?nguid={'0' * 32}", "nguid is not one"),
        (f"nvme+tcp://h/{NQN}?nguid=12", "nguid has a wrong value"),
        (f"nvme+tcp://h/{NQN}?policy=best", "no such policy"),
        (f"nvme+tcp://h/{NQN}?host_traddr=here", "host_traddr is not an address"),
        (f"nvme+tcp://h/{NQN}?host_iface=a/b", "host_iface is not an interface"),
        (f"nvme+tcp://h/{NQN}?host_iface=abcdefghijklmnop", "host_iface is not an interface"),
        (f"nvme+tcp://h/{NQN}?tos=256", "tos is out of range"),
        (f"nvme+tcp://h/{NQN}?hpda=32", "hpda is out of range"),
        (f"nvme+tcp://h/{NQN}?maxr2t=256", "maxr2t is out of range"),
        (f"nvme+tcp://h/{NQN}?poll_us=100001", "poll_us is out of range"),
        (f"nvme+tcp://h/{NQN}?io_timeout=forever", "io_timeout has a wrong value"),
        (f"nvme+tcp://h:{'1' * 5000}/{NQN}", "not an NVMe/TCP address"),
        (f"nvme+tcp://h/{NQN}\udcff", "not UTF-8"),
        (f"nvme+tcp://h\udcff/{NQN}", "not UTF-8"),
        ("file:/\udcff", "not UTF-8"),
        ("file:", "without a path"),
        ("file://other/x", "another machine"),
        ("file:/x?block=1000", "logical block"),
        ("file:/x?create=1000", "create is not a size"),
        ("file:/x?create=lots", "create has a wrong value"),
        ("file:/x?engine=magic", "I/O engine"),
        ("mem:", "size has a wrong value"),
        ("mem:1000", "not a size for this block"),
        ("mem:0", "not a size for this block"),
    ],
)
def test_mistakes_are_named(uri: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_address(uri)
    assert says in str(caught.value)
    assert caught.value.exit_status == 2


def test_create_makes_keeps_and_refuses(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with open_device(f"file:{path}?create=1MiB") as device:
        device.write(0, b"k" * 4096)
    with open_device(f"file:{path}?create=1MiB") as device:
        kept = bytearray(4096)
        device.read_into(0, kept)
        assert kept == b"k" * 4096
        assert "create=" not in device.uri
    with pytest.raises(UsageError, match="another size"):
        open_device(f"file:{path}?create=2MiB")
    with pytest.raises(UsageError, match="exclude"):
        open_device(f"file:{path}?create=1MiB", read_only=True)


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match="missing") as caught:
        open_device(f"file:{tmp_path}/missing")
    assert "No such file" in str(caught.value)
    with pytest.raises(HeadraceError, match=tmp_path.name):
        open_device(f"file:{tmp_path}")
    (tmp_path / "small").write_bytes(b"x")
    with pytest.raises(UsageError, match="small"):
        open_device(f"file:{tmp_path}/small")
