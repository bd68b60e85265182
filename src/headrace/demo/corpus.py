"""The default corpus: text that every machine with Python has, its standard library and the documentation in it."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Corpus:
    documents: int
    text_bytes: int


def write_default_corpus(path: Path, limit_bytes: int) -> Corpus:
    """One JSON line a source file, `{"text": ...}`, until `limit_bytes` of text; the same Python gives the same lines.

    The order is that of a hash of the names, so that a small corpus is a fair part of the whole. `UsageError` where
    this Python has no sources of its library.
    """
    library = Path(sysconfig.get_path("stdlib"))
    outside = {"site-packages", "dist-packages", "__pycache__", "lib2to3"}
    names = [file.relative_to(library) for file in library.rglob("*.py") if not outside & set(file.parts)]
    names.sort(key=lambda name: (hashlib.sha256(str(name).encode()).digest(), name))
    documents = text_bytes = 0
    with path.open("w", encoding="utf-8") as output:
        for name in names:
            try:
                text = (library / name).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                # Some files of the library's own tests are invalid on purpose.
                continue
            if not text.strip():
                continue
            output.write(json.dumps({"text": text}) + "\n")
            documents += 1
            text_bytes += len(text.encode())
            if text_bytes >= limit_bytes:
                break
    if not documents:
        raise UsageError(
            "this Python has no sources of its standard library", where=str(library), next_step="give a --corpus"
        )
    return Corpus(documents=documents, text_bytes=text_bytes)
