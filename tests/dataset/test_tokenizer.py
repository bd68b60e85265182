"""Tokenizers: trained the same every time, taken as given, and never more than text to tokens."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace.dataset.ingestion.tokenizer import END_OF_DOCUMENT, load_tokenizer, token_dtype, train_tokenizer
from headrace.errors import DatasetError, UsageError
from tests.dataset.corpora import texts


def test_the_same_texts_train_the_same_tokenizer() -> None:
    first, second = (train_tokenizer(iter(texts(300)), 310) for _ in range(2))
    assert first.json == second.json
    assert first.sha256 == second.sha256
    assert first.vocabulary == 310
    assert train_tokenizer(iter(texts(300, seed=2)), 310).json != first.json


def test_any_text_comes_back() -> None:
    tokenizer = train_tokenizer(iter(texts(50)), 300)
    for text in ("", "Grüße, 水 and \x00\r\n\t", "\U0001f30a" * 50, f"a page about {END_OF_DOCUMENT}", *texts(20, 3)):
        (tokens,) = tokenizer.encode([text])
        assert tokens.dtype == np.uint16
        assert tokenizer.decode(tokens) == text
        # Text that spells the token is text: only the ingest ends a document.
        assert tokenizer.end_id not in tokens.tolist()


def test_a_given_tokenizer_is_taken_byte_for_byte(tmp_path: Path) -> None:
    trained = train_tokenizer(iter(texts(50)), 300)
    given = json.dumps(json.loads(trained.json), indent=3).encode()
    (tmp_path / "tokenizer.json").write_bytes(given)
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.json == given
    assert (loaded.end_id, loaded.end_of_document) == (trained.end_id, END_OF_DOCUMENT)
    text = texts(1, 9)[0]
    assert loaded.encode([text])[0].tolist() == trained.encode([text])[0].tolist()


def _with_prompt_habits(path: Path, ends: list[str]) -> None:
    """A tokenizer that cuts, pads and frames what it encodes, as those of chat models do."""
    fields: dict[str, Any] = json.loads(train_tokenizer(iter(texts(50)), 300).json)
    engine = Tokenizer.from_str(json.dumps(fields).replace(END_OF_DOCUMENT, "<frame>"))
    engine.add_special_tokens(ends)
    engine.enable_truncation(5)
    engine.enable_padding(length=7)
    from tokenizers.processors import TemplateProcessing

    engine.post_processor = TemplateProcessing(single="<frame> $A <frame>", special_tokens=[("<frame>", 0)])
    engine.save(str(path))


def test_truncation_padding_and_frames_are_switched_off(tmp_path: Path) -> None:
    _with_prompt_habits(tmp_path / "t.json", ["</s>"])
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert tokenizer.end_of_document == "</s>"
    long, short = "water to a turbine " * 40, "a"
    encoded = tokenizer.encode([long, short])
    assert tokenizer.decode(encoded[0]) == long
    assert tokenizer.decode(encoded[1]) == short
    assert 0 not in encoded[0].tolist()


@pytest.mark.parametrize(
    ("ends", "given", "say"),
    [
        ([], None, "none of them"),
        (["</s>", "<|endoftext|>"], None, "<|endoftext|> </s>"),
        (["</s>"], "<|eot|>", "no token '<|eot|>'"),
    ],
)
def test_the_end_of_a_document_must_be_plain(tmp_path: Path, ends: list[str], given: str | None, say: str) -> None:
    _with_prompt_habits(tmp_path / "t.json", ends)
    with pytest.raises(DatasetError) as caught:
        load_tokenizer(tmp_path / "t.json", given)
    assert say in str(caught.value)
    assert "--end-of-document" in str(caught.value)
    assert "t.json" in str(caught.value)


def test_two_known_ends_and_a_choice(tmp_path: Path) -> None:
    _with_prompt_habits(tmp_path / "t.json", ["</s>", "<|endoftext|>"])
    assert load_tokenizer(tmp_path / "t.json", "</s>").end_of_document == "</s>"


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"version": "1.0", "model": {"type": "BPE"}}'])
def test_a_broken_file_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DatasetError, match=r"not a tokenizer\.json") as caught:
        load_tokenizer(tmp_path / "t.json")
    assert "t.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_an_empty_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="No such file"):
        load_tokenizer(tmp_path / "none.json")
    Tokenizer(models.BPE()).save(str(tmp_path / "t.json"))
    with pytest.raises(DatasetError, match="vocabulary is empty"):
        load_tokenizer(tmp_path / "t.json")


def test_numbers_choose_the_dtype(tmp_path: Path) -> None:
    assert token_dtype(1 << 16) == np.uint16
    assert token_dtype((1 << 16) + 1) == np.int32
    # Numbers count, not tokens: a vocabulary may have gaps.
    engine = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "far": 70_000}, unk_token="a"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert tokenizer.vocabulary == 70_001
    (tokens,) = tokenizer.encode(["far a far"])
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [70_000, 0, 70_000]


@pytest.mark.parametrize("size", [0, 256, 1 << 25])
def test_a_vocabulary_that_cannot_be(size: int) -> None:
    with pytest.raises(UsageError, match="vocab_size"):
        train_tokenizer(iter(["a"]), size)


def test_ctrl_c_is_heard_while_the_library_trains() -> None:
    # A few long words of random letters keep native training busy for minutes.
    program = """
import random, sys
from headrace.dataset.ingestion.tokenizer import train_tokenizer
letters = random.Random(1)
def corpus():
    for _ in range(4):
        yield "".join(letters.choices("abcdefghijklmnop", k=300_000))
    print("read", flush=True)
train_tokenizer(corpus(), 30_000)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "read\n"
        time.sleep(0.5)
        assert process.poll() is None, "training ended before it could be interrupted"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert "KeyboardInterrupt" in errors
