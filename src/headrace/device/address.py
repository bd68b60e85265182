"""Addresses of devices: text to checked options and back.

| form | options (`?name=value&...`) |
|---|---|
| `nvme+tcp://HOST[:PORT]/NQN` | `nsid`, `hdgst`, `ddgst` (0 or 1), `queues`, `depth` |
| | `keepalive`, `connect_timeout`, `io_timeout`, `loss_timeout` (seconds) |
| `file:/PATH` | `block` (512 or 4096), `create` (a size), `engine` (`auto`, `io_uring`, `pread`) |
| `mem:SIZE` | `block` |

`HOST` is a name, an IPv4 address, or an IPv6 address in brackets. Characters that mean something in a URI are
percent-encoded in paths and NQNs. An option that is not in the table is an error, never ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, unquote

from headrace.errors import UsageError
from headrace.settings import check_nqn, check_text
from headrace.units import parse_bytes

#: IANA's port for NVMe/TCP I/O controllers.
NVME_TCP_PORT = 4420

_T = TypeVar("_T")


def _within(field_name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UsageError(f"{field_name} is out of range", expected=f"{low:g} to {high:g}", found=f"{value:g}")


@dataclass(frozen=True, kw_only=True)
class NvmeTcpOptions:
    """How to talk to one namespace over NVMe/TCP. The name in an address stands in brackets."""

    #: [nsid] Namespace of the subsystem.
    nsid: int = 1
    #: [hdgst] CRC32C over every PDU header. Costs next to nothing; TCP's own checksum is weak.
    header_digest: bool = False
    #: [ddgst] CRC32C over the data of every PDU. Costs CPU on both sides; blocks in a volume have their own checksums.
    data_digest: bool = False
    #: [queues] I/O queues, each one TCP connection. One is enough until a core is full.
    queues: int = 1
    #: [depth] Commands under way on each queue; the target may allow fewer.
    depth: int = 128
    #: [keepalive] Seconds without a sign of life after which the target drops the association; we send twice as often.
    keep_alive_s: float = 5.0
    #: [connect_timeout] Seconds for one attempt to connect, all handshakes included.
    connect_timeout_s: float = 10.0
    #: [io_timeout] Seconds that one command may take while connected; then the association is given up.
    io_timeout_s: float = 30.0
    #: [loss_timeout] Seconds that I/O waits for a lost target to come back, reconnecting all the while. Long for a
    #: training run that should outlive a target's restart, short for a tool that should fail.
    loss_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        _within("nsid", self.nsid, 1, 0xFFFF_FFFE)
        _within("queues", self.queues, 1, 128)
        _within("depth", self.depth, 1, 1024)
        _within("keepalive", self.keep_alive_s, 0.1, 3600)
        _within("connect_timeout", self.connect_timeout_s, 0.1, 3600)
        _within("io_timeout", self.io_timeout_s, 0.1, 86400)
        _within("loss_timeout", self.loss_timeout_s, 0.1, 30 * 86400)


@dataclass(frozen=True, kw_only=True)
class NvmeTcpAddress:
    """`nvme+tcp://HOST:PORT/NQN?...`"""

    host: str
    port: int
    subsysnqn: str
    options: NvmeTcpOptions = field(default_factory=NvmeTcpOptions)

    def __post_init__(self) -> None:
        check_nqn("the subsystem's name", self.subsysnqn)
        _within("port", self.port, 1, 65535)

    @property
    def uri(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        query = [f"nsid={self.options.nsid}"]
        for name, (attribute, _) in _NVME_OPTIONS.items():
            value = getattr(self.options, attribute)
            if name != "nsid" and value != getattr(_NVME_DEFAULTS, attribute):
                query.append(f"{name}={int(value) if isinstance(value, bool) else f'{value:.15g}'}")
        return f"nvme+tcp://{host}:{self.port}/{quote(self.subsysnqn, safe=':._-')}?{'&'.join(query)}"


@dataclass(frozen=True, kw_only=True)
class FileAddress:
    """`file:/PATH?...`: a file or a block device of this machine."""

    #: Absolute.
    path: str
    #: [block] Logical block in bytes, 512 or 4096.
    block_bytes: int = 4096
    #: [create] Make a sparse file of this size if there is none; an existing one must have this size.
    create_bytes: int | None = None
    #: [engine] "auto" takes io_uring where it is allowed; `describe()["engine"]` says which is in use.
    engine: str = "auto"

    def __post_init__(self) -> None:
        _check_block(self.block_bytes)
        if self.engine not in ("auto", "io_uring", "pread"):
            raise UsageError("no such I/O engine", expected="auto, io_uring or pread", found=repr(self.engine))
        if not self.path or "\0" in self.path:
            raise UsageError("a file: address without a path", expected="file:/PATH", found=repr(self.path))
        if self.create_bytes is not None and (self.create_bytes <= 0 or self.create_bytes % self.block_bytes):
            raise UsageError(
                "create is not a size for this block",
                expected=f"a multiple of {self.block_bytes}",
                found=str(self.create_bytes),
            )

    @property
    def uri(self) -> str:
        # Without `create`: what opens the device again must not make an empty one where it is gone.
        engine = "" if self.engine == "auto" else f"&engine={self.engine}"
        return f"file:{quote(self.path)}?block={self.block_bytes}{engine}"


@dataclass(frozen=True, kw_only=True)
class MemoryAddress:
    """`mem:SIZE?...`: memory of this process, gone with the device. Each opening is a new, zeroed one."""

    size_bytes: int
    block_bytes: int = 4096

    def __post_init__(self) -> None:
        _check_block(self.block_bytes)
        if self.size_bytes <= 0 or self.size_bytes % self.block_bytes:
            raise UsageError(
                "not a size for this block",
                expected=f"a positive multiple of {self.block_bytes}",
                found=str(self.size_bytes),
            )

    @property
    def uri(self) -> str:
        return f"mem:{self.size_bytes}?block={self.block_bytes}"


def _check_block(block_bytes: int) -> None:
    if block_bytes not in (512, 4096):
        raise UsageError("not a logical block", expected="block=512 or block=4096", found=str(block_bytes))


def parse_address(uri: str) -> NvmeTcpAddress | FileAddress | MemoryAddress:
    """The address in `uri`; `UsageError` names what is wrong with it."""
    check_text("the address of a device", uri)
    scheme, colon, rest = uri.partition(":")
    if colon and scheme == "nvme+tcp":
        return _parse_nvme_tcp(uri, rest)
    if colon and scheme == "file":
        return _parse_file(uri, rest)
    if colon and scheme == "mem":
        return _parse_memory(uri, rest)
    raise UsageError(
        "not the address of a device",
        expected="nvme+tcp://HOST:PORT/NQN?nsid=1, file:/PATH or mem:SIZE",
        found=repr(uri),
        next_step=f"a file or block device is file:{uri}" if uri.startswith("/") else None,
    )


def _parse_nvme_tcp(uri: str, rest: str) -> NvmeTcpAddress:
    path, _, query = rest.partition("?")
    match = re.fullmatch(
        r"//(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<name>[^\[\]/:@]+))(?::(?P<port>[0-9]{1,9}))?/(?P<nqn>.+)", path
    )
    if match is None:
        raise UsageError("not an NVMe/TCP address", expected="nvme+tcp://HOST:PORT/NQN?nsid=1", found=repr(uri))
    values = _options(uri, query, _NVME_OPTIONS)
    return NvmeTcpAddress(
        host=match["v6"] or match["name"],
        port=int(match["port"] or NVME_TCP_PORT),
        subsysnqn=unquote(match["nqn"]),
        options=NvmeTcpOptions(**values),
    )


def _parse_file(uri: str, rest: str) -> FileAddress:
    path, _, query = rest.partition("?")
    if path.startswith("//"):
        host, _, path = path[2:].partition("/")
        if host not in ("", "localhost"):
            raise UsageError("a file: address of another machine", expected="file:/PATH", found=repr(uri))
        path = "/" + path
    path = unquote(path)
    return FileAddress(path=str(Path(path).absolute()) if path else "", **_options(uri, query, _FILE_OPTIONS))


def _parse_memory(uri: str, rest: str) -> MemoryAddress:
    size, _, query = rest.partition("?")
    return MemoryAddress(size_bytes=_convert(uri, "size", size, _size), **_options(uri, query, _MEMORY_OPTIONS))


def _options(uri: str, query: str, known: dict[str, tuple[str, Callable[[str], Any]]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise UsageError("options are not name=value", where=uri, found=repr(query)) from None
    for name, text in pairs:
        if name not in known:
            raise UsageError(f"unknown option {name!r}", where=uri, expected="one of " + ", ".join(known))
        attribute, convert = known[name]
        if attribute in values:
            raise UsageError(f"option {name!r} is given twice", where=uri)
        values[attribute] = _convert(uri, name, text, convert)
    return values


def _convert(uri: str, name: str, text: str, convert: Callable[[str], _T]) -> _T:
    try:
        return convert(text)
    except ValueError as error:
        raise UsageError(f"{name} has a wrong value", where=uri, found=repr(text), next_step=str(error)) from None


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("give 0 or 1")
    return text == "1"


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise ValueError("give a whole number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("give a number of seconds")
    return value


def _size(text: str) -> int:
    return parse_bytes(text)


_NVME_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "nsid": ("nsid", _count),
    "hdgst": ("header_digest", _flag),
    "ddgst": ("data_digest", _flag),
    "queues": ("queues", _count),
    "depth": ("depth", _count),
    "keepalive": ("keep_alive_s", _seconds),
    "connect_timeout": ("connect_timeout_s", _seconds),
    "io_timeout": ("io_timeout_s", _seconds),
    "loss_timeout": ("loss_timeout_s", _seconds),
}
_NVME_DEFAULTS = NvmeTcpOptions()
_FILE_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "block": ("block_bytes", _count),
    "create": ("create_bytes", _size),
    "engine": ("engine", str),
}
_MEMORY_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {"block": ("block_bytes", _count)}
