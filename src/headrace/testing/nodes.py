"""A rig of nodes on one machine: processes that share a network, and nothing else.

Each node is a set of Linux namespaces: own address on a switch (a bridge, veth pairs), own hostname and host identity,
own processes, own `/tmp`, `/var/tmp`, `/run` and `/dev/shm`. Everything else of the file system is there to read, and
not to write. Links are shaped by the kernel's token bucket (tc-tbf), with as shallow a buffer as is asked for.

```python
with Nodes(3, rate_bits=400e6, buffer_bytes=128 * KIB) as nodes:
    target = nodes[0].popen([sys.executable, "-m", "headrace.cli", "serve", "mem:64MiB", "--listen", ...])
    nodes[1].run(["headrace", "discover", f"{nodes[0].address}:4420"])
```

It needs no root where user namespaces are allowed, and touches nothing of the machine's own network. All of it goes
with the `with` block or with the process that holds it, whichever way that ends: namespaces have no names that could
stay behind (`node_inside` has the structure).
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.testing import node_inside
from headrace.units import KIB

#: RFC 2544: for tests of networks, routed nowhere.
NETWORK = ipaddress.ip_network("198.18.0.0/15")
NODES_MAX = 256
#: For the kernel to make namespaces and links.
START_TIMEOUT_S = 60.0
_INSIDE = str(Path(node_inside.__file__).resolve())


class NodesUnavailable(RuntimeError):
    """This machine cannot make the rig, or a link of the kind asked for; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction between a node and the switch."""

    #: Bits per second, Ethernet headers included.
    rate_bits: float
    #: What may wait for the link before packets are dropped. A switch has tens to hundreds of KiB a port.
    buffer_bytes: int = 128 * KIB
    #: What may leave at once. Below 64 KiB the kernel cuts large segments into packets first, as a real NIC does.
    burst_bytes: int = 16 * KIB
    #: Seconds that each packet takes longer (tc-netem, which not every kernel has).
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if not 8e3 <= self.rate_bits <= 1e12:
            raise ValueError(f"Link.rate_bits: expected 8e3 to 1e12, found {self.rate_bits:g}")
        if not 2000 <= self.burst_bytes <= 1 << 30 or not 2000 <= self.buffer_bytes <= 1 << 30:
            raise ValueError("Link.burst_bytes, Link.buffer_bytes: expected 2000 bytes to 1 GiB")
        if not 0 <= self.delay_s <= 10:
            raise ValueError(f"Link.delay_s: expected 0 to 10, found {self.delay_s:g}")

    def commands(self, interface: str) -> list[list[str]]:
        shape = ["tbf", "rate", f"{self.rate_bits:.0f}bit", "burst", str(self.burst_bytes)]
        shape += ["limit", str(self.buffer_bytes)]
        if not self.delay_s:
            return [["qdisc", "replace", "dev", interface, "root", *shape]]
        delay = ["netem", "delay", f"{self.delay_s * 1e6:.0f}us", "limit", "100000"]
        return [
            ["qdisc", "replace", "dev", interface, "root", "handle", "1:", *delay],
            ["qdisc", "replace", "dev", interface, "parent", "1:1", "handle", "10:", *shape],
        ]


@dataclass(frozen=True, kw_only=True)
class LinkCounters:
    """What went over one direction of a link since it was shaped."""

    sent_bytes: int
    packets: int
    dropped: int


class _Place:
    """Namespaces, as descriptors, and how to run something in them."""

    def __init__(self, descriptors: list[int], environment: Mapping[str, str]) -> None:
        self._descriptors = descriptors
        self._environment = dict(environment)

    def popen(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """`subprocess.Popen` in this node. `env`: on top of this process's and of the node's identity.

        The process that is returned stands outside and passes signals on; SIGKILL reaches the command too, SIGSTOP
        does not.
        """
        if not self._descriptors:
            raise RuntimeError("the rig is closed")
        whole = [sys.executable, "-I", "-S", _INSIDE, "enter", ",".join(map(str, self._descriptors))]
        whole += [str(cwd if cwd is not None else Path.cwd()), *map(str, command)]
        options["pass_fds"] = [*options.get("pass_fds", ()), *self._descriptors]
        options.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.Popen(whole, env={**os.environ, **self._environment, **(env or {})}, **options)

    def run(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        timeout_s: float = 60.0,
        check: bool = True,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """To its end, with its output captured as text; raises `CalledProcessError` with that output in it."""
        with self.popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", **options
        ) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        if check and process.returncode:
            error = subprocess.CalledProcessError(process.returncode, list(map(str, command)), out, err)
            if hasattr(error, "add_note"):
                error.add_note(f"{out}\n{err}")
            raise error
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


class Node(_Place):
    """One node: `run` and `popen` commands in it."""

    def __init__(self, number: int, descriptors: list[int], facts: dict[str, Any], switch: _Place) -> None:
        identity = {"HEADRACE_HOSTNQN": facts["hostnqn"], "HEADRACE_HOSTID": facts["hostid"]}
        super().__init__(descriptors, identity)
        self.number = number
        #: IPv4, as text. The other nodes know it by `name` too.
        self.address: str = facts["address"]
        self.name: str = facts["name"]
        self.hostnqn: str = facts["hostnqn"]
        self.hostid: str = facts["hostid"]
        self._switch = switch

    def shape(self, *, down: Link | None = None, up: Link | None = None) -> None:
        """Set what comes to this node (`down`) and what leaves it (`up`); None leaves that direction as it is."""
        for place, interface, link in ((self._switch, f"port{self.number}", down), (self, "eth0", up)):
            for command in link.commands(interface) if link is not None else []:
                answer = place.run(["tc", *command], check=False)
                if answer.returncode:
                    said = " ".join(answer.stderr.split())
                    raise NodesUnavailable(f"the kernel does not shape this link (tc {' '.join(command)}: {said})")

    def set_link(self, *, up: bool) -> None:
        """Take the link to the switch down, or up again: nobody is told, as where a cable is pulled."""
        self._switch.run(["ip", "link", "set", f"port{self.number}", "up" if up else "down"])

    def counters(self) -> tuple[LinkCounters, LinkCounters]:
        """(down, up)."""
        down = self._switch.run(["tc", "-s", "-j", "qdisc", "show", "dev", f"port{self.number}"])
        up = self.run(["tc", "-s", "-j", "qdisc", "show", "dev", "eth0"])
        return _counters(down.stdout), _counters(up.stdout)


def _counters(text: str) -> LinkCounters:
    root = json.loads(text)[0]
    return LinkCounters(sent_bytes=root["bytes"], packets=root["packets"], dropped=root["drops"])


class Nodes(Sequence[Node]):
    """`count` nodes on one switch; a context manager.

    `rate_bits`, `buffer_bytes`, `burst_bytes`, `delay_s`: both directions of every link, see `Link`; `Node.shape`
    changes one. `shared`: directories that every node may write to. `congestion`: TCP's congestion control in the
    nodes; None leaves the kernel's choice. Python's own directories and the working directory can be read, wherever
    they are.
    """

    def __init__(
        self,
        count: int,
        *,
        rate_bits: float | None = None,
        buffer_bytes: int = 128 * KIB,
        burst_bytes: int = 16 * KIB,
        delay_s: float = 0.0,
        mtu: int = 1500,
        shared: Sequence[str | os.PathLike[str]] = (),
        congestion: str | None = "cubic",
    ) -> None:
        if not 1 <= count <= NODES_MAX:
            raise ValueError(f"Nodes: expected 1 to {NODES_MAX} nodes, found {count}")
        self._link = None
        if rate_bits is not None:
            self._link = Link(rate_bits=rate_bits, buffer_bytes=buffer_bytes, burst_bytes=burst_bytes, delay_s=delay_s)
        names = [f"node{number}" for number in range(count)]
        addresses = [str(NETWORK[1 + number]) for number in range(count)]
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"{address} {name}\n" for address, name in zip(addresses, names, strict=True)
        )
        self._facts: list[dict[str, Any]] = []
        for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
            hostid = str(uuid.uuid4())
            files = {"/etc/hostname": f"{name}\n", "/etc/machine-id": f"{uuid.uuid4().hex}\n"}
            # A process that asks which boot this is gets another answer in every node, as on machines of their own.
            files["/proc/sys/kernel/random/boot_id"] = f"{uuid.uuid4()}\n"
            self._facts.append(
                {
                    "number": number,
                    "name": name,
                    "address": address,
                    "hostid": hostid,
                    "hostnqn": f"nqn.2014-08.org.nvmexpress:uuid:{hostid}",
                    "files": files,
                }
            )
        self._config = {
            "nodes": self._facts,
            "network": str(NETWORK),
            "prefix": NETWORK.prefixlen,
            "mtu": mtu,
            "files": {"/etc/hosts": hosts},
            "congestion": congestion,
            "shared": [str(Path(path).resolve()) for path in shared],
            "visible": _visible(),
        }
        self._nodes: list[Node] = []
        self._open = ExitStack()

    def __enter__(self) -> Nodes:
        if self._nodes:
            raise RuntimeError("the rig is up already")
        for program in ("ip", "tc"):
            if not shutil.which(program):
                raise NodesUnavailable(f"{program} is not installed (iproute2)")
        try:
            self._start()
            if self._link is not None:
                for node in self._nodes:
                    node.shape(down=self._link, up=self._link)
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            guard = subprocess.Popen(
                [sys.executable, "-I", "-S", _INSIDE, "guard", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        # In this order when it ends: the guard hears of it, ends everything, and is waited for.
        self._open.callback(guard.wait)
        self._open.callback(control.close)
        control.settimeout(START_TIMEOUT_S)
        control.sendall(json.dumps(self._config).encode())
        switch: _Place | None = None
        found: dict[int, list[int]] = {}
        try:
            while switch is None:
                message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, len(node_inside.KINDS))
                answer: dict[str, Any] = json.loads(message) if message else {"error": "the rig's process ended"}
                if answer.get("unavailable"):
                    raise NodesUnavailable(f"no rig of nodes on this machine: {answer['error']}")
                if "error" in answer:
                    raise RuntimeError(f"the rig of nodes did not start: {answer['error']}")
                if "node" in answer:
                    found[answer["node"]] = descriptors
                else:
                    switch = _Place(descriptors, {})
                    self._open.callback(switch.close)
        finally:
            for number, descriptors in found.items():
                node = Node(number, descriptors, self._facts[number], switch or _Place([], {}))
                self._open.callback(node.close)
                self._nodes.append(node)
        self._nodes.sort(key=lambda node: node.number)

    def close(self) -> None:
        """End every process of the rig. Again: does nothing."""
        self._open.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def __getitem__(self, index: Any) -> Any:
        return self._nodes[index]


def _visible() -> list[str]:
    """Directories that Python and the project are read from, where a node's own would hide them."""
    wanted = {
        Path(path).resolve() for path in [*sys.path, sys.prefix, sys.base_prefix, _INSIDE, str(Path.cwd())] if path
    }
    wanted = {path if path.is_dir() else path.parent for path in wanted if path.exists()}
    hidden = {path for path in wanted if any(path.is_relative_to(private) for private in node_inside.PRIVATE)}
    # The innermost are there with what holds them.
    return sorted(str(path) for path in hidden if not hidden & set(path.parents))
