"""`headrace discover`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def discover(
    addresses: Annotated[
        list[str],
        typer.Argument(metavar="HOST:PORT...", help="Targets or discovery controllers.", show_default=False),
    ],
    referrals: Annotated[
        bool,
        typer.Option("--referrals/--no-referrals", help="Also ask the controllers that these refer to."),
    ] = True,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest wait for each controller.")] = 10.0,
    host_traddr: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Connect from this address of the machine.")
    ] = None,
    host_iface: Annotated[str | None, typer.Option(metavar="NAME", help="Connect by this network interface.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask NVMe/TCP targets which subsystems they have.

    Below the table, one address for each subsystem, with all its portals as paths; put in the nsid that you want. A
    target names to a host only what it lets it use, and takes its name from HEADRACE_HOSTNQN or /etc/nvme/hostnqn.

    Without a port: 8009. Controllers that do not answer, and entries that nobody can use, are told on standard error;
    the command fails when none of HOST:PORT answers.

    Example: `headrace discover 10.0.0.1:4420`
    """
    from dataclasses import asdict

    from headrace.cli.output import print_json, print_table
    from headrace.fabric import DISCOVERY_PORT, parse_endpoint
    from headrace.fabric import discover as ask

    found = ask(
        [parse_endpoint(address, default_port=DISCOVERY_PORT) for address in addresses],
        referrals=referrals,
        host_traddr=host_traddr,
        host_iface=host_iface,
        connect_timeout_s=timeout,
    )
    if json:
        records = [asdict(record) | {"uri": record.uri} for record in found.records]
        print_json(asdict(found) | {"records": records, "subsystems": found.subsystems()})
    else:
        print_table(
            ["transport", "type", "address", "subsystem", "said by"],
            [[r.trtype, r.subtype, r.portal, r.subnqn, r.controller] for r in found.records],
        )
        for uri in found.subsystems().values():
            print(uri)
    if not found.subsystems():
        from headrace.settings import host_identity

        print(
            f"headrace: no subsystem is offered to this host, {host_identity().hostnqn}; where it should be, allow "
            "that name on the target, or set HEADRACE_HOSTNQN to a name that it allows",
            file=sys.stderr,
        )
    for failure in found.failures:
        by = f" (referred to by {failure.via})" if failure.via else ""
        print(f"headrace: {failure.address}{by}: {failure.error}", file=sys.stderr)
    for record in found.records:
        if record.problem is not None and record.subtype != "referral":
            print(
                f"headrace: {record.controller} names {record.subnqn} at {record.portal}: {record.problem}",
                file=sys.stderr,
            )
