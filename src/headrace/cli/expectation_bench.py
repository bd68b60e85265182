"""What `headrace bench PATH --json` printed, for `headrace doctor --expect --measured`: its figures, and of what.

A figure of another disk, mount, namespace or machine says nothing of the storage that is named, so it is refused.
Storage that a name proves to be one from everywhere (an export of a server, a namespace of a subsystem) may have been
measured by another node, which is told; a device's name means something on its own machine only.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.bench.cache import in_memory, may_be_cached
from headrace.device import BlockAddress, FileAddress, NvmeTcpAddress, parse_address
from headrace.doctor.facts import Facts
from headrace.doctor.facts.block import Disk
from headrace.doctor.facts.mounts import mount_of
from headrace.doctor.storage import Storage, seen
from headrace.errors import UsageError
from headrace.units import format_bytes

#: Figures by name and unit, and what they are to a claim. Both at once are slower than one.
_FIGURES = {
    ("read", "B/s"): "read", ("restore", "B/s"): "read", ("write", "B/s"): "write", ("save", "B/s"): "write",
    ("reads", "1/s"): "iops",
}  # fmt: skip
_READS = ("read", "restore", "reads")
_LEFT_OUT = "mixed"
#: Of a path, and of what is shown of one.
_PATH_MAX, _SHOWN = 4096, 200


class _Differs(Exception):
    """What the figures are of, where that is not the storage that is meant."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Of which storage a run was: its path as it was given, and what the place said of itself (`Place.describe`)."""

    path: str
    kind: str
    facts: Mapping[str, str]
    #: Nodes that measured; none: the file does not say it.
    hosts: tuple[str, ...]

    @staticmethod
    def of(tree: Mapping[str, Any]) -> Bench:
        """From JSON. What is not there, or is none, is "": it fits nothing."""
        facts, hosts = tree.get("facts"), tree.get("hosts")
        return Bench(
            path=_plain(tree.get("path")), kind=_plain(tree.get("kind")),
            facts={str(key): _plain(one) for key, one in facts.items()} if isinstance(facts, dict) else {},
            hosts=tuple(filter(None, map(_plain, hosts))) if isinstance(hosts, list) else (),
        )  # fmt: skip

    def check(self, facts: Facts, chosen: Storage, *, file: str, live: bool) -> None:
        """UsageError where it is of another storage, or cannot be told from one. A record has other names for hosts,
        addresses and subsystems: of these nothing is asked there."""
        try:
            everywhere = self._same(facts, chosen, live=live)
            if live and not everywhere and self.hosts and not self._here:
                raise _Differs(f"{self.path[:_SHOWN]} on {self._where}, and this is {socket.gethostname()}")
        except _Differs as differs:
            where = "this machine" if live else "the machine that was recorded"
            raise UsageError(
                "what was measured is of another storage", where=file, expected=f"a bench of {chosen.name}",
                found=str(differs)[: 2 * _SHOWN], next_step=f"headrace bench {chosen.name} --json, on {where}",
            ) from None  # fmt: skip

    def told(self, *, live: bool) -> str:
        """Where it was measured, for people."""
        told = f"a bench of {self.path[:_SHOWN]}"
        if not live:
            return f"{told}: by its name alone, as a record has other names for hosts, servers and subsystems"
        if not self.hosts:
            return f"{told}, which does not say on which machine"
        return told if self._here else f"{told} on {self._where}: of the same storage, by another node"

    @property
    def _here(self) -> bool:
        return socket.gethostname() in self.hosts

    @property
    def _where(self) -> str:
        return ", ".join(self.hosts[:4]) + (f" and {len(self.hosts) - 4} more" if len(self.hosts) > 4 else "")

    def _same(self, facts: Facts, chosen: Storage, *, live: bool) -> bool:
        """Whether that is known wherever it was measured; else only if it was here. `_Differs`."""
        if not self.path or not self.kind:
            raise _Differs("a bench that does not say of what")
        if self.kind == "folder":
            return self._same_mount(facts, chosen, live=live)
        path = self.path
        if self.kind == "volume":
            path = self.facts.get("on", "")
            if not path or ", " in path:
                raise _Differs(f"the volume {self.path}, on {path or 'nobody says what'}")
        address = None
        if ":" in path.partition("/")[0]:
            try:
                address = parse_address(path)
            except UsageError:
                raise _Differs(path) from None
        if isinstance(address, NvmeTcpAddress):
            here = chosen.address
            if here is None or _namespace(here) != _namespace(address):
                raise _Differs(path)
            return True
        if isinstance(address, FileAddress):
            mount = mount_of(address.path, facts.mounts)
            if mount is None or mount.point not in chosen.mounted:
                raise _Differs(f"a file, {address.path}")
            return False
        return self._same_disk(address.path if isinstance(address, BlockAddress) else path, facts, chosen, live=live)

    def _same_mount(self, facts: Facts, chosen: Storage, *, live: bool) -> bool:
        kind, source, point = (self.facts.get(key, "") for key in ("file system", "mounted from", "at"))
        for mount in seen(facts.mounts):
            # A record has another name for the server.
            same = mount.kind == kind and (mount.source == source or (not live and mount.network))
            if mount.point in chosen.mounted and same and (mount.point == point or (live and mount.network)):
                return mount.network
        raise _Differs(f"{self.path}, {kind or 'a file system'} at {point} from {source}")

    def _same_disk(self, path: str, facts: Facts, chosen: Storage, *, live: bool) -> bool:
        name = self.facts.get("name") or path.removeprefix("/dev/")
        disk = next((one for one in facts.disks if name in _names(one)), None)
        if disk is None or f"/dev/{disk.name}" != (chosen.name if chosen.kind == "disk" else _below(facts, chosen)):
            raise _Differs(f"{self.path}, /dev/{name}" if name not in self.path else self.path)
        size, subsystem = self.facts.get("size"), self.facts.get("subsystem")
        # A disk of the same name may be another one since the machine was started again.
        if size and name == disk.name and disk.size_bytes is not None and size != format_bytes(disk.size_bytes):
            raise _Differs(f"{self.path} of {size}; the one that is here has {format_bytes(disk.size_bytes)}")
        namespace = next((one for one in facts.nvme.namespaces if one.name == disk.name), None)
        controllers = facts.nvme.controllers_of(namespace) if namespace is not None else []
        nqns = {one.subsysnqn for one in controllers if one.subsysnqn}
        if live and subsystem and nqns and subsystem not in nqns:
            raise _Differs(f"{self.path} of {subsystem}; the one that is here is of {', '.join(sorted(nqns))}")
        # Which disk of a subsystem has which name differs between nodes.
        return False

    def figures(self, outcomes: Sequence[Any], *, file: str) -> list[dict[str, Any]]:
        """As `read_measured` reads them: of each kind the most that one pattern had, of ranks the mean of their nodes.
        What is no outcome says nothing, nor does what came out of a cache; UsageError where nothing is left for that.
        """
        best: dict[str, dict[str, Any]] = {}
        cached = False
        for one in outcomes:
            figures = one.get("figures") if isinstance(one, dict) and one.get("pattern") != _LEFT_OUT else None
            for figure in figures if isinstance(figures, list) else ():
                name, unit = (figure.get(key) if isinstance(figure, dict) else None for key in ("name", "unit"))
                what = _FIGURES.get((name, unit)) if isinstance(name, str) and isinstance(unit, str) else None
                value = figure.get("value") if what else None
                if what is None or isinstance(value, bool) or not isinstance(value, int | float):
                    continue
                if not 0 < value < 1e18:
                    continue
                cache, nodes = str(one.get("cache") or ""), one.get("nodes")
                if (may_be_cached if name in _READS else in_memory)(cache):
                    cached = True
                    continue
                said = [str(one.get(key) or "") for key in ("pattern", "work", "cache", "durable")]
                said.append(f"{one.get('flows')} flows")
                if isinstance(nodes, int) and nodes > 1:
                    value /= nodes
                    said.append(f"mean of {nodes} nodes")
                how = f"headrace bench {self.path}: " + ", ".join(part for part in said if part)
                scaled, unit_here = (value, "IOPS") if what == "iops" else (value / 1e6, "MB/s")
                if what not in best or scaled > best[what]["value"]:
                    how = _plain(how, 300)
                    best[what] = {"what": what, "per": "node", "value": scaled, "unit": unit_here, "how": how}
        if cached and not best:
            raise UsageError(
                "what was read may have come out of memory", where=file,
                expected="reads that a bench has dropped the page cache before (--cache dropped, direct)",
            )  # fmt: skip
        return list(best.values())


def _namespace(address: NvmeTcpAddress) -> tuple[object, ...]:
    """By whatever portals it is reached."""
    return address.subsysnqn, address.options.nsid, address.options.uuid, address.options.nguid


def _names(disk: Disk) -> list[str]:
    return [disk.name, *(part for part, _ in disk.partitions), *([f"mapper/{disk.mapped}"] if disk.mapped else [])]


def _below(facts: Facts, chosen: Storage) -> str:
    """The disk that a file system lies on; of one over a network none."""
    for mount in seen(facts.mounts):
        disk = facts.disk_of_number(mount.number) if mount.point in chosen.mounted and not mount.network else None
        if disk is not None:
            return f"/dev/{disk.name}"
    return ""


def _plain(value: Any, most: int = _PATH_MAX) -> str:
    return "".join(one for one in value if one.isprintable())[:most] if isinstance(value, str) else ""
