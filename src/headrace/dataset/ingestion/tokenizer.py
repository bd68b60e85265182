"""Text to token numbers: a byte-level BPE trained on the corpus, or the caller's `tokenizer.json`.

The `tokenizers` library does the work on its own threads. What it would do beyond that is switched off, for a corpus is
not a prompt: no truncation or padding that a `tokenizer.json` asks for, no tokens around a text, and text that spells a
special token (`<|endoftext|>` in a page about tokenizers) is encoded as the text that it is. The end of a document is
marked by the ingest alone, with one token that is known by number.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.dataset.tokens.stream import Manifest
from headrace.errors import DatasetError, UsageError
from headrace.units import MIB, format_bytes

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT = "<|endoftext|>"
#: Names by which well-known tokenizers call the end of a document. One of them in a `tokenizer.json` is taken, two are
#: a question that only the caller can answer.
KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "<|endofdocument|>", "</s>", "<eos>", "<|end▁of▁sentence|>")
#: Byte-level BPE begins with one token for every byte, and the end of a document.
MIN_VOCABULARY = 257
MAX_VOCABULARY = 1 << 24
#: A `tokenizer.json` is read whole; real ones have up to some 40 MB.
MAX_TOKENIZER_BYTES = 512 * MIB

#: What tokens are stored as. Megatron's index knows no uint32, so large vocabularies use int32.
Tokens: TypeAlias = "npt.NDArray[np.uint16] | npt.NDArray[np.int32]"


class TextTokenizer:
    """A tokenizer and how it marks the end of a document. Made by `train_tokenizer` or `load_tokenizer`."""

    def __init__(self, engine: tokenizers.Tokenizer, json: bytes, end_of_document: str, end_id: int) -> None:
        #: `tokenizer.json`, byte for byte as trained or given.
        self.json = json
        self.end_of_document = end_of_document
        self.end_id = end_id
        #: One more than the largest number that can come out.
        self.vocabulary = max(engine.get_vocab(with_added_tokens=True).values()) + 1
        self.dtype = token_dtype(self.vocabulary)
        engine.no_truncation()
        engine.no_padding()
        engine.encode_special_tokens = True
        self._engine = engine

    @property
    def sha256(self) -> str:
        """Of `json`."""
        return hashlib.sha256(self.json).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text, without any around them: `dtype[length]` each."""
        encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    def manifest(
        self, *, documents: int, tokens: int, dtype: np.dtype[Any], tokens_sha256: str, corpus: dict[str, Any]
    ) -> Manifest:
        """Of tokens that it made."""
        return Manifest(
            documents=documents,
            tokens=tokens,
            dtype=dtype.name,
            tokens_sha256=tokens_sha256,
            tokenizer_sha256=self.sha256,
            vocabulary=self.vocabulary,
            end_of_document=self.end_of_document,
            end_of_document_id=self.end_id,
            corpus=corpus,
            headrace=version("headrace"),
        )

    def decode(self, tokens: npt.ArrayLike) -> str:
        """Text of a row of tokens; the end of a document shows as its name."""
        return str(self._engine.decode(np.asarray(tokens).tolist(), skip_special_tokens=False))


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """uint16 where every number fits, else int32."""
    return np.dtype("<u2") if vocabulary <= 1 << 16 else np.dtype("<i4")


def train_tokenizer(texts: Iterator[str], vocab_size: int = 8192) -> TextTokenizer:
    """Byte-level BPE of `vocab_size` tokens at most (fewer where the texts hold no more pairs); the same texts give the
    same bytes.

    `UsageError`: a vocabulary that cannot be. `DatasetError`: the `tokenizers` library is missing.
    """
    if not MIN_VOCABULARY <= vocab_size <= MAX_VOCABULARY:
        raise UsageError(
            "vocab_size is out of range", expected=f"{MIN_VOCABULARY} to {MAX_VOCABULARY}", found=str(vocab_size)
        )
    library = _library()
    level = library.pre_tokenizers.ByteLevel
    engine = library.Tokenizer(library.models.BPE())
    engine.pre_tokenizer = level(add_prefix_space=False)
    engine.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(level.alphabet()),
        show_progress=False,
    )
    _interruptible(lambda: engine.train_from_iterator(texts, trainer))
    json = engine.to_str().encode()
    return TextTokenizer(engine, json, END_OF_DOCUMENT, engine.token_to_id(END_OF_DOCUMENT))


def _interruptible(call: Callable[[], object]) -> None:
    """Run `call` so that Ctrl-C is heard. A minute of training is one native call, during which Python sees no signal.

    The library cannot be told to stop, so an interrupted call is left behind, on a daemon thread.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="headrace-train-tokenizer", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if failures:
        raise failures[0]


def load_tokenizer(path: str | os.PathLike[str], end_of_document: str | None = None) -> TextTokenizer:
    """The tokenizer in a `tokenizer.json`.

    `end_of_document`: the token that ends a document; None takes the one of `KNOWN_ENDS` that the file has.
    `DatasetError`: no such file, not a tokenizer, no such token, or not exactly one known.
    """
    where = str(path)
    try:
        with Path(path).open("rb") as file:
            json = file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        found = error.strerror or type(error).__name__
        raise DatasetError("the tokenizer cannot be read", where=where, found=found) from error
    if len(json) > MAX_TOKENIZER_BYTES:
        raise DatasetError("not a tokenizer", where=where, expected=f"at most {format_bytes(MAX_TOKENIZER_BYTES)}")
    return parse_tokenizer(json, where, end_of_document)


def parse_tokenizer(json: bytes, where: str, end_of_document: str | None = None) -> TextTokenizer:
    """As `load_tokenizer`, from the bytes of the file; `where` is for messages."""
    library = _library()
    try:
        engine = library.Tokenizer.from_str(json.decode("utf-8"))
    # The library raises bare Exception for whatever it cannot read.
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise DatasetError("not a tokenizer.json that can be used", where=where, found=first_line) from error
    if not engine.get_vocab(with_added_tokens=True):
        raise DatasetError("the tokenizer's vocabulary is empty", where=where)
    name = end_of_document if end_of_document is not None else _known_end(engine, where)
    end_id = engine.token_to_id(name)
    if end_id is None:
        raise DatasetError(f"the tokenizer has no token {name!r}", where=where, next_step="name one: --end-of-document")
    return TextTokenizer(engine, json, name, end_id)


def _known_end(engine: tokenizers.Tokenizer, where: str) -> str:
    known = [name for name in KNOWN_ENDS if engine.token_to_id(name) is not None]
    if len(known) != 1:
        raise DatasetError(
            "the tokenizer does not say which token ends a document",
            where=where,
            expected="one of " + " ".join(KNOWN_ENDS),
            found=" ".join(known) or "none of them",
            next_step="name it: --end-of-document TOKEN",
        )
    return known[0]


def library_version() -> str:
    """Another version may give other tokens."""
    return str(_library().__version__)


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise DatasetError(
            "tokenizing needs the tokenizers library", next_step="pip install 'headrace[dataset]'"
        ) from None
    return tokenizers
