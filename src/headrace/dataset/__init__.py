"""Datasets: text to tokens in a volume, and the order in which training sees them.

corpus.py readers.py   documents out of files, as a stream
tokenizer.py           text to tokens
ingest_text.py         a corpus into a volume, in one commit
idx.py stream.py       the token stream: Megatron's index, windows of tokens
sampler.py             the order: a permutation that is computed
state.py feed.py       where a loader stands; batches ahead of time

Names are imported when used: reading tokens needs no tokenizer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.dataset.corpus import Corpus as Corpus
    from headrace.dataset.corpus import CorpusOptions as CorpusOptions
    from headrace.dataset.corpus import open_corpus as open_corpus
    from headrace.dataset.feed import FeedBatch as FeedBatch
    from headrace.dataset.feed import FeedMetrics as FeedMetrics
    from headrace.dataset.feed import FeedOptions as FeedOptions
    from headrace.dataset.feed import WindowFeed as WindowFeed
    from headrace.dataset.idx import Index as Index
    from headrace.dataset.ingest_text import IngestOptions as IngestOptions
    from headrace.dataset.ingest_text import IngestProgress as IngestProgress
    from headrace.dataset.ingest_text import IngestReport as IngestReport
    from headrace.dataset.ingest_text import ingest as ingest
    from headrace.dataset.sampler import Sampler as Sampler
    from headrace.dataset.state import LoaderState as LoaderState
    from headrace.dataset.stream import Manifest as Manifest
    from headrace.dataset.stream import TokenStream as TokenStream
    from headrace.dataset.tokenizer import TextTokenizer as TextTokenizer

#: Public name -> the module that defines it. Listed in the `if` above as well, for type checkers.
_HOMES = {
    "Corpus": "corpus",
    "CorpusOptions": "corpus",
    "FeedBatch": "feed",
    "FeedMetrics": "feed",
    "FeedOptions": "feed",
    "Index": "idx",
    "IngestOptions": "ingest_text",
    "IngestProgress": "ingest_text",
    "IngestReport": "ingest_text",
    "LoaderState": "state",
    "Manifest": "stream",
    "Sampler": "sampler",
    "TextTokenizer": "tokenizer",
    "TokenStream": "stream",
    "WindowFeed": "feed",
    "ingest": "ingest_text",
    "open_corpus": "corpus",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'headrace.dataset' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headrace.dataset.{home}"), name)


def __dir__() -> list[str]:
    return __all__
