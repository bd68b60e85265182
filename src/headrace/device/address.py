"""Addresses of devices: text to checked options and back.

| form | options (`?name=value&...`) |
|---|---|
| `nvme+tcp://HOST[:PORT][,HOST[:PORT]...]/NQN` | `nsid`, or `uuid`, or `nguid` |
| | `hdgst`, `ddgst` (0 or 1), `queues`, `depth` |
| | `keepalive`, `connect_timeout`, `io_timeout`, `loss_timeout` (seconds; `loss_timeout=forever`) |
| | `policy` (`queue-depth`, `round-robin`), `host_traddr`, `host_iface`, `tos`, `hpda`, `maxr2t`, `poll_us` |
| `/dev/NAME` or `block:/PATH` (of the kernel) | `block` (512 or 4096), `engine` (`auto`, `io_uring`, `pread`) |
| `file:/PATH` | `block`, `create` (a size), `engine` |
| `mem:SIZE` | `block` |

`HOST` is a name, an IPv4 address, or an IPv6 address in brackets; several are paths to one subsystem. Characters that
mean something in a URI are percent-encoded in paths and NQNs. An option that is not in the table is an error, never
ignored. An address holds no secrets: it may be printed, logged and pickled.
"""

from __future__ import annotations

import ipaddress
import math
import re
import uuid as uuids
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import parse_qsl, quote, unquote

from headrace.errors import UsageError
from headrace.settings import check_nqn, check_text
from headrace.units import parse_bytes

#: IANA's port for NVMe/TCP I/O controllers.
NVME_TCP_PORT = 4420
#: Most portals in one address.
PORTALS_MAX = 16
POLICIES = ("queue-depth", "round-robin")

_T = TypeVar("_T")


def _within(field_name: str, value: float, low: float, high: float) -> None:
    # Written so that a NaN is outside.
    if not low <= value <= high:
        raise UsageError(f"{field_name} is out of range", expected=f"{low:g} to {high:g}", found=f"{value:g}")


