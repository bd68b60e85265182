"""What a target serves, as options that check themselves. `headrace.fabric.config` reads them from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.errors import UsageError
from headrace.settings import check_nqn

#: What a host may do.
ACCESSES = ("read-write", "read-only")
#: Of a path, best first (NVMe Base Specification 8.1.1).
ANA_STATES = ("optimized", "non-optimized", "inaccessible", "persistent-loss", "change")
#: Whether a file or block device is served past the page cache.
DIRECT = ("auto", "on", "off")
#: Options of the target that a subsystem may have for itself.
SUBSYSTEM_LIMITS = ("in_capsule_bytes", "mdts_bytes", "max_queue_entries", "max_io_queues")


@dataclass(frozen=True, kw_only=True)
class FileMedia:
    """Bytes in a file or block device."""

    path: str
    #: Bytes; needed with `create`, else checked where given.
    size_bytes: int | None = None
    #: Make a sparse file where there is none.
    create: bool = False
    #: Past the page cache (O_DIRECT): "auto" (block devices, where that is allowed), "on" or "off"; the status of the
    #: target says for each namespace which it is.
    direct: str = "auto"

    def __post_init__(self) -> None:
        if self.create and self.size_bytes is None:
            raise UsageError("FileMedia.create needs size_bytes", where=self.path)
        if self.direct not in DIRECT:
            raise UsageError("FileMedia.direct", where=self.path, expected=" or ".join(DIRECT), found=repr(self.direct))

    def _json(self) -> dict[str, Any]:
        return {"kind": "file", **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class MemoryMedia:
    """Bytes in memory of the target's process, zeros at first, gone with it."""

    size_bytes: int

    def _json(self) -> dict[str, Any]:
        return {"kind": "memory", "size_bytes": self.size_bytes}


@dataclass(frozen=True, kw_only=True)
class NamespaceOptions:
    """One namespace of a subsystem."""

    media: FileMedia | MemoryMedia
    #: From 1; different within the subsystem.
    nsid: int = 1
    #: Logical block: 512 or 4096 bytes.
    block_bytes: int = 4096
    #: More than 0: unflushed writes, up to this many bytes, live in the target's memory only, as in a drive's volatile
    #: cache, and die with its process. 0: writes go to the media at once.
    volatile_cache_bytes: int = 0
    #: Refuse writes; a file is opened for reading.
    read_only: bool = False
    #: The namespace's UUID; `None`: derived from NQN and nsid, the same after every restart.
    uuid: str | None = None
    #: As the UUID: 32 hexadecimal digits.
    nguid: str | None = None
    #: The ANA group that it is in, for as long as it is there.
    ana_group: int = 1
    #: File for reservations that survive a restart; it must exist. `None`: beside a media file, made when first needed.
    reservations_path: str | None = None
    #: None are offered, and their commands are refused.
    no_reservations: bool = False

    def __post_init__(self) -> None:
        if self.block_bytes not in (512, 4096):
            raise UsageError("NamespaceOptions.block_bytes", expected="512 or 4096", found=str(self.block_bytes))
        if self.read_only and isinstance(self.media, MemoryMedia):
            raise UsageError("NamespaceOptions.read_only", expected="media that hold something", found="new memory")
        if self.volatile_cache_bytes < 0:
            raise UsageError(
                "NamespaceOptions.volatile_cache_bytes", expected="0 or more", found=str(self.volatile_cache_bytes)
            )

    def _json(self) -> dict[str, Any]:
        return {
            "media": self.media._json(),
            "nsid": self.nsid,
            "block_bytes": self.block_bytes,
            "volatile_cache_bytes": self.volatile_cache_bytes,
            "read_only": self.read_only,
            "uuid": self.uuid,
            "nguid": self.nguid,
            "ana_group": self.ana_group,
            "reservations_path": self.reservations_path,
            "no_reservations": self.no_reservations,
        }


def _check_access(field: str, access: str) -> None:
    if access not in ACCESSES:
        raise UsageError(field, expected=" or ".join(ACCESSES), found=repr(access))


def _check_state(field: str, state: str) -> None:
    if state not in ANA_STATES:
        raise UsageError(field, expected=" or ".join(ANA_STATES), found=repr(state))


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """A host that may connect."""

    nqn: str
    #: "read-write", or "read-only": the target refuses its writes, and its namespaces are write protected.
    access: str = "read-write"

    def __post_init__(self) -> None:
        check_nqn("HostOptions.nqn", self.nqn)
        _check_access("HostOptions.access", self.access)


@dataclass(frozen=True, kw_only=True)
class AnaGroupOptions:
    """Namespaces that share their path states (Asymmetric Namespace Access)."""

    #: 1 to 64.
    id: int
    #: State through each portal, by `ListenOptions.name`; one of `ANA_STATES`.
    states: Mapping[str, str] = field(default_factory=dict)
    #: State through all other portals.
    state: str = "optimized"

    def __post_init__(self) -> None:
        _check_state("AnaGroupOptions.state", self.state)
        for name, state in self.states.items():
            _check_state(f"AnaGroupOptions.states[{name!r}]", state)

    def _json(self) -> dict[str, Any]:
        return {"id": self.id, "states": dict(self.states), "state": self.state}


