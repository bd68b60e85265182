"""The target's configuration file: TOML to options, and back.

    [[listen]]
    name = "a"
    address = "10.0.0.1:4420"

    [[subsystem]]
    nqn = "nqn.2026-01.io.example:disk"

    [[subsystem.host]]
    nqn = "nqn.2014-08.org.nvmexpress:uuid:..."
    access = "read-only"

    [[subsystem.namespace]]
    path = "/data/disk"
    size = "64GiB"
    create = true

docs/guides/target.md has every key. A mistake is one sentence that names the key by its path in the file, as
`subsystem[0].namespace[1].path`, and says what was expected and found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.fabric.endpoint import is_loopback, parse_endpoint
from headrace.fabric.file import read_toml
from headrace.fabric.options import (
    ACCESSES,
    ANA_STATES,
    DIRECT,
    AnaGroupOptions,
    FileMedia,
    HostOptions,
    ListenOptions,
    MemoryMedia,
    NamespaceOptions,
    SubsystemOptions,
    TargetOptions,
)
from headrace.fabric.table import Table
from headrace.units import GIB, KIB, MIB, TIB

#: A configuration is a page or two; what is longer is another file.
MAX_BYTES = 1 << 20
MAX_NSID = 4096
MAX_ANA_GROUP = 64
DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"
ENGINES = ("auto", "io_uring", "pread")

LIMIT_KEYS = ("mdts", "in_capsule", "max_queue_entries", "max_io_queues")
TOP_KEYS = (
    *("listen", "discovery", "subsystem", "io_engine", "memory", "connection_memory", "max_connections"),
    "max_host_connections",
    *("max_h2c_data", "connect_timeout_s", "progress_timeout_s", "reactor_threads", "worker_threads"),
    *LIMIT_KEYS,
)
SUBSYSTEM_KEYS = ("nqn", "serial", "model", "host", "other_hosts", "ana_group", "namespace", *LIMIT_KEYS)
NAMESPACE_KEYS = (
    *("nsid", "path", "size", "create", "memory", "block_size", "read_only", "volatile_cache", "uuid", "nguid"),
    *("ana_group", "reservations", "no_reservations", "direct"),
)


def load_config(path: str) -> TargetOptions:
    """Read a configuration file. Raises `UsageError` for each mistake in it; opens nothing else.

    Relative paths of namespaces are relative to the file.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the configuration: {error.strerror}", where=path) from None
    if len(raw) > MAX_BYTES:
        raise UsageError("this is no configuration file", where=path, expected=f"at most {MAX_BYTES} bytes")
    tree = read_toml(raw, where=path, next_step="see docs/guides/target.md for an example")
    return read_config(Table(tree, file=path), Path(path).parent)


def read_config(top: Table, folder: Path) -> TargetOptions:
    top.only(*TOP_KEYS)
    listen = [_listen(item, discovery=False) for item in top.tables_or_texts("listen", text_key="address")]
    directory = top.table("discovery")
    if directory is not None:
        directory.only("listen")
        own = directory.tables_or_texts("listen", text_key="address")
        if not listen:
            listen = [ListenOptions()]
        listen += [_listen(item, discovery=True) for item in own]
    names = [options.name or str(index) for index, options in enumerate(listen, start=1)]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise top.error("listen", expected="a name of its own for each portal", found=f"two called {name!r}")
    seconds = {name: top.number(f"{name}_s", 0.01, 600) for name in ("connect_timeout", "progress_timeout")}
    limits = _limits(top)
    portals = names or ["1"]
    subsystems: list[SubsystemOptions] = []
    used: dict[str, str] = {}
    for table in top.tables("subsystem"):
        subsystems.append(_subsystem(table, portals, folder, used))
        if subsystems[-1].nqn in [other.nqn for other in subsystems[:-1]]:
            raise table.error("nqn", expected="one that no other subsystem has", found=repr(subsystems[-1].nqn))
        if not subsystems[-1].allow_hosts and subsystems[-1].other_hosts is None:
            for options in listen:
                if not is_loopback(options.host):
                    raise table.error(
                        "host",
                        expected=f"hosts that may connect, since {options.host} lets other machines in",
                        found="none",
                        next_step='add [[subsystem.host]] with nqn and access, or other_hosts = "read-write" for all',
                    )
    if not subsystems:
        raise top.error("subsystem", expected="at least one [[subsystem]]", found="none")
    return TargetOptions(
        subsystems=subsystems,
        listen=listen or [ListenOptions()],
        io_engine=top.choice("io_engine", ENGINES) or "auto",
        max_h2c_data_bytes=top.size("max_h2c_data", 4096, 1 << 30, multiple=4),
        max_connections=top.integer("max_connections", 1, 65536),
        max_host_connections=top.integer("max_host_connections", 1, 65536),
        memory_bytes=top.size("memory", 1 << 16, 1 << 44),
        connection_memory_bytes=top.size("connection_memory", 1 << 16, 1 << 40),
        connect_timeout_ms=_milliseconds(seconds["connect_timeout"]),
        progress_timeout_ms=_milliseconds(seconds["progress_timeout"]),
        reactor_threads=top.integer("reactor_threads", 0, 64),
        worker_threads=top.integer("worker_threads", 1, 64),
        **limits,
    )


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