@dataclass(frozen=True, kw_only=True)
class NvmeTcpOptions:
    """How to talk to one namespace over NVMe/TCP. The name in an address stands in brackets."""

    #: [nsid] Namespace of the subsystem, by its number there.
    nsid: int = 1
    #: [uuid] The namespace by its UUID, which is the same behind every path and after every reconfiguration of the
    #: target. Looked for among the active namespaces at each connect; `nsid` then says nothing.
    uuid: uuids.UUID | None = None
    #: [nguid] The same by NGUID: 32 hexadecimal digits.
    nguid: str | None = None
    #: [hdgst] CRC32C over every PDU header. Costs next to nothing; TCP's own checksum is weak.
    header_digest: bool = False
    #: [ddgst] CRC32C over the data of every PDU. Costs CPU on both sides; blocks in a volume have their own checksums.
    data_digest: bool = False
    #: [queues] I/O queues, each one TCP connection. One is enough until a core is full.
    queues: int = 1
    #: [depth] Commands under way on each queue; the target may allow fewer.
    depth: int = 128
    #: [policy] Which of several paths takes the next command: the one with the least under way ("queue-depth"), or each
    #: in its turn ("round-robin").
    policy: str = "queue-depth"
    #: [host_traddr] The address of this machine that connections come from; `None`: as the routes say.
    host_traddr: str | None = None
    #: [host_iface] The network interface that connections must go through; `None`: as the routes say.
    host_iface: str | None = None
    #: [tos] Type of service, or traffic class, of every packet: DSCP and ECN, 0 to 255.
    tos: int | None = None
    #: [hpda] Data from the target begin at a multiple of (hpda + 1) * 4 bytes of their PDU. Linux's target: 0 only.
    hpda: int = 0
    #: [maxr2t] R2Ts that the target may have outstanding for one write, less one, as the specification counts.
    maxr2t: int = 0
    #: [poll_us] Microseconds that the I/O thread looks for more before it sleeps. Buys latency with CPU.
    poll_us: int = 0
    #: [keepalive] Seconds without a sign of life after which the target drops the association; we send twice as often.
    keep_alive_s: float = 5.0
    #: [connect_timeout] Seconds for one attempt to connect, all handshakes included.
    connect_timeout_s: float = 10.0
    #: [io_timeout] Seconds that one command may take while connected; then the association is given up.
    io_timeout_s: float = 30.0
    #: [loss_timeout] Seconds that I/O waits for a lost target to come back, reconnecting all the while; infinity
    #: ("forever"): until it does. Long for a training run that should outlive a target's restart, short for a tool that
    #: should fail.
    loss_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        _within("nsid", self.nsid, 1, 0xFFFF_FFFE)
        names = [name for name in ("uuid", "nguid") if getattr(self, name) is not None]
        if len(names) == 2 or (names and self.nsid != 1):
            raise UsageError("a namespace has two names here", expected="one of nsid, uuid and nguid")
        if self.uuid is not None and self.uuid.int == 0:
            raise UsageError("uuid names nothing", found=str(self.uuid))
        if self.nguid is not None and (not re.fullmatch(r"[0-9a-f]{32}", self.nguid) or not self.nguid.strip("0")):
            raise UsageError(
                "nguid is not one", expected="32 hexadecimal digits in lower case, not all 0", found=repr(self.nguid)
            )
        if self.policy not in POLICIES:
            raise UsageError("no such policy", expected=" or ".join(POLICIES), found=repr(self.policy))
        if self.host_traddr is not None and not _is_address(self.host_traddr):
            raise UsageError(
                "host_traddr is not an address", expected="an IPv4 or IPv6 address", found=repr(self.host_traddr)
            )
        if self.host_iface is not None and not re.fullmatch(r"[^\s/\x00-\x20\x7f]{1,15}", self.host_iface):
            raise UsageError(
                "host_iface is not an interface", expected="a name of 1 to 15 characters", found=repr(self.host_iface)
            )
        if self.tos is not None:
            _within("tos", self.tos, 0, 255)
        _within("hpda", self.hpda, 0, 31)
        _within("maxr2t", self.maxr2t, 0, 255)
        _within("poll_us", self.poll_us, 0, 100_000)
        _within("queues", self.queues, 1, 128)
        _within("depth", self.depth, 1, 1024)
        _within("keepalive", self.keep_alive_s, 0.1, 3600)
        _within("connect_timeout", self.connect_timeout_s, 0.1, 3600)
        _within("io_timeout", self.io_timeout_s, 0.1, 86400)
        if self.loss_timeout_s != math.inf:
            _within("loss_timeout", self.loss_timeout_s, 0.1, 30 * 86400)


class Portal(NamedTuple):
    """Where a subsystem listens."""

    #: A name, an IPv4 address, or an IPv6 address (without brackets, perhaps with `%zone`).
    host: str
    port: int = NVME_TCP_PORT

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class NvmeTcpAddress:
    """`nvme+tcp://HOST:PORT,.../NQN?...`"""

    #: From 1 to 16, each once. Several are paths to the same subsystem.
    portals: tuple[Portal, ...]
    subsysnqn: str
    options: NvmeTcpOptions = field(default_factory=NvmeTcpOptions)

    def __post_init__(self) -> None:
        check_nqn("the subsystem's name", self.subsysnqn)
        if not 1 <= len(self.portals) <= PORTALS_MAX:
            raise UsageError("too many portals, or none", expected=f"1 to {PORTALS_MAX}", found=str(len(self.portals)))
        for at, portal in enumerate(self.portals):
            _within("port", portal.port, 1, 65535)
            v6 = ":" in portal.host and _is_address(portal.host.partition("%")[0])
            if not (v6 and re.fullmatch(r"[^%]+(%[\w.-]+)?", portal.host)) and not re.fullmatch(
                r"[\w.-]{1,253}", portal.host
            ):
                raise UsageError("not a host", expected="a name or an address", found=repr(portal.host))
            if portal in self.portals[:at]:
                raise UsageError("a portal is given twice", found=str(portal))

    @property
    def uri(self) -> str:
        query = []
        for name, (attribute, _) in _NVME_OPTIONS.items():
            value = getattr(self.options, attribute)
            if value != getattr(_NVME_DEFAULTS, attribute):
                query.append(f"{name}={quote(_text(value), safe='.:-')}")
        if self.options.nsid == 1 and self.options.uuid is None and self.options.nguid is None:
            query.insert(0, "nsid=1")
        portals = ",".join(str(portal) for portal in self.portals)
        return f"nvme+tcp://{portals}/{quote(self.subsysnqn, safe=':._-')}?{'&'.join(query)}"


