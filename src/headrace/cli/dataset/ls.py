"""`headrace dataset ls`: the datasets of a volume, one a line."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.volume.common import AsJson, Degraded, Members, open_reading, shown


def ls(
    members: Members = None,
    prefix: Annotated[str, typer.Option(help="Only names that begin so.")] = "",
    degraded: Degraded = False,
    json: AsJson = False,
) -> None:
    """The datasets of a volume, one a line: documents (or records), tokens, their type, size, name, packings. `--json`:
    one object a line.

    Example: `headrace dataset ls file:/data/a.img`
    """
    from headrace.cli.output import print_json, print_table
    from headrace.dataset.inspect import find_datasets
    from headrace.units import format_bytes

    rows = []
    with open_reading(members, degraded=degraded) as volume:
        for found in find_datasets(volume, prefix):
            stream, records = found.stream, found.records
            packings = [each.removeprefix(f"{found.name}.") for each in found.packings]
            if json:
                facts: dict[str, object] = {"name": found.name, "packings": packings}
                if stream is not None:
                    facts |= {
                        "documents": stream.document_count,
                        "tokens": stream.token_count,
                        "dtype": stream.dtype.name,
                        "length_bytes": stream.bin_info.length_bytes,
                    }
                if records is not None:
                    facts |= {"records": len(records), "length_bytes": records.header.data_bytes}
                print_json(facts | ({"error": str(found.problem)} if found.problem else {}))
            elif records is not None:
                size = format_bytes(records.header.data_bytes)
                rows.append([f"{len(records):,}", "-", "records", size, shown(found.name), ""])
            elif stream is None:
                rows.append(["-", "-", "-", "-", shown(found.name), shown(f"damaged: {found.problem}")])
            else:
                rows.append(
                    [
                        f"{stream.document_count:,}",
                        f"{stream.token_count:,}",
                        stream.dtype.name,
                        format_bytes(stream.bin_info.length_bytes),
                        shown(found.name),
                        " ".join(packings),
                    ]
                )
    if not json:
        print_table(("documents", "tokens", "type", "size", "name", "packings"), rows, right=(0, 1, 3))