def _limits(table: Table) -> dict[str, int | None]:
    mdts = table.size("mdts", 8192, 16 << 20)
    if mdts is not None and mdts & (mdts - 1):
        raise table.error("mdts", expected="a power of two", found=str(mdts), next_step="as 1MiB")
    return {
        "mdts_bytes": mdts,
        "in_capsule_bytes": table.size("in_capsule", 0, 64 << 10, multiple=16),
        "max_queue_entries": table.integer("max_queue_entries", 16, 1024),
        "max_io_queues": table.integer("max_io_queues", 1, 128),
    }


def _listen(table: Table, *, discovery: bool) -> ListenOptions:
    table.only("address", "name")
    address = table.required_text("address")
    try:
        host, port = parse_endpoint(address, default_port=8009 if discovery else 4420)
    except UsageError as error:
        raise table.error("address", expected=error.expected, found=error.found) from None
    name = table.text("name", 64) or ""
    return ListenOptions(host=host, port=port, name=name, discovery=discovery)


def _subsystem(table: Table, portals: list[str], folder: Path, used: dict[str, str]) -> SubsystemOptions:
    table.only(*SUBSYSTEM_KEYS)
    nqn = table.nqn("nqn")
    if nqn == DISCOVERY_NQN:
        raise table.error("nqn", expected="a name of your own", found="that of the discovery subsystem")
    hosts: list[HostOptions] = []
    for item in table.tables_or_texts("host", text_key="nqn"):
        item.only("nqn", "access")
        host = HostOptions(nqn=item.nqn("nqn"), access=item.choice("access", ACCESSES) or "read-write")
        if host.nqn in [other.nqn for other in hosts]:
            raise item.error("nqn", expected="each host once", found=repr(host.nqn))
        hosts.append(host)
    groups: list[AnaGroupOptions] = []
    for item in table.tables("ana_group"):
        group = _ana_group(item, portals)
        if group.id in [other.id for other in groups]:
            raise item.error("id", expected="each group once", found=str(group.id))
        groups.append(group)
    known = [group.id for group in groups] or [1]
    namespaces: list[NamespaceOptions] = []
    for number, item in enumerate(table.tables("namespace"), start=1):
        namespace = read_namespace(item, default_nsid=number, folder=folder)
        if namespace.nsid in [other.nsid for other in namespaces]:
            raise item.error("nsid", expected="each number once", found=str(namespace.nsid))
        if namespace.ana_group not in known:
            expected = "one of the subsystem's groups, " + ", ".join(map(str, known))
            raise item.error("ana_group", expected=expected, found=str(namespace.ana_group))
        if isinstance(namespace.media, FileMedia):
            # Not `Path.resolve`, which fails on a loop of links: opening such a path says what is wrong.
            real = os.path.realpath(namespace.media.path)
            if real in used:
                raise item.error(
                    "path",
                    expected="a file of its own for each namespace",
                    found=f"{namespace.media.path}, which is that of {used[real]}",
                )
            used[real] = item.path
        namespaces.append(namespace)
    return SubsystemOptions(
        nqn=nqn,
        namespaces=namespaces,
        serial=table.text("serial", 20) or "",
        model=table.text("model", 40) or "headrace",
        allow_hosts=hosts,
        other_hosts=table.choice("other_hosts", ACCESSES),
        ana_groups=groups,
        **_limits(table),
    )