def _is_address(text: str) -> bool:
    try:
        return "%" not in text and bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def _text(value: object) -> str:
    """An option's value as `_NVME_OPTIONS` reads it back, to the last bit."""
    if isinstance(value, float):
        return "forever" if value == math.inf else str(int(value)) if value.is_integer() else repr(value)
    return str(int(value)) if isinstance(value, bool) else str(value)


@dataclass(frozen=True, kw_only=True)
class FileAddress:
    """`file:/PATH?...`: a file of this machine."""

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
        _check_engine(self.engine)
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
class BlockAddress:
    """`block:/PATH?...`, or a path below `/dev`: a block device of this machine's kernel."""

    #: Absolute. A link is followed at each opening: those below /dev/disk keep their names when the kernel counts anew.
    path: str
    #: [block] Logical block in bytes, 512 or 4096, at least the device's own; `None`: the device's own.
    block_bytes: int | None = None
    #: [engine] "auto" takes io_uring where it is allowed; `describe()["engine"]` says which is in use.
    engine: str = "auto"

    def __post_init__(self) -> None:
        if self.block_bytes is not None:
            _check_block(self.block_bytes)
        _check_engine(self.engine)
        if not self.path.startswith("/") or "\0" in self.path:
            raise UsageError(
                "a block: address without an absolute path", expected="block:/dev/NAME", found=repr(self.path)
            )

    @property
    def uri(self) -> str:
        options = [] if self.block_bytes is None else [f"block={self.block_bytes}"]
        options += [] if self.engine == "auto" else [f"engine={self.engine}"]
        return f"block:{quote(self.path)}" + ("?" + "&".join(options) if options else "")


#: Every kind of address.
Address: TypeAlias = "NvmeTcpAddress | BlockAddress | FileAddress | MemoryAddress"


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


def _check_engine(engine: str) -> None:
    if engine not in ("auto", "io_uring", "pread"):
        raise UsageError("no such I/O engine", expected="auto, io_uring or pread", found=repr(engine))


def parse_address(uri: str) -> Address:
    """The address in `uri`; `UsageError` names what is wrong with it."""
    check_text("the address of a device", uri)
    if uri.startswith("/dev/"):
        return _parse_block(uri, uri)
    scheme, colon, rest = uri.partition(":")
    if colon and scheme == "block":
        return _parse_block(uri, rest)
    if colon and scheme == "nvme+tcp":
        return _parse_nvme_tcp(uri, rest)
    if colon and scheme == "file":
        return _parse_file(uri, rest)
    if colon and scheme == "mem":
        return _parse_memory(uri, rest)
    raise UsageError(
        "not the address of a device",
        expected="nvme+tcp://HOST:PORT/NQN?nsid=1, /dev/NAME, file:/PATH or mem:SIZE",
        found=repr(uri),
        next_step=f"a file is file:{uri}, a block device block:{uri}" if uri.startswith("/") else None,
    )


