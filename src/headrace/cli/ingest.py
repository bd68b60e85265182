"""`headrace ingest`: text into a volume as tokens, Megatron's token streams as they are, and files as records."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from headrace.dataset import (
        CorpusOptions,
        ImportReport,
        IngestOptions,
        IngestProgress,
        IngestReport,
        RecordsReport,
        WorkOptions,
    )
    from headrace.volume import Session

    #: Prints what was done, as JSON or for people.
    _Show: TypeAlias = Callable[[bool], None]
    #: Does it, and tells how far it is.
    _Begin: TypeAlias = Callable[[Session, Callable[[IngestProgress], None]], _Show]

#: Stands for the text that comes with the running Python. No file of this name can be meant: paths come as `./stdlib:`.
PYTHON_TEXT = "stdlib:"


def ingest(
    corpus: Annotated[
        str,
        typer.Argument(
            metavar="CORPUS",
            help="A folder or file, or a URL that fsspec knows: text, .jsonl (also .gz, .zst), .parquet, .arrow; "
            "or a Megatron PREFIX.bin, taken over with its .idx as they are. "
            f"`{PYTHON_TEXT}` is the text of Python's library.",
            show_default=False,
        ),
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the dataset.", show_default=False)],
    members: Annotated[
        list[str], typer.Option("--volume", "-V", metavar="URI", help="Address of a member; once for each.")
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A tokenizer.json. Without it a byte-level BPE is trained on the corpus."),
    ] = None,
    end_of_document: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="The token that ends a document, where the tokenizer does not say it."),
    ] = None,
    vocab_size: Annotated[int, typer.Option(metavar="N", help="Tokens of a trained tokenizer.")] = 8192,
    train_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Text of the corpus to train a tokenizer on.")
    ] = "16MiB",
    limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Stop after so much text.", show_default="all of it")
    ] = None,
    text_field: Annotated[
        str, typer.Option(metavar="NAME", help="Member of a .jsonl line, column of a .parquet file.")
    ] = "text",
    suffix: Annotated[
        list[str] | None,
        typer.Option(metavar=".EXT", help="Take these files of a folder as text, too; once for each."),
    ] = None,
    records: Annotated[
        bool,
        typer.Option(
            "--records",
            help="Keep files as they are: the samples of WebDataset tars, or of a folder without tars all files.",
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Processes that read and tokenize.", show_default="one for each core"),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Let the CPUs of a Ray cluster be the workers: `auto` or HOST:PORT. All nodes must see the corpus and "
            "reach the volume by the same names.",
            show_default="this machine",
        ),
    ] = None,
    bad: Annotated[
        str,
        typer.Option(
            metavar="fail|skip", help="What becomes of records that cannot be read: skipped ones are counted."
        ),
    ] = "fail",
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew where an ingest of this name was not finished.")
    ] = False,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Take the volume over from a job whose heart has stopped beating.")
    ] = False,
    unfenced: Annotated[
        bool,
        typer.Option(
            "--unfenced", help="Write where the target has no reservations, too: nothing keeps an old writer out there."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Tokenize a corpus into a volume: NAME.bin and NAME.idx (Megatron's layout), NAME.tokenizer.json, NAME.json.

    With --records nothing is tokenized: NAME.records, NAME.records.idx, NAME.json.

    All of it becomes visible in one commit at the end. After an error, Ctrl-C or a crash nothing of it is, and the same
    command goes on where it was: what was done lies in the volume as NAME.ingest/.

    Example: `headrace ingest stdlib: corpus --volume file:/data/a.img --limit 40MiB`
    """
    from headrace.dataset import CorpusOptions, IngestOptions, WorkOptions
    from headrace.dataset.ingestion.work import prefix_of
    from headrace.errors import HeadraceError
    from headrace.volume import Volume

    work = WorkOptions(workers=workers, restart=restart, ray=ray)
    begin: _Begin
    if records:
        _refuse(
            "--records",
            {"--tokenizer": tokenizer, "--end-of-document": end_of_document, "--limit": limit, "--suffix": suffix},
        )
        begin = _records(corpus, name, work, bad)
    elif corpus != PYTHON_TEXT and (prefix := _prefix(corpus)) is not None:
        _refuse("a token stream", {"--limit": limit, "--suffix": suffix})
        begin = _tokens(prefix, name, work, tokenizer, end_of_document)
    else:
        options = IngestOptions(
            tokenizer=tokenizer,
            end_of_document=end_of_document,
            vocab_size=vocab_size,
            train_bytes=parse_size("--train-size", train_size),
            workers=workers,
            restart=restart,
            ray=ray,
        )
        of_corpus = CorpusOptions(
            limit_bytes=None if limit is None else parse_size("--limit", limit),
            text_field=text_field,
            extra_suffixes=tuple(suffix or ()),
            bad=bad,
        )
        begin = _text(corpus, name, options, of_corpus)
    with (
        Volume.open(members, write=True) as volume,
        volume.session(
            run_id="headrace ingest", takeover="if-dead" if takeover else "refuse", unfenced=unfenced
        ) as session,
        _Progress() as progress,
    ):
        try:
            show = begin(session, progress.show)
        except BaseException:
            # Where the volume cannot be read any more, what ended the ingest is still what is told.
            with suppress(HeadraceError):
                if progress.read and volume.any(prefix_of(name)):
                    progress.say(f"what was done is kept as {prefix_of(name)}: the same command goes on there")
            raise
    show(json)


