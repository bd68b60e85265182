"""The embedded NVMe/TCP target: what it serves, and its life.

    options = TargetOptions(
        subsystems=[
            SubsystemOptions(
                nqn="nqn.2026-01.io.example:disk",
                namespaces=[NamespaceOptions(media=FileMedia(path="/data/disk", size_bytes=64 * GIB, create=True))],
            )
        ]
    )
    with Target(options) as target:
        print(target.uri("nqn.2026-01.io.example:disk"))

The target runs in threads of its own that never need the GIL. `headrace serve` is this in a process of its own.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace import _native
from headrace.errors import UsageError
from headrace.settings import check_nqn


@dataclass(frozen=True, kw_only=True)
class FileMedia:
    """Bytes in a file or block device."""

    path: str
    #: Bytes; needed with `create`, else checked where given.
    size_bytes: int | None = None
    #: Make a sparse file where there is none.
    create: bool = False

    def __post_init__(self) -> None:
        if self.create and self.size_bytes is None:
            raise UsageError("FileMedia.create needs size_bytes", where=self.path)

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
        }


@dataclass(frozen=True, kw_only=True)
class SubsystemOptions:
    """One subsystem: what a host connects to."""

    nqn: str
    namespaces: Sequence[NamespaceOptions]
    #: At most 20 printable ASCII characters; empty: derived from the NQN.
    serial: str = ""
    #: At most 40 printable ASCII characters.
    model: str = "headrace"
    #: NQNs of the hosts that may connect; empty: every host.
    allow_hosts: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_nqn("SubsystemOptions.nqn", self.nqn)
        for nqn in self.allow_hosts:
            check_nqn("SubsystemOptions.allow_hosts", nqn)
        if not self.namespaces:
            raise UsageError("SubsystemOptions.namespaces is empty", where=self.nqn, expected="at least one")

    def _json(self) -> dict[str, Any]:
        return {
            "nqn": self.nqn,
            "serial": self.serial,
            "model": self.model,
            "allow_hosts": [{"nqn": nqn} for nqn in self.allow_hosts],
            "namespaces": [namespace._json() for namespace in self.namespaces],
        }


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where to listen. NVMe/TCP has no encryption here: beyond loopback only on networks that you trust."""

    host: str = "127.0.0.1"
    #: 0: a free one, see `Target.addresses`.
    port: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError("ListenOptions.port", expected="0 to 65535", found=str(self.port))


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """A whole target. `None` anywhere means the target's own default, given in the comment."""

    subsystems: Sequence[SubsystemOptions]
    listen: Sequence[ListenOptions] = field(default_factory=lambda: (ListenOptions(),))
    #: For files: "auto" (io_uring where it is allowed), "io_uring" or "pread"; `Target.status()` says which is in use.
    io_engine: str = "auto"
    #: MAXH2CDATA: longest data PDU that a host may send (1 MiB).
    max_h2c_data_bytes: int | None = None
    #: Write data that may travel with its command, saving a round trip (16 KiB).
    in_capsule_bytes: int | None = None
    #: MDTS: longest single command, a power of two (1 MiB).
    mdts_bytes: int | None = None
    #: Connections of all hosts together (1024).
    max_connections: int | None = None
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


class Target:
    """A running target in this process. Leaving the context, or `stop`, ends its threads and closes its media."""

    def __init__(self, options: TargetOptions) -> None:
        """Binds every port and opens every media before it returns.

        Raises `UsageError` (the options) and `DeviceError` (a port in use, a file that cannot be opened).
        """
        self.options = options
        # Its threads inherit this: a signal that one of them took would not wake Python's main thread, which may wait
        # for hours.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            native = _native.Target(options.to_json())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        #: None once it was stopped: that it is let go closes its media, so that another server may open them.
        self._native: _native.Target | None = native
        self._addresses = native.addresses
        self._last_status = "{}"

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """(host, port) of each listener, in the order of the options, with the ports that were chosen."""
        return self._addresses

    def uri(self, nqn: str | None = None, nsid: int = 1) -> str:
        """The address of one namespace on the first listener, for `headrace.device.open_device`.

        `nqn`: may be left out where there is one subsystem only.
        """
        if nqn is None:
            if len(self.options.subsystems) != 1:
                raise UsageError(
                    "which subsystem?", expected="an nqn", found=f"{len(self.options.subsystems)} subsystems"
                )
            nqn = self.options.subsystems[0].nqn
        host, port = self.addresses[0]
        return f"nvme+tcp://{f'[{host}]' if ':' in host else host}:{port}/{nqn}?nsid={nsid}"

    def status(self) -> dict[str, Any]:
        """Listeners, subsystems, namespaces with their I/O engines, connections and counters."""
        native = self._native
        status: dict[str, Any] = json.loads(self._last_status if native is None else native.status())
        return status

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop listening, let commands under way end (at most `timeout_s` seconds), flush and close the media.

        Again: does nothing.
        """
        native = self._native
        if native is None:
            return
        native.stop(timeout_s)
        self._last_status = native.status()
        self._native = None

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