_PORTAL = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?)\]|(?P<name>[\w.-]+))(?::(?P<port>[0-9]{1,9}))?"
)


def _parse_nvme_tcp(uri: str, rest: str) -> NvmeTcpAddress:
    path, _, query = rest.partition("?")
    match = re.fullmatch(r"//(?P<portals>[^/]+)/(?P<nqn>.+)", path)
    portals = [_PORTAL.fullmatch(text) for text in match["portals"].split(",")] if match else []
    try:
        nqn = unquote(match["nqn"], errors="strict") if match else ""
    except UnicodeDecodeError:
        nqn = ""
    found = [portal for portal in portals if portal]
    if not nqn or len(found) < len(portals):
        raise UsageError(
            "not an NVMe/TCP address",
            expected="nvme+tcp://HOST:PORT/NQN?nsid=1, with a comma between several HOST:PORT",
            found=repr(uri),
            next_step="an IPv6 address stands in brackets, as [::1]:4420" if "::" in path else None,
        )
    values = _options(uri, query, _NVME_OPTIONS)
    names = [name for name in ("nsid", "uuid", "nguid") if name in values]
    if len(names) > 1:
        raise UsageError(
            "a namespace has two names here", where=uri, expected="one of nsid, uuid and nguid", found=", ".join(names)
        )
    return NvmeTcpAddress(
        portals=tuple(Portal(m["v6"] or m["name"], int(m["port"] or NVME_TCP_PORT)) for m in found),
        subsysnqn=nqn,
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


def _parse_block(uri: str, rest: str) -> BlockAddress:
    path, _, query = rest.partition("?")
    return BlockAddress(path=unquote(path), **_options(uri, query, _BLOCK_OPTIONS))


def _parse_memory(uri: str, rest: str) -> MemoryAddress:
    size, _, query = rest.partition("?")
    return MemoryAddress(size_bytes=_convert(uri, "size", size, _size), **_options(uri, query, _MEMORY_OPTIONS))


def _options(uri: str, query: str, known: dict[str, tuple[str, Callable[[str], Any]]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), errors="strict")
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


def _seconds_or_forever(text: str) -> float:
    return math.inf if text == "forever" else _seconds(text)


def _uuid(text: str) -> uuids.UUID:
    if not re.fullmatch(r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}", text):
        raise ValueError("give a UUID, as in 01234567-89ab-cdef-0123-456789abcdef")
    return uuids.UUID(text)


def _nguid(text: str) -> str:
    if not re.fullmatch(r"[0-9A-Fa-f]{32}", text):
        raise ValueError("give 32 hexadecimal digits")
    return text.lower()


def _size(text: str) -> int:
    return parse_bytes(text)


_NVME_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "nsid": ("nsid", _count),
    "uuid": ("uuid", _uuid),
    "nguid": ("nguid", _nguid),
    "hdgst": ("header_digest", _flag),
    "ddgst": ("data_digest", _flag),
    "queues": ("queues", _count),
    "depth": ("depth", _count),
    "keepalive": ("keep_alive_s", _seconds),
    "connect_timeout": ("connect_timeout_s", _seconds),
    "io_timeout": ("io_timeout_s", _seconds),
    "loss_timeout": ("loss_timeout_s", _seconds_or_forever),
    "policy": ("policy", str),
    "host_traddr": ("host_traddr", str),
    "host_iface": ("host_iface", str),
    "tos": ("tos", _count),
    "hpda": ("hpda", _count),
    "maxr2t": ("maxr2t", _count),
    "poll_us": ("poll_us", _count),
}
_NVME_DEFAULTS = NvmeTcpOptions()
_FILE_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "block": ("block_bytes", _count),
    "create": ("create_bytes", _size),
    "engine": ("engine", str),
}
_BLOCK_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "block": ("block_bytes", _count),
    "engine": ("engine", str),
}
_MEMORY_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {"block": ("block_bytes", _count)}
