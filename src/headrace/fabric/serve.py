"""The embedded NVMe/TCP target: its life, and what is changed while it lives.

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
from typing import Any

from headrace import _native
from headrace.errors import DeviceClosed, UsageError
from headrace.fabric.options import NamespaceOptions, TargetOptions


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
        """The address of one namespace by every portal (16 at most), for `headrace.device.open_device`.

        `nqn`: may be left out where there is one subsystem only.
        """
        if nqn is None:
            if len(self.options.subsystems) != 1:
                raise UsageError(
                    "which subsystem?", expected="an nqn", found=f"{len(self.options.subsystems)} subsystems"
                )
            nqn = self.options.subsystems[0].nqn
        portals = [
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            for (host, port), listen in zip(self.addresses, self.options.listen, strict=True)
            if not listen.discovery
        ]
        return f"nvme+tcp://{','.join(portals[:16])}/{nqn}?nsid={nsid}"

    def status(self) -> dict[str, Any]:
        """Listeners, subsystems, namespaces with their I/O engines, connections and counters."""
        native = self._native
        status: dict[str, Any] = json.loads(self._last_status if native is None else native.status())
        return status

    def _running(self) -> _native.Target:
        if self._native is None:
            raise DeviceClosed("the target was stopped")
        return self._native

    def add_namespace(self, nqn: str, namespace: NamespaceOptions) -> None:
        """Open its media and offer it; hosts that asked for such events are told.

        Raises `UsageError` (the nsid is taken, ...) and `DeviceError` (the media cannot be opened).
        """
        self._running().add_namespace(nqn, json.dumps(namespace._json()))

    def remove_namespace(self, nqn: str, nsid: int, *, timeout_s: float = 60.0) -> bool:
        """Answer its commands with Invalid Namespace; flush and close its media when those under way are through.

        Returns whether that was within `timeout_s` seconds; else the next change closes it, or `stop`.
        """
        return self._running().remove_namespace(nqn, nsid, timeout_s)

    def resize_namespace(self, nqn: str, nsid: int, size_bytes: int, *, force: bool = False) -> None:
        """`force`: to a smaller size, too; what lies beyond is lost."""
        self._running().resize_namespace(nqn, nsid, size_bytes, force)

    def set_ana_state(self, nqn: str, group: int, state: str, *, portal: str | None = None) -> None:
        """`state`: one of `ANA_STATES`. `portal`: the name of a listener; `None`: every one."""
        self._running().set_ana_state(nqn, group, portal, state)

    def allow_host(self, nqn: str, hostnqn: str | None, *, read_only: bool = False) -> None:
        """`hostnqn` `None`: every host that is not named."""
        self._running().allow_host(nqn, hostnqn, read_only)

    def deny_host(self, nqn: str, hostnqn: str | None) -> int:
        """And end its associations with the subsystem; returns how many. `None`: every host that is not named."""
        return self._running().deny_host(nqn, hostnqn)

    def disconnect_host(self, hostnqn: str) -> int:
        """End the associations of a host, which may connect again; returns how many."""
        return self._running().disconnect_host(hostnqn)

    def drain(self, timeout_s: float = 60.0) -> bool:
        """Accept no more connections and commands, let those under way end. Returns whether all did in time.

        `stop` is what is left to do then.
        """
        return self._running().drain(timeout_s)

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