def _ana_group(table: Table, portals: list[str]) -> AnaGroupOptions:
    table.only("id", "state", "states")
    number = table.integer("id", 1, MAX_ANA_GROUP)
    if number is None:
        raise table.error("id", expected=f"a number from 1 to {MAX_ANA_GROUP}", found="nothing")
    state = table.choice("state", ANA_STATES) or "optimized"
    states: dict[str, str] = {}
    given = table.table("states")
    if given is not None:
        for name in given.keys:
            if name not in portals:
                raise given.error(name, expected="the name of a portal, " + ", ".join(portals), found=repr(name))
            states[name] = given.choice(name, ANA_STATES) or state
    return AnaGroupOptions(id=number, state=state, states=states)


def read_namespace(table: Table, *, default_nsid: int | None, folder: Path) -> NamespaceOptions:
    """One namespace, as it stands in a file or in a request of the control socket."""
    table.only(*NAMESPACE_KEYS)
    nsid = table.integer("nsid", 1, MAX_NSID) or default_nsid
    if nsid is None:
        raise table.error("nsid", expected=f"a number from 1 to {MAX_NSID}", found="nothing")
    block = table.integer("block_size", 512, 4096)
    if block not in (None, 512, 4096):
        raise table.error("block_size", expected="512 or 4096", found=str(block))
    block = block or 4096
    path, memory = table.text("path", 4096), table.size("memory", block, 1 << 46, multiple=block)
    size = table.size("size", block, (1 << 63) - 1, multiple=block)
    create, read_only = table.flag("create"), table.flag("read_only")
    direct = table.choice("direct", DIRECT)
    media: FileMedia | MemoryMedia
    if (path is None) == (memory is None):
        found = "neither" if path is None else "both"
        raise table.error("path", expected='either a path, or memory = "SIZE"', found=found)
    if memory is not None:
        for key, value in (("size", size), ("create", create), ("read_only", read_only), ("direct", direct)):
            if value:
                raise table.error(key, expected="it only with a path", found="it with memory")
        media = MemoryMedia(size_bytes=memory)
    else:
        assert path is not None
        whole = str(folder / path)
        if create and size is None:
            raise table.error("size", expected="a size to create the file with", found="none", next_step='as "64GiB"')
        # Not `Path.exists`, which fails on what cannot be a name.
        if not create and not os.path.exists(whole):  # noqa: PTH110
            raise table.error(
                "path",
                expected="a file or block device that is there",
                found=whole,
                next_step='to make it, give size = "..." and create = true',
            )
        media = FileMedia(path=whole, size_bytes=size, create=create, direct=direct or "auto")
    reservations = table.text("reservations", 4096)
    if reservations is not None and memory is not None:
        raise table.error("reservations", expected="it only with a path", found="it with memory")
    no_reservations = table.flag("no_reservations")
    if no_reservations and reservations is not None:
        raise table.error("reservations", expected="nothing beside no_reservations", found=repr(reservations))
    return NamespaceOptions(
        nsid=nsid,
        media=media,
        block_bytes=block,
        volatile_cache_bytes=table.size("volatile_cache", 0, 1 << 40) or 0,
        read_only=read_only,
        uuid=table.digits("uuid"),
        nguid=table.digits("nguid"),
        ana_group=table.integer("ana_group", 1, MAX_ANA_GROUP) or 1,
        reservations_path=None if reservations is None else str(folder / reservations),
        no_reservations=no_reservations,
    )