def _refuse(what: str, options: dict[str, object]) -> None:
    from headrace.errors import UsageError

    for option, value in options.items():
        if value:
            raise UsageError(f"{option} is for text, which {what} is not")


def _prefix(corpus: str) -> str | None:
    from headrace.dataset import megatron_prefix

    return megatron_prefix(corpus) if corpus.endswith((".bin", ".idx")) else None


def _text(corpus: str, name: str, options: IngestOptions, of_corpus: CorpusOptions) -> _Begin:
    from headrace.dataset import ingest, open_corpus

    opened = open_corpus(None if corpus == PYTHON_TEXT else corpus, of_corpus)

    def begin(session: Session, progress: Callable[[IngestProgress], None]) -> _Show:
        report = ingest(opened, session, name, options, progress=progress)
        return lambda json: _show(report, json)

    return begin


def _records(corpus: str, name: str, options: WorkOptions, bad: str) -> _Begin:
    from headrace.dataset import ingest_records, open_records

    opened = open_records(corpus, bad=bad)

    def begin(session: Session, progress: Callable[[IngestProgress], None]) -> _Show:
        report = ingest_records(opened, session, name, options, progress=progress)
        return lambda json: _show_records(report, json)

    return begin


def _tokens(
    prefix: str, name: str, options: WorkOptions, tokenizer: Path | None, end_of_document: str | None
) -> _Begin:
    from headrace.dataset import import_megatron

    def begin(session: Session, progress: Callable[[IngestProgress], None]) -> _Show:
        report = import_megatron(
            prefix, session, name, options, tokenizer=tokenizer, end_of_document=end_of_document, progress=progress
        )
        return lambda json: _show_tokens(report, json)

    return begin


def _how(report: IngestReport | RecordsReport | ImportReport, speed: str) -> dict[str, str]:
    """What is told of every ingest."""
    from headrace.units import format_seconds

    facts = {
        "time": f"{format_seconds(report.seconds)}, {speed}, {report.workers} worker"
        + ("s" if report.workers > 1 else "")
        + ("" if report.direct else ", which have no way to the volume"),
        "commit": str(report.sequence),
    }
    if report.resumed:
        facts["done before"] = f"{report.resumed:,} of {report.slices:,} slices"
    return facts


def _work(report: IngestReport | RecordsReport | ImportReport) -> dict[str, object]:
    """The same, for machines."""
    return {
        "name": report.name, "sequence": report.sequence, "seconds": report.seconds, "slices": report.slices,
        "resumed": report.resumed, "workers": report.workers, "direct": report.direct,
    }  # fmt: skip


