"""`headrace discover`."""

from __future__ import annotations

from typing import Annotated

import typer


def discover(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="A target or discovery controller.", show_default=False)
    ],
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest wait for an answer.")] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask an NVMe/TCP target which subsystems it has.

    Example: `headrace discover 10.0.0.1:4420`
    """
    from dataclasses import asdict

    from headrace.cli.output import print_json, print_table
    from headrace.fabric import DISCOVERY_PORT, parse_endpoint
    from headrace.fabric import discover as ask

    host, port = parse_endpoint(address, default_port=DISCOVERY_PORT)
    log = ask(host, port, connect_timeout_s=timeout)
    if json:
        records = [asdict(record) | {"uri": record.uri} for record in log.records]
        print_json({"generation": log.generation, "records": records})
        return
    print_table(
        ["transport", "type", "address", "subsystem"],
        [[r.trtype, r.subtype, f"{r.traddr}:{r.trsvcid}", r.subnqn] for r in log.records],
    )