# ---- the other way --------------------------------------------------------------------------------------------------


def to_toml(options: TargetOptions) -> str:
    """The file that `load_config` reads as these options. Defaults are left out."""
    top: list[tuple[str, Any]] = []
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in ("subsystems", "listen") or value is None or value == field.default:
            continue
        if field.name.endswith("_bytes"):
            top.append((field.name.removesuffix("_bytes"), _size(value)))
        elif field.name.endswith("_ms"):
            top.append((f"{field.name.removesuffix('_ms')}_s", value / 1000))
        else:
            top.append((field.name, value))
    lines = list(_lines(top))
    for listen in options.listen:
        if not listen.discovery:
            lines += ["", "[[listen]]", *_lines([("name", listen.name), ("address", _address(listen))])]
    for listen in options.listen:
        if listen.discovery:
            lines += ["", "[[discovery.listen]]", *_lines([("name", listen.name), ("address", _address(listen))])]
    for subsystem in options.subsystems:
        lines += ["", "[[subsystem]]", *_lines(_subsystem_items(subsystem))]
        for host in subsystem.hosts():
            lines += ["", "[[subsystem.host]]", *_lines([("nqn", host.nqn), ("access", host.access)])]
        for group in subsystem.ana_groups:
            lines += ["", "[[subsystem.ana_group]]", *_lines([("id", group.id), ("state", group.state)])]
            if group.states:
                pairs = ", ".join(f"{json.dumps(name)} = {json.dumps(state)}" for name, state in group.states.items())
                lines.append(f"states = {{ {pairs} }}")
        for namespace in subsystem.namespaces:
            lines += ["", "[[subsystem.namespace]]", *_lines(namespace_items(namespace))]
    return "\n".join(lines).strip() + "\n"


def _lines(items: Iterable[tuple[str, Any]]) -> Iterable[str]:
    """What is empty says nothing. JSON's texts, numbers and truths are TOML's, too."""
    return (f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in items if value not in (None, ""))


def _subsystem_items(subsystem: SubsystemOptions) -> list[tuple[str, Any]]:
    sizes = [("mdts", subsystem.mdts_bytes), ("in_capsule", subsystem.in_capsule_bytes)]
    return [
        ("nqn", subsystem.nqn),
        ("serial", subsystem.serial),
        ("model", "" if subsystem.model == "headrace" else subsystem.model),
        ("other_hosts", subsystem.other_hosts),
        *((key, None if value is None else _size(value)) for key, value in sizes),
        ("max_queue_entries", subsystem.max_queue_entries),
        ("max_io_queues", subsystem.max_io_queues),
    ]


def namespace_items(namespace: NamespaceOptions) -> list[tuple[str, Any]]:
    """Keys and values of a namespace, as `read_namespace` reads them."""
    media = namespace.media
    items: list[tuple[str, Any]] = [("nsid", namespace.nsid)]
    if isinstance(media, MemoryMedia):
        items.append(("memory", _size(media.size_bytes)))
    else:
        items += [
            ("path", media.path),
            ("size", None if media.size_bytes is None else _size(media.size_bytes)),
            ("create", media.create or None),
            ("direct", None if media.direct == "auto" else media.direct),
        ]
    cache = namespace.volatile_cache_bytes
    return [
        *items,
        ("block_size", None if namespace.block_bytes == 4096 else namespace.block_bytes),
        ("volatile_cache", _size(cache) if cache else None),
        ("read_only", namespace.read_only or None),
        ("uuid", namespace.uuid),
        ("nguid", namespace.nguid),
        ("ana_group", None if namespace.ana_group == 1 else namespace.ana_group),
        ("reservations", namespace.reservations_path),
        ("no_reservations", namespace.no_reservations or None),
    ]


def _address(listen: ListenOptions) -> str:
    return f"[{listen.host}]:{listen.port}" if ":" in listen.host else f"{listen.host}:{listen.port}"


def _size(count: int) -> int | str:
    """In the largest unit that says it exactly."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count and count % unit == 0:
            return f"{count // unit}{name}"
    return count
