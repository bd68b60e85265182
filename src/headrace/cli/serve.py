"""`headrace serve`: namespaces over NVMe/TCP from this process, until it is told to stop."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.media import parse_media
from headrace.cli.sizes import parse_size

if TYPE_CHECKING:
    from headrace.fabric import Target, TargetOptions
    from headrace.fabric.control import ControlServer

#: Of the subsystem that holds the namespaces given without one.
DEFAULT_NQN = "nqn.2026-01.io.headrace:serve"

#: Instead of a host's NQN: every host.
ANY_HOST = "any"


def serve(
    namespaces: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAMESPACE...",
            help="`PATH` (a file or block device), `PATH:SIZE` (a sparse file, made if there is none) or `mem:SIZE`; "
            "nsid 1, 2, ... of subsystem `--nqn`.",
            show_default=False,
        ),
    ] = None,
    # Named here: typer 0.27 takes a metavar that is the parameter's own name for a positional argument.
    nqn: Annotated[str, typer.Option("--nqn", metavar="NQN", help="The subsystem's name.")] = DEFAULT_NQN,
    subsystem: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NQN=NAMESPACE[,...]",
            help="One more subsystem and its namespaces; may be given again.",
            show_default=False,
        ),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT", help="Where to listen, port 0: a free one; may be given again. [default: 127.0.0.1:0]"
        ),
    ] = None,
    volatile_cache: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Keep unflushed writes, up to SIZE a namespace, in memory only, as a drive's volatile cache does; "
            "they die with this process. For tests of what must not get lost.",
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(metavar="BYTES", help="Logical block, 512 or 4096.")] = 4096,
    io_engine: Annotated[str, typer.Option(metavar="ENGINE", help="For files: auto, io_uring or pread.")] = "auto",
    direct: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="Files past the page cache: on (for checkpoints: what is flushed is written as it comes), off, auto "
            "(block devices only).",
        ),
    ] = "auto",
    read_only: Annotated[bool, typer.Option("--read-only", help="Refuse writes.")] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOSTNQN",
            help="Let this host connect, and only such; `any` for every one. Needed to listen beyond loopback.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Serve what this TOML file says, in place of the options above: several portals, ANA groups, hosts "
            "that may only read, limits. `--print-config` shows one.",
            show_default=False,
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print what would be served as a TOML file, and stop.")
    ] = False,
    socket: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="The control socket, for `headrace target` and `--status`. [default: one of this process, in "
            "$XDG_RUNTIME_DIR/headrace]",
            show_default=False,
        ),
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Show what a running target does, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON when ready, or the status.")] = False,
) -> None:
    """Export files, block devices or memory as NVMe/TCP namespaces; no root, no kernel module.

    When it is ready, it prints the address of each namespace and the I/O engine in use. SIGTERM or Ctrl-C end it in
    order: what was answered is written down first. Hosts choose whether to use header and data digests.

    NVMe/TCP has neither encryption nor, by name alone, protection: listen on networks that you trust.

    Example: `headrace serve /data/a.img:100GiB --listen 10.0.0.1:4420 --allow-host any`
    """
    if status:
        from headrace.cli.target import status as show

        show(socket=socket, json=json)
        return
    from headrace.fabric import Target
    from headrace.fabric.config import load_config, to_toml

    if config is not None:
        _nothing_beside_the_file(
            namespaces, subsystem, listen, allow_host, volatile_cache, nqn != DEFAULT_NQN, block_size != 4096,
            io_engine != "auto", direct != "auto", read_only,
        )  # fmt: skip
        options = load_config(config)
    else:
        options = _options(
            namespaces, nqn, subsystem, listen, volatile_cache, block_size, io_engine, direct, read_only, allow_host
        )
    if print_config:
        print(to_toml(options), end="")
        return
    # Before the target starts, so that a signal which comes meanwhile ends it in order too.
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with Target(options) as target, _control(target, socket, stop) as control:
        _say_ready(target, None if control is None else str(control.path), json)
        while not stop.wait(3600):
            pass
        if not json:
            print("stopping", file=sys.stderr, flush=True)
        # Requests that wait for commands end with the commands.
        target.stop()


def _nothing_beside_the_file(*given: object) -> None:
    from headrace.errors import UsageError

    if any(given):
        raise UsageError(
            "--config says all that is served",
            expected="no namespace and no option that says what is served beside it",
            next_step="put it into the file; `headrace serve ... --print-config` shows how",
        )


def _control(target: Target, path: str | None, stop: threading.Event) -> ControlServer | contextlib.nullcontext[None]:
    """The control socket; a default place that cannot be had is said, and is no reason not to serve."""
    from pathlib import Path

    from headrace.errors import HeadraceError
    from headrace.fabric.control import ControlServer, default_socket

    if path is not None:
        return ControlServer(target, Path(path), stop.set)
    try:
        return ControlServer(target, default_socket(), stop.set)
    except (HeadraceError, OSError) as error:
        print(f"headrace: no control socket: {error}", file=sys.stderr, flush=True)
        return contextlib.nullcontext()


def _options(
    namespaces: list[str] | None,
    nqn: str,
    subsystem: list[str] | None,
    listen: list[str] | None,
    volatile_cache: str | None,
    block_size: int,
    io_engine: str,
    direct: str,
    read_only: bool,
    allow_host: list[str] | None,
) -> TargetOptions:
    from headrace.errors import UsageError
    from headrace.fabric import ListenOptions, NamespaceOptions, SubsystemOptions, TargetOptions, parse_endpoint
    from headrace.fabric.endpoint import is_loopback
    from headrace.fabric.options import DIRECT

    if direct not in DIRECT:
        raise UsageError("--direct", expected=" or ".join(DIRECT), found=repr(direct))
    cache_bytes = 0 if volatile_cache is None else parse_size("--volatile-cache", volatile_cache)
    hosts = [host for host in allow_host or [] if host != ANY_HOST]
    wanted: dict[str, list[str]] = {}
    if namespaces:
        wanted[nqn] = list(namespaces)
    for text in subsystem or []:
        name, equals, those = text.partition("=")
        if not equals or not those or name in wanted:
            raise UsageError("--subsystem", expected="NQN=NAMESPACE[,NAMESPACE...], each NQN once", found=repr(text))
        wanted[name] = those.split(",")
    if not wanted:
        raise UsageError(
            "nothing to serve", expected="a NAMESPACE, --subsystem or --config", next_step="see `headrace serve --help`"
        )
    endpoints = [parse_endpoint(text) for text in listen or ["127.0.0.1:0"]]
    for host, _ in endpoints:
        if not allow_host and not is_loopback(host):
            raise UsageError(
                f"listening on {host} lets other machines in, and NVMe/TCP asks nobody for a password",
                next_step="name the hosts with --allow-host HOSTNQN, or allow all with --allow-host any",
            )
    return TargetOptions(
        subsystems=[
            SubsystemOptions(
                nqn=name,
                allow_hosts=hosts,
                other_hosts="read-write" if ANY_HOST in (allow_host or []) else None,
                namespaces=[
                    NamespaceOptions(
                        nsid=nsid,
                        media=parse_media(text, direct),
                        block_bytes=block_size,
                        volatile_cache_bytes=cache_bytes,
                        read_only=read_only,
                    )
                    for nsid, text in enumerate(those, start=1)
                ],
            )
            for name, those in wanted.items()
        ],
        listen=[ListenOptions(host=host, port=port) for host, port in endpoints],
        io_engine=io_engine,
    )


def _say_ready(target: Target, socket: str | None, json: bool) -> None:
    from headrace.cli.output import print_json

    listening = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in target.addresses]
    served = [
        (target.uri(subsystem.nqn, namespace.nsid), namespace)
        for subsystem in target.options.subsystems
        for namespace in subsystem.namespaces
    ]
    engine = _engines(target.status())
    if json:
        print_json(
            {
                "event": "ready",
                "listen": listening,
                "io_engine": engine,
                "socket": socket,
                "namespaces": [
                    {
                        "uri": uri,
                        "media": namespace.media._json(),
                        "volatile_cache_bytes": namespace.volatile_cache_bytes,
                    }
                    for uri, namespace in served
                ],
            }
        )
        return
    for uri, _ in served:
        print(f"READY {uri}")
    for host in sorted({host for host, _ in target.addresses if host in ("0.0.0.0", "::")}):
        print(f"{host} stands for every address of this machine: hosts name one of them")
    print(f"I/O engine: {engine}")
    if socket is not None:
        print(f"control socket: {socket}")
    sys.stdout.flush()


def _engines(status: dict[str, Any]) -> str:
    """The I/O engines in use, each once."""
    engines = {str(namespace["engine"]) for subsystem in status["subsystems"] for namespace in subsystem["namespaces"]}
    return ", ".join(sorted(engines))
