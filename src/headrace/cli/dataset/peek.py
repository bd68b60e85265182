"""`headrace dataset peek`: documents and samples as text, records as they begin."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.volume.common import AsJson, Degraded, VolumeOption, open_reading, shown

if TYPE_CHECKING:
    from headrace.dataset import TextTokenizer, TokenStream


class Kind(Enum):
    documents = "documents"
    windows = "windows"
    packed = "packed"
    padded = "padded"
    records = "records"


def peek(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The dataset.", show_default=False)],
    members: VolumeOption = None,
    what: Annotated[
        Kind | None,
        typer.Option(
            help="Whole documents, samples as a loader gives them, or records.", show_default="documents, or records"
        ),
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option("--sequence-length", "-l", metavar="N", help="Inputs of a sample.")
    ] = None,
    first: Annotated[
        int | None, typer.Option(metavar="I", help="Number of the first one.", show_default="0, or by the seed")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="SEED", help="In the order of a loader with this seed, not by number.")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", metavar="N", help="How many.", min=1, max=10_000)] = 3,
    tokens: Annotated[
        int,
        typer.Option(
            metavar="N", help="At most so many tokens of each document, or bytes of each field.", min=1, max=1 << 20
        ),
    ] = 200,
    degraded: Degraded = False,
    json: AsJson = False,
) -> None:
    """Show documents or samples as text, by the tokenizer that is stored with the dataset; without one, as numbers. Of
    records, show keys and how their fields begin.

    Example: `headrace dataset peek corpus --what packed --sequence-length 4096 --seed 1 --volume file:/data/a.img`
    """
    from headrace.cli.output import print_json
    from headrace.dataset import Records, Sampler, TokenStream
    from headrace.errors import UsageError

    with open_reading(members, degraded=degraded) as volume:
        if what is None:
            what = Kind.records if f"{name}.records" in volume and f"{name}.bin" not in volume else Kind.documents
        whole = what in (Kind.documents, Kind.records)
        if (sequence_length is None) != whole:
            expected = f"none for {what.value}" if whole else "the inputs of a sample"
            raise UsageError("--sequence-length belongs to samples", expected=expected)

        def chosen(total: int) -> list[int]:
            begin = first or 0
            if not 0 <= begin < total:
                raise UsageError(f"no such {what.value}", expected=f"0 to {total - 1}", found=str(begin))
            number = min(count, total - begin)
            if seed is None:
                return list(range(begin, begin + number))
            found: list[int] = Sampler(total, seed).indices(0, begin, number).tolist()
            return found

        if what is Kind.records:
            from headrace.cli.dataset.peek_records import lines, looks

            records = Records.open(volume, name)
            for look in looks(records, chosen(len(records)), tokens):
                if json:
                    print_json(look)
                else:
                    print(*lines(look, len(records)), sep="\n")
            return
        stream = TokenStream.open(volume, name)
        texts = _Texts(stream, tokens)
        total, pieces = _source(stream, what, sequence_length)
        for number in chosen(total):
            parts = [texts.part(start, length) for start, length in pieces(number)]
            if json:
                print_json({"number": number, "kind": what.value, "parts": parts})
                continue
            size = sum(part["tokens"] for part in parts)
            several = f" in {len(parts)} pieces" if len(parts) > 1 else ""
            print(f"{what.value.removesuffix('s')} {number:,} of {total:,}: {size:,} tokens{several}")
            for part in parts:
                cut = part["tokens"] - part["shown"]
                if several:
                    print(f"  from token {part['start']:,}, {part['tokens']:,} tokens")
                for line in part["text"].splitlines() or [""]:
                    print(f"  | {shown(line)}")
                if cut:
                    print(f"  | ... {cut:,} tokens more")


def _source(stream: TokenStream, what: Kind, sequence_length: int | None) -> tuple[int, Any]:
    """How many there are, and a function that gives the (start, length) of all parts of one."""
    import numpy as np

    from headrace.dataset import open_samples

    if sequence_length is None:

        def document(number: int) -> list[tuple[int, int]]:
            start, end = stream.document_starts(number, 1).tolist()
            return [(start, end - start)]

        return stream.document_count, document

    samples = open_samples(stream, what.value, sequence_length)

    def sample(number: int) -> Iterator[tuple[int, int]]:
        places = samples.plan(np.array([number], np.int64)).places()
        return zip(places.starts.tolist(), places.lengths.tolist(), strict=True)

    return samples.sample_count, sample


class _Texts:
    """Tokens as text."""

    def __init__(self, stream: TokenStream, limit: int) -> None:
        self._stream = stream
        self._limit = limit
        self._tokenizer = _tokenizer(stream)

    def part(self, start: int, length: int) -> dict[str, Any]:
        kept = min(length, self._limit)
        tokens = self._stream.read_window(start, kept)
        text = self._tokenizer.decode(tokens) if self._tokenizer else " ".join(map(str, tokens.tolist()))
        return {"start": start, "tokens": length, "shown": kept, "text": text}


def _tokenizer(stream: TokenStream) -> TextTokenizer | None:
    from headrace.dataset.ingestion.tokenizer import parse_tokenizer
    from headrace.errors import ObjectNotFound

    try:
        json = stream.tokenizer_json()
    except ObjectNotFound:
        return None
    end = stream.manifest.end_of_document if stream.manifest else None
    return parse_tokenizer(json, f"{stream.name}.tokenizer.json", end)
