"""The control socket of a running target: how `headrace target` talks to `headrace serve`.

A unix socket that only its user may open (mode 0600, in a directory of mode 0700). A client sends one JSON object a
line, as `{"do": "resize-namespace", "nqn": "nqn...", "nsid": 1, "size": "2TiB"}`, and gets one line for each:
`{"ok": ...}`, or `{"error": {"what": ..., "where": ..., "expected": ..., "found": ..., "next_step": ...}}`.

Nobody who opens the socket can hurt the target: a line is at most 64 KiB, a client that says nothing for ten seconds or
takes no answer is dropped, at most eight are heard at once, and a request is checked before anything is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import DeviceError, DeviceTimeout, HeadraceError, ProtocolError, UsageError
from headrace.fabric.config import MAX_ANA_GROUP, MAX_NSID, read_namespace
from headrace.fabric.options import ACCESSES, ANA_STATES, FileMedia, NamespaceOptions
from headrace.fabric.serve import Target
from headrace.fabric.table import Table

#: Longest request.
REQUEST_BYTES = 64 << 10
#: Longest answer that a client takes: the status of a large target.
ANSWER_BYTES = 64 << 20
#: A client must send its request, or take its answer, within this time.
CLIENT_TIMEOUT_S = 10.0
CLIENTS_MAX = 8
#: After a client could not be taken for want of descriptors or threads.
ACCEPT_PAUSE_S = 0.25
#: Longest wait that a request may ask for.
WAIT_MAX_S = 3600.0
#: What sun_path takes.
PATH_MAX_BYTES = 107
#: In place of a host's NQN: every host that is not named.
ANY_HOST = "any"

_READ_WRITE_OWNER = 0o600


# ---- where it is ----------------------------------------------------------------------------------------------------


def socket_folder() -> Path:
    """Where targets of this user put their sockets: `$XDG_RUNTIME_DIR/headrace`, else in the temporary directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "headrace"
    return Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"


def default_socket() -> Path:
    """That of this process. Makes its directory; raises `UsageError` where that is not this user's alone."""
    folder = socket_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_folder(folder)
    for old in folder.glob("*.sock"):
        if old.stem.isdigit() and not _alive(int(old.stem)):
            # Its process was killed.
            old.unlink(missing_ok=True)
    return folder / f"{os.getpid()}.sock"


def _check_folder(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            "the directory of control sockets is not this user's alone",
            where=str(folder),
            expected=f"a directory of user {os.getuid()} with mode 0700",
            found=f"user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}",
            next_step="remove it, or choose another place with --socket",
        )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def find_socket() -> Path:
    """The socket of the one target that this user runs."""
    folder = socket_folder()
    found: list[Path] = []
    if folder.exists():
        _check_folder(folder)
        found = sorted(path for path in folder.glob("*.sock") if not path.stem.isdigit() or _alive(int(path.stem)))
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(
            "no target of this user runs here", where=str(folder), next_step="name its socket with --socket PATH"
        )
    raise UsageError(
        "several targets run here", where=", ".join(map(str, found)), next_step="name one of them with --socket PATH"
    )


# ---- the server -----------------------------------------------------------------------------------------------------