def _show_records(report: RecordsReport, json: bool) -> None:
    from headrace.cli.output import print_facts, print_json
    from headrace.units import format_bytes

    manifest = report.manifest
    if json:
        print_json({**manifest, **_work(report), "ignored_files": report.ignored_files, "bad": report.bad_shown})
        return
    corpus = manifest["corpus"]
    speed = manifest["bytes"] / report.seconds if report.seconds > 0 else 0.0
    facts = {
        "dataset": report.name,
        "corpus": f"{corpus['description']}: {corpus['files']:,} files",
        "records": f"{manifest['records']:,}, {format_bytes(manifest['bytes'])}",
        "fields": ", ".join(f"{kind or 'without suffix'} {count:,}" for kind, count in manifest["kinds"].items()),
        **_how(report, f"{format_bytes(round(speed))}/s"),
    }
    noticed = {
        "records that cannot be read, left out": corpus["bad_records"],
        "files that are no tars, left out": report.ignored_files,
    }
    facts.update({what: f"{count:,}" for what, count in noticed.items() if count})
    for shown in report.bad_shown:
        print(f"left out: {shown}", file=sys.stderr)
    print_facts(facts)


def _show_tokens(report: ImportReport, json: bool) -> None:
    from headrace.cli.output import print_facts, print_json

    if json:
        found = {"documents": report.documents, "tokens": report.tokens, "dtype": report.dtype}
        print_json({**found, "tokens_sha256": report.tokens_sha256, **_work(report)})
        return
    speed = report.tokens / report.seconds if report.seconds > 0 else 0.0
    print_facts(
        {
            "dataset": report.name,
            "documents": f"{report.documents:,}",
            "tokens": f"{report.tokens:,} of {report.dtype}",
            **_how(report, f"{speed:,.0f} tokens/s"),
        }
    )


def _show(report: IngestReport, json: bool) -> None:
    from headrace.cli.output import print_facts, print_json
    from headrace.units import format_bytes

    manifest = report.manifest
    corpus = manifest.corpus
    if json:
        print_json({**vars(manifest), **_work(report), "ignored_files": report.ignored_files, "bad": report.bad_shown})
        return
    speed = manifest.tokens / report.seconds if report.seconds > 0 else 0.0
    facts = {
        "dataset": report.name,
        "corpus": f"{corpus['description']}: {corpus['files']:,} files, {format_bytes(corpus['text_bytes'])} of text",
        "documents": f"{manifest.documents:,}",
        "tokens": f"{manifest.tokens:,} of {manifest.dtype}, vocabulary {manifest.vocabulary:,}",
        "end of document": f"{manifest.end_of_document} = {manifest.end_of_document_id}",
        **_how(report, f"{speed:,.0f} tokens/s"),
    }
    noticed = {
        "records that cannot be read, left out": corpus["bad_records"],
        "documents with bytes that are not UTF-8, replaced": corpus["replaced_documents"],
        "empty documents, left out": corpus["empty_documents"],
        "files of other kinds, left out": report.ignored_files,
    }
    for what, count in noticed.items():
        if count:
            facts[what] = f"{count:,}"
    for shown in report.bad_shown:
        print(f"left out: {shown}", file=sys.stderr)
    print_facts(facts)


class _Progress:
    """The bar of all commands; where there is none, a line at the begin of each phase, too."""

    def __init__(self) -> None:
        from headrace.cli.progress import Progress

        self._progress = Progress("reading the corpus")
        self._phase = ""

    def __enter__(self) -> _Progress:
        self._progress.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.__exit__(*exc)

    @property
    def read(self) -> bool:
        """Something was read."""
        return self._phase not in ("", "tokenizer")

    def say(self, line: str) -> None:
        self._progress.say(line)

    def show(self, now: IngestProgress) -> None:
        from headrace.dataset.ingestion.progress import describe_progress

        self._progress.show(now.fraction, describe_progress(now), now=now.phase != self._phase)
        self._phase = now.phase
