"""Datasets: text to tokens in a volume, and the order in which training sees them.

corpus.py              documents out of files, as a stream
places.py readers.py columns.py    files and URLs; text, lines, Parquet, Arrow
tokenizer.py           text to tokens
ingest_text.py         a corpus into a volume, as tokens
ingest_megatron.py     a pair of Megatron's files, as it is
records_ingest.py archives.py    files and tars into a volume, as records
records.py records_index.py records_lookup.py    records, found by number and key, read in batches
records_ahead.py npz.py    batches of records ahead of time, decoded in threads; arrays in them
ingest_run.py slices.py work.py    what is read at a time; what of it is in the volume already
pool.py worker.py output.py progress.py    who reads it, on all cores
hire.py channel.py     where workers come from; what they and the ingest tell each other
ray_hire.py ray_bridge.py    workers of a Ray cluster
idx.py stream.py       the token stream: Megatron's index, windows of tokens
packing.py packs.py    documents that share a sample: which, and stored beside the stream
samples.py segments.py what a sample is; where documents begin in it
sampler.py mixture.py  the order: a permutation that is computed; several datasets in shares
state.py feed.py       where a loader stands; batches ahead of time
chosen.py              batches that somebody else chooses
staging.py             a copy on a medium of this node, made behind a loader
inspect.py             what a volume has of datasets; is it all there

Names are imported when used: reading tokens needs no tokenizer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.dataset.corpus import Corpus as Corpus
    from headrace.dataset.corpus import CorpusOptions as CorpusOptions
    from headrace.dataset.corpus import open_corpus as open_corpus
    from headrace.dataset.feed import Feed as Feed
    from headrace.dataset.feed import FeedBatch as FeedBatch
    from headrace.dataset.feed import FeedMetrics as FeedMetrics
    from headrace.dataset.feed import FeedOptions as FeedOptions
    from headrace.dataset.feed import WindowFeed as WindowFeed
    from headrace.dataset.idx import Index as Index
    from headrace.dataset.ingest_megatron import ImportReport as ImportReport
    from headrace.dataset.ingest_megatron import import_megatron as import_megatron
    from headrace.dataset.ingest_megatron import megatron_prefix as megatron_prefix
    from headrace.dataset.ingest_run import WorkOptions as WorkOptions
    from headrace.dataset.ingest_text import IngestOptions as IngestOptions
    from headrace.dataset.ingest_text import IngestReport as IngestReport
    from headrace.dataset.ingest_text import ingest as ingest
    from headrace.dataset.mixture import GlobalOrder as GlobalOrder
    from headrace.dataset.mixture import Mixture as Mixture
    from headrace.dataset.packs import Packing as Packing
    from headrace.dataset.packs import PackManifest as PackManifest
    from headrace.dataset.packs import PackOptions as PackOptions
    from headrace.dataset.packs import pack_stream as pack_stream
    from headrace.dataset.progress import IngestProgress as IngestProgress
    from headrace.dataset.records import RecordBatch as RecordBatch
    from headrace.dataset.records import Records as Records
    from headrace.dataset.records_ahead import AheadMetrics as AheadMetrics
    from headrace.dataset.records_ahead import AheadOptions as AheadOptions
    from headrace.dataset.records_ahead import RecordsAhead as RecordsAhead
    from headrace.dataset.records_ingest import RecordsReport as RecordsReport
    from headrace.dataset.records_ingest import ingest_records as ingest_records
    from headrace.dataset.records_ingest import open_records as open_records
    from headrace.dataset.sampler import Sampler as Sampler
    from headrace.dataset.samples import open_samples as open_samples
    from headrace.dataset.segments import Segments as Segments
    from headrace.dataset.staging import StageOptions as StageOptions
    from headrace.dataset.staging import StageProgress as StageProgress
    from headrace.dataset.staging import StageReport as StageReport
    from headrace.dataset.staging import StageStatus as StageStatus
    from headrace.dataset.staging import Staging as Staging
    from headrace.dataset.staging import drop_stage as drop_stage
    from headrace.dataset.staging import stage as stage
    from headrace.dataset.staging import stages as stages
    from headrace.dataset.state import LoaderState as LoaderState
    from headrace.dataset.stream import Manifest as Manifest
    from headrace.dataset.stream import TokenStream as TokenStream
    from headrace.dataset.tokenizer import TextTokenizer as TextTokenizer

#: Public name -> the module that defines it. Listed in the `if` above as well, for type checkers.
_HOMES = {
    "AheadMetrics": "records_ahead",
    "AheadOptions": "records_ahead",
    "Corpus": "corpus",
    "CorpusOptions": "corpus",
    "Feed": "feed",
    "FeedBatch": "feed",
    "FeedMetrics": "feed",
    "FeedOptions": "feed",
    "GlobalOrder": "mixture",
    "ImportReport": "ingest_megatron",
    "Index": "idx",
    "IngestOptions": "ingest_text",
    "IngestProgress": "progress",
    "IngestReport": "ingest_text",
    "LoaderState": "state",
    "Manifest": "stream",
    "Mixture": "mixture",
    "PackManifest": "packs",
    "PackOptions": "packs",
    "Packing": "packs",
    "RecordBatch": "records",
    "Records": "records",
    "RecordsAhead": "records_ahead",
    "RecordsReport": "records_ingest",
    "Sampler": "sampler",
    "Segments": "segments",
    "StageOptions": "staging",
    "StageProgress": "staging",
    "StageReport": "staging",
    "StageStatus": "staging",
    "Staging": "staging",
    "TextTokenizer": "tokenizer",
    "TokenStream": "stream",
    "WindowFeed": "feed",
    "WorkOptions": "ingest_run",
    "drop_stage": "staging",
    "import_megatron": "ingest_megatron",
    "ingest": "ingest_text",
    "ingest_records": "records_ingest",
    "megatron_prefix": "ingest_megatron",
    "open_corpus": "corpus",
    "open_records": "records_ingest",
    "open_samples": "samples",
    "pack_stream": "packs",
    "stage": "staging",
    "stages": "staging",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'headrace.dataset' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headrace.dataset.{home}"), name)


def __dir__() -> list[str]:
    return __all__