class ControlServer:
    """The control socket of a target, served by threads of its own. Leaving the context ends them and removes it."""

    def __init__(self, target: Target, path: Path, stop: Callable[[], None]) -> None:
        """`stop` is called when a client asks that the process end.

        Raises `UsageError` and `DeviceError` where the socket cannot be made.
        """
        self.path = path
        self._target = target
        self._stop = stop
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._listener = _listen(path)
        self._identity = _identity(path)
        self._wake_read, self._wake_write = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name="headrace-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hear nobody any more. A request that is under way is answered where it can be, for at most ten seconds."""
        self._wake_write.send(b"x")
        self._thread.join()
        with contextlib.suppress(OSError):
            # Not somebody else's, who took the place meanwhile.
            if _identity(self.path) == self._identity:
                self.path.unlink()
        with self._lock:
            clients = dict(self._clients)
        for client, thread in clients.items():
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RD)
            if thread is not threading.current_thread():
                thread.join(CLIENT_TIMEOUT_S)
        self._wake_read.close()
        self._wake_write.close()

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._wake_read in ready:
                    return
                try:
                    self._admit(self._listener.accept()[0])
                except (BlockingIOError, ConnectionAbortedError):
                    # Whoever knocked has gone.
                    continue
                except (OSError, RuntimeError):
                    # No descriptor or no thread is left. The listener stays readable: look away for a while.
                    selector.unregister(self._listener)
                    selector.select(ACCEPT_PAUSE_S)
                    selector.register(self._listener, selectors.EVENT_READ)

    def _admit(self, client: socket.socket) -> None:
        client.settimeout(CLIENT_TIMEOUT_S)
        uid = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        with self._lock:
            if uid not in (0, os.getuid()) or len(self._clients) >= CLIENTS_MAX:
                client.close()
                return
            thread = threading.Thread(target=self._serve, args=(client,), name="headrace-control-client", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                client.close()
                raise
            self._clients[client] = thread

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                rest = b""
                while True:
                    line, rest = _line(client, rest)
                    if not line:
                        return
                    answer, after = self._answer(line)
                    client.settimeout(CLIENT_TIMEOUT_S)
                    client.sendall(json.dumps(answer).encode() + b"\n")
                    if after is not None:
                        after()
                    if not line.endswith(b"\n"):
                        return
        except OSError:
            # Silent too long, or gone: there is nobody to tell.
            return
        finally:
            with self._lock:
                self._clients.pop(client, None)

    def _answer(self, line: bytes) -> tuple[dict[str, Any], Callable[[], None] | None]:
        """The answer to one request, and what is to be done once it is sent."""
        try:
            if len(line) > REQUEST_BYTES:
                raise UsageError("the request is too long", expected=f"at most {REQUEST_BYTES} bytes")
            try:
                tree = json.loads(line)
            except (ValueError, RecursionError):
                tree = None
            if not isinstance(tree, Mapping):
                raise UsageError("the request is no JSON object")
            request = Table(tree, file="the request")
            verb = request.choice("do", tuple(VERBS))
            if verb is None:
                raise request.error("do", expected=" or ".join(VERBS), found="nothing")
            perform, keys = VERBS[verb]
            request.only("do", *keys)
            result = perform(self._target, request)
            return {"ok": result}, self._stop if verb in ("stop", "drain") else None
        except HeadraceError as error:
            return {"error": _error(error)}, None
        except Exception as error:
            # A defect of ours: the client hears of it, and the target goes on.
            return {"error": {"what": f"the request failed: {error!r}", "fault": "headrace"}}, None


def _line(client: socket.socket, have: bytes) -> tuple[bytes, bytes]:
    """The next line, and what came behind it; without its end where it is too long, or where the client is through.

    All of it must come within the time for a client, however it is dripped.
    """
    deadline = time.monotonic() + CLIENT_TIMEOUT_S
    while b"\n" not in have and len(have) <= REQUEST_BYTES:
        client.settimeout(max(deadline - time.monotonic(), 0.001))
        piece = client.recv(REQUEST_BYTES)
        if not piece:
            return have, b""
        have += piece
    line, end, rest = have.partition(b"\n")
    return line + end, rest


def _error(error: HeadraceError) -> dict[str, Any]:
    names = ("what", "where", "expected", "found", "next_step")
    kind = "usage" if isinstance(error, UsageError) else "failed"
    return {"kind": kind, **{name: value for name in names if (value := getattr(error, name)) is not None}}


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _listen(path: Path) -> socket.socket:
    where = str(path)
    if len(os.fsencode(where)) > PATH_MAX_BYTES:
        raise UsageError("the path of a control socket is too long", where=where, expected=f"{PATH_MAX_BYTES} bytes")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        pass
    except OSError as error:
        raise DeviceError(f"cannot make the control socket: {error.strerror}", where=where) from None
    else:
        if not stat.S_ISSOCK(mode):
            raise UsageError("this is no socket", where=where, next_step="choose another place with --socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            try:
                probe.connect(where)
            except ConnectionRefusedError:
                # Its process was killed.
                path.unlink(missing_ok=True)
            except OSError as error:
                raise DeviceError(f"cannot make the control socket: {error.strerror}", where=where) from None
            else:
                raise DeviceError(
                    "another target has this control socket", where=where, next_step="stop it, or choose another place"
                )
    listener = socket.socket(socket.AF_UNIX)
    try:
        # Before it has a name: Linux gives the socket in the file system this mode.
        os.fchmod(listener.fileno(), _READ_WRITE_OWNER)
        listener.bind(where)
        listener.listen(CLIENTS_MAX)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise DeviceError(f"cannot make the control socket: {error.strerror}", where=where) from None
    return listener


# ---- what it does ---------------------------------------------------------------------------------------------------


def _nsid(request: Table) -> int:
    nsid = request.integer("nsid", 1, MAX_NSID)
    if nsid is None:
        raise request.error("nsid", expected=f"a number from 1 to {MAX_NSID}", found="nothing")
    return nsid


def _subsystem(target: Target, request: Table) -> str:
    """The subsystem that is named; where there is one only, it need not be."""
    nqn = request.text("nqn", 223)
    names = [str(subsystem["nqn"]) for subsystem in target.status()["subsystems"]]
    if nqn is None and len(names) == 1:
        return names[0]
    if nqn not in names:
        raise request.error("nqn", expected="a subsystem, " + " or ".join(names), found=repr(nqn) if nqn else "nothing")
    return nqn


def _timeout(request: Table) -> float:
    given = request.number("timeout_s", 0, WAIT_MAX_S)
    return 60.0 if given is None else given


def _host(request: Table) -> str | None:
    host = request.required_text("host")
    return None if host == ANY_HOST else host


def _status(target: Target, request: Table) -> dict[str, Any]:
    return target.status() | {"pid": os.getpid()}


def _add_namespace(target: Target, request: Table) -> dict[str, Any]:
    nqn = _subsystem(target, request)
    table = request.table("namespace")
    if table is None:
        raise request.error("namespace", expected="a table", found="nothing")
    taken = next(s["namespaces"] for s in target.status()["subsystems"] if s["nqn"] == nqn)
    free = next(nsid for nsid in range(1, MAX_NSID + 2) if nsid not in [n["nsid"] for n in taken])
    for key in ("path", "reservations"):
        path = table.text(key, 4096)
        if path is not None and not Path(path).is_absolute():
            expected = "a whole path, since the target has a working directory of its own"
            raise table.error(key, expected=expected, found=path)
    namespace = read_namespace(table, default_nsid=free, folder=Path("/"))
    _not_served_yet(target, namespace)
    target.add_namespace(nqn, namespace)
    return {"nqn": nqn, "nsid": namespace.nsid}


def _not_served_yet(target: Target, namespace: NamespaceOptions) -> None:
    """The lock of the file would refuse it as well, but could not say that it is this very target that has it."""
    if not isinstance(namespace.media, FileMedia):
        return
    path = namespace.media.path
    for subsystem in target.status()["subsystems"]:
        for served in subsystem["namespaces"]:
            with contextlib.suppress(OSError):
                if served["path"] is not None and Path(path).samefile(served["path"]):
                    raise UsageError(
                        "this target serves it already",
                        where=path,
                        found=f"namespace {served['nsid']} of {subsystem['nqn']}",
                        next_step=f"headrace target remove-namespace {served['nsid']} first, or serve another file",
                    )


def _remove_namespace(target: Target, request: Table) -> dict[str, Any]:
    nqn, nsid, timeout_s = _subsystem(target, request), _nsid(request), _timeout(request)
    return {"closed": target.remove_namespace(nqn, nsid, timeout_s=timeout_s)}


def _resize_namespace(target: Target, request: Table) -> dict[str, Any]:
    nqn, nsid = _subsystem(target, request), _nsid(request)
    size, force = request.size("size", 512, (1 << 63) - 1), request.flag("force")
    if size is None:
        raise request.error("size", expected='a size such as "64GiB"', found="nothing")
    target.resize_namespace(nqn, nsid, size, force=force)
    return {"size_bytes": size}


def _ana(target: Target, request: Table) -> dict[str, Any]:
    nqn = _subsystem(target, request)
    group = request.integer("group", 1, MAX_ANA_GROUP) or 1
    portal, state = request.text("portal", 64), request.choice("state", ANA_STATES)
    if state is None:
        raise request.error("state", expected=" or ".join(ANA_STATES), found="nothing")
    target.set_ana_state(nqn, group, state, portal=portal)
    return {}


def _allow_host(target: Target, request: Table) -> dict[str, Any]:
    nqn, host, access = _subsystem(target, request), _host(request), request.choice("access", ACCESSES)
    target.allow_host(nqn, host, read_only=access == "read-only")
    return {}


def _deny_host(target: Target, request: Table) -> dict[str, Any]:
    nqn, host = _subsystem(target, request), _host(request)
    return {"ended": target.deny_host(nqn, host)}


def _disconnect(target: Target, request: Table) -> dict[str, Any]:
    host = request.required_text("host")
    return {"ended": target.disconnect_host(host)}


def _drain(target: Target, request: Table) -> dict[str, Any]:
    timeout_s = _timeout(request)
    return {"drained": target.drain(timeout_s)}


def _stop(target: Target, request: Table) -> dict[str, Any]:
    return {}


#: What a request does, and the keys that it may have.
VERBS: dict[str, tuple[Callable[[Target, Table], dict[str, Any]], tuple[str, ...]]] = {
    "status": (_status, ()),
    "add-namespace": (_add_namespace, ("nqn", "namespace")),
    "remove-namespace": (_remove_namespace, ("nqn", "nsid", "timeout_s")),
    "resize-namespace": (_resize_namespace, ("nqn", "nsid", "size", "force")),
    "ana": (_ana, ("nqn", "group", "portal", "state")),
    "allow-host": (_allow_host, ("nqn", "host", "access")),
    "deny-host": (_deny_host, ("nqn", "host")),
    "disconnect": (_disconnect, ("host",)),
    "drain": (_drain, ("timeout_s",)),
    "stop": (_stop, ()),
}


# ---- the client -----------------------------------------------------------------------------------------------------


def ask(path: Path, request: Mapping[str, Any], *, timeout_s: float = 75.0) -> dict[str, Any]:
    """One request and its answer. Raises what the target says is wrong: `UsageError` or `DeviceError`."""
    where = str(path)
    try:
        with socket.socket(socket.AF_UNIX) as peer:
            deadline = time.monotonic() + timeout_s
            peer.settimeout(timeout_s)
            peer.connect(where)
            peer.sendall(json.dumps(dict(request)).encode() + b"\n")
            line = bytearray()
            while not line.endswith(b"\n") and len(line) < ANSWER_BYTES:
                # However it is dripped.
                peer.settimeout(max(deadline - time.monotonic(), 0.001))
                piece = peer.recv(1 << 20)
                if not piece:
                    break
                line += piece
    except TimeoutError:
        raise DeviceTimeout("the target does not answer", where=where, expected=f"within {timeout_s:g} s") from None
    except OSError as error:
        next_step = "is it running? `headrace serve` prints its socket"
        raise DeviceError(
            f"cannot ask the target: {error.strerror or error}", where=where, next_step=next_step
        ) from None
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("ok"), dict):
        return dict(answer["ok"])
    if not isinstance(answer, dict) or not isinstance(answer.get("error"), dict):
        raise ProtocolError("the target hung up without an answer", where=where, next_step="ask again: it may be busy")
    said = answer["error"]
    details = {name: str(said[name]) for name in ("where", "expected", "found", "next_step") if name in said}
    kind = UsageError if said.get("kind") == "usage" else DeviceError
    raise kind(str(said.get("what")), **details)
