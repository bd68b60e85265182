"""`headrace target`: what a running `headrace serve` does, and how it is changed, over its control socket."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer

app = typer.Typer(no_args_is_help=True, help="Look at a running target, and change it.")

Socket = Annotated[
    str | None,
    typer.Option(
        metavar="PATH", help="The target's control socket. [default: of the one that you run]", show_default=False
    ),
]
Subsystem = Annotated[
    str | None,
    typer.Option("--nqn", metavar="NQN", help="The subsystem, where there are several.", show_default=False),
]
Nsid = Annotated[int, typer.Argument(metavar="NSID", help="The namespace's number.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="Longest wait for commands that are under way.")]


def _ask(socket: str | None, verb: str, *, wait_s: float = 0.0, **request: Any) -> dict[str, Any]:
    from headrace.fabric.control import ask, find_socket

    path = find_socket() if socket is None else Path(socket)
    return ask(path, {"do": verb} | {k: v for k, v in request.items() if v is not None}, timeout_s=wait_s + 15)


@app.command()
def status(socket: Socket = None, json: Json = False) -> None:
    """Portals, subsystems, namespaces with their traffic, connected hosts, the last notes.

    Example: `headrace target status`
    """
    from headrace.cli.output import print_json

    found = _ask(socket, "status")
    if json:
        print_json(found)
    else:
        _show(found)


@app.command("add-namespace")
def add_namespace(
    media: Annotated[
        str, typer.Argument(metavar="NAMESPACE", help="As for `headrace serve`: PATH, PATH:SIZE or mem:SIZE.")
    ],
    nqn: Subsystem = None,
    nsid: Annotated[
        int | None, typer.Option(metavar="NSID", help="Its number. [default: the first free one]", show_default=False)
    ] = None,
    block_size: Annotated[int, typer.Option(metavar="BYTES", help="Logical block, 512 or 4096.")] = 4096,
    volatile_cache: Annotated[
        str | None, typer.Option(metavar="SIZE", help="As for `headrace serve`.", show_default=False)
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Refuse writes.")] = False,
    ana_group: Annotated[int, typer.Option(metavar="ID", help="The ANA group that it is in.")] = 1,
    uuid: Annotated[
        str | None,
        typer.Option(metavar="UUID", help="Its UUID. [default: derived from NQN and number]", show_default=False),
    ] = None,
    nguid: Annotated[
        str | None,
        typer.Option(
            metavar="DIGITS", help="Its NGUID, 32 hexadecimal digits. [default: as the UUID]", show_default=False
        ),
    ] = None,
    direct: Annotated[
        str | None,
        typer.Option(
            metavar="HOW", help="Past the page cache (O_DIRECT): auto, on or off. [default: auto]", show_default=False
        ),
    ] = None,
    reservations: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="An existing file for its reservations. [default: one beside its file, made when needed]",
            show_default=False,
        ),
    ] = None,
    no_reservations: Annotated[bool, typer.Option("--no-reservations", help="Offer none.")] = False,
    socket: Socket = None,
    json: Json = False,
) -> None:
    """Offer one more namespace; connected hosts are told.

    Example: `headrace target add-namespace /data/b.img:100GiB`
    """
    from headrace.cli.media import parse_media
    from headrace.cli.output import print_json
    from headrace.fabric import MemoryMedia

    parsed = parse_media(media)
    namespace: dict[str, Any] = {
        "nsid": nsid,
        "block_size": block_size,
        "volatile_cache": volatile_cache,
        "read_only": read_only or None,
        "ana_group": ana_group,
        "uuid": uuid,
        "nguid": nguid,
        "direct": direct,
        "no_reservations": no_reservations or None,
        # The target has a working directory of its own.
        "reservations": None if reservations is None else str(Path(reservations).absolute()),
    }
    if isinstance(parsed, MemoryMedia):
        namespace["memory"] = parsed.size_bytes
    else:
        namespace |= {"path": str(Path(parsed.path).absolute()), "size": parsed.size_bytes, "create": parsed.create}
    given = {key: value for key, value in namespace.items() if value is not None}
    added = _ask(socket, "add-namespace", nqn=nqn, namespace=given)
    if json:
        print_json(added)
    else:
        print(f"namespace {added['nsid']} of {added['nqn']} was added")


@app.command("remove-namespace")
def remove_namespace(nsid: Nsid, nqn: Subsystem = None, timeout: Timeout = 60.0, socket: Socket = None) -> None:
    """Take a namespace away; connected hosts are told, and its file is flushed and closed.

    Example: `headrace target remove-namespace 2`
    """
    answer = _ask(socket, "remove-namespace", wait_s=timeout, nqn=nqn, nsid=nsid, timeout_s=timeout)
    print(f"namespace {nsid} was removed" + ("" if answer["closed"] else "; commands are still under way at its media"))


@app.command("resize-namespace")
def resize_namespace(
    nsid: Nsid,
    size: Annotated[str, typer.Argument(metavar="SIZE", help="Its new size, as 2TiB.", show_default=False)],
    nqn: Subsystem = None,
    force: Annotated[bool, typer.Option("--force", help="To a smaller size, too: what lies beyond is lost.")] = False,
    socket: Socket = None,
) -> None:
    """Give a namespace another size; connected hosts are told.

    Example: `headrace target resize-namespace 1 2TiB`
    """
    from headrace.cli.sizes import parse_size
    from headrace.units import format_bytes

    wanted = parse_size("SIZE", size)
    answer = _ask(socket, "resize-namespace", nqn=nqn, nsid=nsid, size=wanted, force=force)
    print(f"namespace {nsid} has {format_bytes(answer['size_bytes'])}")


@app.command()
def ana(
    state: Annotated[
        str,
        typer.Argument(
            metavar="STATE",
            help="optimized, non-optimized, inaccessible, persistent-loss or change.",
            show_default=False,
        ),
    ],
    group: Annotated[int, typer.Option(metavar="ID", help="The ANA group.")] = 1,
    portal: Annotated[
        str | None, typer.Option(metavar="NAME", help="Through this portal only. [default: all]", show_default=False)
    ] = None,
    nqn: Subsystem = None,
    socket: Socket = None,
) -> None:
    """Set how the namespaces of a group are reached through a portal; hosts that are connected there are told.

    Example: `headrace target ana inaccessible --portal b`
    """
    _ask(socket, "ana", nqn=nqn, group=group, portal=portal, state=state)
    print(f"ANA group {group} is {state} through {'every portal' if portal is None else portal}")


@app.command("allow-host")
def allow_host(
    host: Annotated[str, typer.Argument(metavar="HOSTNQN", help="Or `any`.", show_default=False)],
    read_only: Annotated[bool, typer.Option("--read-only", help="The target refuses its writes.")] = False,
    nqn: Subsystem = None,
    socket: Socket = None,
) -> None:
    """Let a host connect, or change what it may do.

    Example: `headrace target allow-host nqn.2014-08.org.nvmexpress:uuid:... --read-only`
    """
    access = "read-only" if read_only else "read-write"
    _ask(socket, "allow-host", nqn=nqn, host=host, access=access)
    print(f"{host} may connect: {access}")


@app.command("deny-host")
def deny_host(
    host: Annotated[str, typer.Argument(metavar="HOSTNQN", help="Or `any`.", show_default=False)],
    nqn: Subsystem = None,
    socket: Socket = None,
) -> None:
    """Strike a host off the list, and disconnect it.

    Example: `headrace target deny-host nqn.2014-08.org.nvmexpress:uuid:...`
    """
    answer = _ask(socket, "deny-host", nqn=nqn, host=host)
    print(f"{host} may not connect any more; {_ended(answer['ended'])}")


@app.command()
def disconnect(
    host: Annotated[str, typer.Argument(metavar="HOSTNQN", show_default=False)], socket: Socket = None
) -> None:
    """End the associations of a host, which may connect again, and will if it is headrace or Linux.

    Example: `headrace target disconnect nqn.2014-08.org.nvmexpress:uuid:...`
    """
    print(_ended(_ask(socket, "disconnect", host=host)["ended"]))


def _ended(controllers: int) -> str:
    if controllers == 0:
        return "no controller of it was connected"
    return f"{controllers} controller{'s were' if controllers > 1 else ' was'} ended"


@app.command()
def drain(timeout: Timeout = 60.0, socket: Socket = None) -> None:
    """Accept no more connections and commands, let those under way end, then stop.

    Example: `headrace target drain`
    """
    answer = _ask(socket, "drain", wait_s=timeout, timeout_s=timeout)
    print("drained" if answer["drained"] else f"stopped: commands were still under way after {timeout:g} s")


@app.command()
def stop(socket: Socket = None) -> None:
    """End the target in order: what was answered is written down first.

    Example: `headrace target stop`
    """
    _ask(socket, "stop")
    print("stopping")


# ---- what status looks like -----------------------------------------------------------------------------------------


def _show(status: dict[str, Any]) -> None:
    from headrace.cli.output import print_facts, print_table
    from headrace.units import format_bytes, format_seconds

    portals = ", ".join(
        f"{portal['name']} {portal['address']}" + (" (discovery)" if portal["discovery"] else "")
        for portal in status["portals"]
    )
    totals = status["totals"]
    print_facts(
        {
            "process": f"{status['pid']}, up {format_seconds(status['uptime_s'])}"
            + (", draining" if status["draining"] else ""),
            "portals": portals,
            "connections": f"{status['connections']}, {totals['connections_accepted']} since it began",
            "buffers": format_bytes(status["buffer_bytes"]),
            "errors": f"{totals['protocol_errors']} of protocol, {totals['digest_errors']} digests, "
            f"{totals['connections_dropped_silent']} silent peers, {totals['panics']} defects",
        }
    )
    for subsystem in status["subsystems"]:
        print(f"\n{subsystem['nqn']}")
        for group in subsystem["ana_groups"]:
            states = ", ".join(f"{name} {state}" for name, state in group["states"].items())
            print(f"  ANA group {group['id']}: {states}")
        hosts = [f"{nqn} {access}" for nqn, access in subsystem["hosts"].items()]
        if subsystem["other_hosts"]:
            hosts.append(f"{'every other' if hosts else 'every'} host {subsystem['other_hosts']}")
        print(f"  hosts: {', '.join(hosts) or 'none'}")
        print_table(
            ["nsid", "size", "block", "engine", "cache", "state", "read", "written", "flushes", "errors", "media"],
            [
                [
                    str(n["nsid"]),
                    format_bytes(n["size_bytes"]),
                    str(n["block_bytes"]),
                    n["engine"],
                    "volatile" if n["volatile_cache"] else "none",
                    "writes lost" if n["degraded"] else "read-only" if n["read_only"] else "ok",
                    format_bytes(n["read_bytes"]),
                    format_bytes(n["written_bytes"]),
                    str(n["flushes"]),
                    str(n["media_errors"]),
                    n["path"] or "memory",
                ]
                for n in subsystem["namespaces"]
            ],
            right=(0, 1, 2, 6, 7, 8, 9),
            page=True,
        )
        for namespace in subsystem["namespaces"]:
            if said := _reserved(namespace):
                print(f"  {said}")
        if subsystem["closing"]:
            print(f"  removed, with commands under way: {', '.join(map(str, subsystem['closing']))}")
    if status["controllers"]:
        print("\nhosts")
        print_table(
            ["controller", "host", "from", "portal", "queues", "subsystem"],
            [
                [
                    str(c["cntlid"]),
                    c["hostnqn"],
                    c["address"] or "",
                    c["portal"] or "",
                    str(len([queue for queue in c["queues"] if queue])),
                    c["subsystem"],
                ]
                for c in status["controllers"]
            ],
            right=(0, 4),
            page=True,
        )
    if status["notes"]:
        print("\nnotes")
        began = time.time() - status["uptime_s"]
        print("\n".join(f"  {_at_clock(note, began)}" for note in status["notes"][-10:]))


def _reserved(namespace: dict[str, Any]) -> str:
    """Who may write to a namespace, in a line; empty where nobody is registered."""
    found = namespace["reservations"]
    if not found["registered"]:
        return ""
    hosts = [f"{UUID(one['hostid'])}{' holds' if one['holds'] else ''}" for one in found["registrants"]]
    if found["registered"] > len(hosts):
        hosts.append(f"{found['registered'] - len(hosts)} more")
    refused = f"; {namespace['conflicts']} commands refused" if namespace["conflicts"] else ""
    kind = found["type"] or "no reservation"
    return f"namespace {namespace['nsid']}: {kind}, registered {', '.join(hosts)}{refused}"


def _at_clock(note: str, began: float) -> str:
    """A note of the target begins with its age as `123 ms: `; people look for the time of day."""
    passed, unit, rest = note.partition(" ms: ")
    if not unit or not passed.isdecimal():
        return note
    return f"{time.strftime('%H:%M:%S', time.localtime(began + int(passed) / 1000))}  {rest}"
