"""`headrace dataset info`: what a dataset is of, and how long its documents are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.volume.common import AsJson, Degraded, VolumeOption, open_reading, shown

if TYPE_CHECKING:
    from headrace.dataset import TokenStream
    from headrace.dataset.inspect import Lengths

#: Characters of the longest bar.
_BAR = 40


def info(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The dataset.", show_default=False)],
    members: VolumeOption = None,
    degraded: Degraded = False,
    json: AsJson = False,
) -> None:
    """Documents, tokens, tokenizer, packings, and how long the documents are. Reads the index, not the tokens.

    Example: `headrace dataset info corpus --volume file:/data/a.img`
    """
    from headrace.cli.output import print_json
    from headrace.dataset import TokenStream
    from headrace.dataset.inspect import measure

    with open_reading(members, degraded=degraded) as volume:
        stream = TokenStream.open(volume, name)
        lengths, packings = measure(stream), _packings(stream)
    if json:
        print_json(
            {
                "name": name,
                "documents": stream.document_count,
                "tokens": stream.token_count,
                "dtype": stream.dtype.name,
                "length_bytes": stream.bin_info.length_bytes,
                "manifest": vars(stream.manifest) if stream.manifest else None,
                "shortest": lengths.shortest,
                "longest": lengths.longest,
                "lengths": [
                    {"from": low, "to": high, "documents": documents, "tokens": tokens}
                    for low, high, documents, tokens in lengths.rows()
                ],
                "packings": packings,
            }
        )
    else:
        _show(stream, lengths, packings)


def _packings(stream: TokenStream) -> list[dict[str, Any]]:
    from headrace.dataset import Packing
    from headrace.dataset.inspect import packings_of
    from headrace.errors import DatasetError, VolumeError

    found: list[dict[str, Any]] = []
    for name, layout, length in packings_of(stream.volume, stream.name):
        try:
            manifest = Packing.open(stream, layout, length).manifest
        except (DatasetError, VolumeError) as error:
            found.append({"name": name, "error": str(error)})
            continue
        found.append(
            {
                "name": name,
                "samples": manifest.samples,
                "fill": manifest.fill,
                "long": manifest.long,
                "long_documents": manifest.long_documents,
                "left_out_documents": manifest.left_out_documents,
                "most_pieces": manifest.most_pieces,
            }
        )
    return found


def _show(stream: TokenStream, lengths: Lengths, packings: list[dict[str, Any]]) -> None:
    from headrace.cli.output import print_facts, print_table
    from headrace.units import format_bytes

    facts = {
        "dataset": shown(stream.name),
        "documents": f"{stream.document_count:,}",
        "tokens": f"{stream.token_count:,} of {stream.dtype.name}, {format_bytes(stream.bin_info.length_bytes)}",
    }
    manifest = stream.manifest
    if manifest is not None:
        facts["vocabulary"] = f"{manifest.vocabulary:,}"
        facts["end of document"] = f"{shown(manifest.end_of_document)} = {manifest.end_of_document_id}"
        if "description" in manifest.corpus:
            facts["corpus"] = shown(str(manifest.corpus["description"]))
        facts["SHA-256 of the tokens"] = shown(manifest.tokens_sha256)
    if stream.document_count:
        mean = stream.token_count / stream.document_count
        facts["tokens a document"] = f"{lengths.shortest:,} to {lengths.longest:,}, {mean:,.1f} on average"
    for packing in packings:
        label = packing["name"].removeprefix(f"{stream.name}.")
        if "error" in packing:
            facts[label] = shown(f"damaged: {packing['error']}")
        else:
            facts[label] = f"{packing['samples']:,} samples, {packing['fill']:.2%} filled"
    print_facts(facts)
    rows = lengths.rows()
    most = max((documents for _, _, documents, _ in rows), default=0)
    print()
    print_table(
        ("tokens", "documents", "share of tokens", ""),
        [
            [
                f"{low:,}" if low == high else f"{low:,} to {high:,}",
                f"{documents:,}",
                f"{tokens / max(1, stream.token_count):.1%}",
                "#" * -(-documents * _BAR // most),
            ]
            for low, high, documents, tokens in rows
        ],
        right=(0, 1, 2),
        page=True,
    )