@dataclass(frozen=True, kw_only=True)
class SubsystemOptions:
    """One subsystem: what a host connects to."""

    nqn: str
    #: May be empty: some can be added while the target runs.
    namespaces: Sequence[NamespaceOptions]
    #: At most 20 printable ASCII characters; empty: derived from the NQN.
    serial: str = ""
    #: At most 40 printable ASCII characters.
    model: str = "headrace"
    #: The hosts that may connect; an NQN alone: read and write.
    allow_hosts: Sequence[str | HostOptions] = ()
    #: What every other host may do: "read-write", "read-only", or `None`: nothing. With `None` and no host named, hosts
    #: on this machine may do everything, and the target does not listen beyond loopback.
    other_hosts: str | None = None
    #: Empty: group 1, optimized through every portal.
    ana_groups: Sequence[AnaGroupOptions] = ()
    #: Where given, in place of the target's.
    in_capsule_bytes: int | None = None
    mdts_bytes: int | None = None
    max_queue_entries: int | None = None
    max_io_queues: int | None = None

    def __post_init__(self) -> None:
        check_nqn("SubsystemOptions.nqn", self.nqn)
        for host in self.allow_hosts:
            check_nqn("SubsystemOptions.allow_hosts", host if isinstance(host, str) else host.nqn)
        if self.other_hosts is not None:
            _check_access("SubsystemOptions.other_hosts", self.other_hosts)

    def hosts(self) -> list[HostOptions]:
        return [HostOptions(nqn=host) if isinstance(host, str) else host for host in self.allow_hosts]

    def _json(self) -> dict[str, Any]:
        limits = {name: getattr(self, name) for name in SUBSYSTEM_LIMITS}
        return {
            **{name: value for name, value in limits.items() if value is not None},
            "nqn": self.nqn,
            "serial": self.serial,
            "model": self.model,
            "allow_hosts": [asdict(host) for host in self.hosts()],
            "other_hosts": self.other_hosts,
            "ana_groups": [group._json() for group in self.ana_groups],
            "namespaces": [namespace._json() for namespace in self.namespaces],
        }


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where to listen. NVMe/TCP has no encryption here: beyond loopback only on networks that you trust."""

    host: str = "127.0.0.1"
    #: 0: a free one, see `Target.addresses`.
    port: int = 0
    #: What ANA groups and `headrace target` call it; empty: its number, from 1.
    name: str = ""
    #: Only the discovery subsystem is served here.
    discovery: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError("ListenOptions.port", expected="0 to 65535", found=str(self.port))


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """A whole target. `None` anywhere means the target's own default, given in the comment."""

    subsystems: Sequence[SubsystemOptions]
    listen: Sequence[ListenOptions] = field(default_factory=lambda: (ListenOptions(),))
    #: For files: "auto" (pread, which is faster from the page cache), "io_uring" (or not at all) or "pread";
    #: `Target.status()` says which is in use.
    io_engine: str = "auto"
    #: MAXH2CDATA: longest data PDU that a host may send (1 MiB).
    max_h2c_data_bytes: int | None = None
    #: Write data that may travel with its command, saving a round trip (16 KiB).
    in_capsule_bytes: int | None = None
    #: MDTS: longest single command, a power of two (1 MiB).
    mdts_bytes: int | None = None
    #: Connections of all hosts together (8192, or as many as the process may have descriptors for).
    max_connections: int | None = None
    #: Of one host, and of one address before it has said which host it is (half of all, but not less than 64).
    max_host_connections: int | None = None
    #: Largest queue in entries (1024).
    max_queue_entries: int | None = None
    #: I/O queues of one controller (64).
    max_io_queues: int | None = None
    #: Data buffers of all connections together (1 GiB), and of one (64 MiB).
    memory_bytes: int | None = None
    connection_memory_bytes: int | None = None
    #: A new connection must be connected to a controller within this many milliseconds (10 000).
    connect_timeout_ms: int | None = None
    #: A peer with data or answers under way must make progress this often, in milliseconds (30 000).
    progress_timeout_ms: int | None = None
    #: Threads that move bytes (by the number of cores: 1 below four, else 2), and threads that wait for files (4).
    reactor_threads: int | None = None
    worker_threads: int | None = None

    def __post_init__(self) -> None:
        if self.io_engine not in ("auto", "io_uring", "pread"):
            raise UsageError("TargetOptions.io_engine", expected="auto, io_uring or pread", found=repr(self.io_engine))
        if not self.listen:
            raise UsageError("TargetOptions.listen is empty", expected="at least one address")

    def to_json(self) -> str:
        """What the native target reads (`native/target/src/config.rs`), and checks before it opens anything."""
        plain = {
            name: value
            for name, value in vars(self).items()
            if value is not None and name not in ("subsystems", "listen")
        }
        plain["listen"] = [asdict(listen) for listen in self.listen]
        plain["subsystems"] = [subsystem._json() for subsystem in self.subsystems]
        return json.dumps(plain)
