"""Datasets: text to tokens in a volume, and the order in which training sees them.

ingestion/     files and URLs to tokens and records, on all cores
tokens/        the token stream, and the samples that it is
records/       bytes by number and key, in batches ahead of time
order/         the order of samples, and where a loader stands in it
decoding/      what becomes of records, beside the loop that trains
feed/          batches of tokens and of records ahead of time
staging.py     a copy on a medium of this node, made behind a loader
inspect.py     what a volume has of datasets; is it all there

Names are imported when used: reading tokens needs no tokenizer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.dataset.feed.feed import Feed as Feed
    from headrace.dataset.feed.feed import FeedBatch as FeedBatch
    from headrace.dataset.feed.feed import FeedMetrics as FeedMetrics
    from headrace.dataset.feed.feed import FeedOptions as FeedOptions
    from headrace.dataset.feed.feed import WindowFeed as WindowFeed
    from headrace.dataset.feed.records import RecordFeed as RecordFeed
    from headrace.dataset.feed.records import RecordFeedBatch as RecordFeedBatch
    from headrace.dataset.feed.records import RecordFeedOptions as RecordFeedOptions
    from headrace.dataset.ingestion.corpus import Corpus as Corpus
    from headrace.dataset.ingestion.corpus import CorpusOptions as CorpusOptions
    from headrace.dataset.ingestion.corpus import open_corpus as open_corpus
    from headrace.dataset.ingestion.megatron import ImportReport as ImportReport
    from headrace.dataset.ingestion.megatron import import_megatron as import_megatron
    from headrace.dataset.ingestion.megatron import megatron_prefix as megatron_prefix
    from headrace.dataset.ingestion.progress import IngestProgress as IngestProgress
    from headrace.dataset.ingestion.records import RecordsReport as RecordsReport
    from headrace.dataset.ingestion.records import ingest_records as ingest_records
    from headrace.dataset.ingestion.records import open_records as open_records
    from headrace.dataset.ingestion.run import WorkOptions as WorkOptions
    from headrace.dataset.ingestion.text import IngestOptions as IngestOptions
    from headrace.dataset.ingestion.text import IngestReport as IngestReport
    from headrace.dataset.ingestion.text import ingest as ingest
    from headrace.dataset.ingestion.tokenizer import TextTokenizer as TextTokenizer
    from headrace.dataset.order.mixture import GlobalOrder as GlobalOrder
    from headrace.dataset.order.mixture import Mixture as Mixture
    from headrace.dataset.order.records import RecordState as RecordState
    from headrace.dataset.order.sampler import Sampler as Sampler
    from headrace.dataset.order.state import LoaderState as LoaderState
    from headrace.dataset.records.ahead import AheadMetrics as AheadMetrics
    from headrace.dataset.records.ahead import AheadOptions as AheadOptions
    from headrace.dataset.records.ahead import RecordsAhead as RecordsAhead
    from headrace.dataset.records.npz import npz_array as npz_array
    from headrace.dataset.records.records import RecordBatch as RecordBatch
    from headrace.dataset.records.records import Records as Records
    from headrace.dataset.staging import StageOptions as StageOptions
    from headrace.dataset.staging import StageProgress as StageProgress
    from headrace.dataset.staging import StageReport as StageReport
    from headrace.dataset.staging import StageStatus as StageStatus
    from headrace.dataset.staging import Staging as Staging
    from headrace.dataset.staging import drop_stage as drop_stage
    from headrace.dataset.staging import stage as stage
    from headrace.dataset.staging import stages as stages
    from headrace.dataset.tokens.idx import Index as Index
    from headrace.dataset.tokens.packs import Packing as Packing
    from headrace.dataset.tokens.packs import PackManifest as PackManifest
    from headrace.dataset.tokens.packs import PackOptions as PackOptions
    from headrace.dataset.tokens.packs import pack_stream as pack_stream
    from headrace.dataset.tokens.samples import open_samples as open_samples
    from headrace.dataset.tokens.segments import Segments as Segments
    from headrace.dataset.tokens.stream import Manifest as Manifest
    from headrace.dataset.tokens.stream import TokenStream as TokenStream

#: Public name -> the module that defines it. Listed in the `if` above as well, for type checkers.
_HOMES = {
    "AheadMetrics": "records.ahead",
    "AheadOptions": "records.ahead",
    "Corpus": "ingestion.corpus",
    "CorpusOptions": "ingestion.corpus",
    "Feed": "feed.feed",
    "FeedBatch": "feed.feed",
    "FeedMetrics": "feed.feed",
    "FeedOptions": "feed.feed",
    "GlobalOrder": "order.mixture",
    "ImportReport": "ingestion.megatron",
    "Index": "tokens.idx",
    "IngestOptions": "ingestion.text",
    "IngestProgress": "ingestion.progress",
    "IngestReport": "ingestion.text",
    "LoaderState": "order.state",
    "Manifest": "tokens.stream",
    "Mixture": "order.mixture",
    "PackManifest": "tokens.packs",
    "PackOptions": "tokens.packs",
    "Packing": "tokens.packs",
    "RecordBatch": "records.records",
    "RecordFeed": "feed.records",
    "RecordFeedBatch": "feed.records",
    "RecordFeedOptions": "feed.records",
    "RecordState": "order.records",
    "Records": "records.records",
    "RecordsAhead": "records.ahead",
    "RecordsReport": "ingestion.records",
    "Sampler": "order.sampler",
    "Segments": "tokens.segments",
    "StageOptions": "staging",
    "StageProgress": "staging",
    "StageReport": "staging",
    "StageStatus": "staging",
    "Staging": "staging",
    "TextTokenizer": "ingestion.tokenizer",
    "TokenStream": "tokens.stream",
    "WindowFeed": "feed.feed",
    "WorkOptions": "ingestion.run",
    "drop_stage": "staging",
    "import_megatron": "ingestion.megatron",
    "ingest": "ingestion.text",
    "ingest_records": "ingestion.records",
    "megatron_prefix": "ingestion.megatron",
    "npz_array": "records.npz",
    "open_corpus": "ingestion.corpus",
    "open_records": "ingestion.records",
    "open_samples": "tokens.samples",
    "pack_stream": "tokens.packs",
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
