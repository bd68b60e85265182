"""The index against an independent writer and reader of Megatron's layout, and against damage."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataset.tokens.idx import Index, encode_idx, parse_idx, parse_idx_header
from headrace.errors import DatasetError

U16, I32 = np.dtype("<u2"), np.dtype("<i4")


def written_plainly(dtype: np.dtype, lengths: list[int], documents: list[int] | None = None) -> bytes:
    """The same layout, written one number after another."""
    data = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", {"uint16": 8, "int32": 4}[dtype.name])
    documents = list(range(len(lengths) + 1)) if documents is None else documents
    data += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(documents))
    for length in lengths:
        data += struct.pack("<i", length)
    pointer = 0
    for length in lengths:
        data += struct.pack("<q", pointer)
        pointer += length * dtype.itemsize
    for document in documents:
        data += struct.pack("<q", document)
    return data


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.sampled_from([U16, I32]), st.integers(1, 7))
def test_written_and_read_as_the_plain_writer_does(lengths: list[int], dtype: np.dtype, block: int) -> None:
    ours = b"".join(encode_idx(dtype, np.array(lengths, np.int32), block))
    assert ours == written_plainly(dtype, lengths)
    index = parse_idx(ours, "x.idx", sum(lengths) * dtype.itemsize)
    assert index.dtype == dtype
    assert index.lengths.tolist() == lengths
    assert index.documents.tolist() == list(range(len(lengths) + 1))
    assert index.document_starts().tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert index.token_count == sum(lengths)


def test_read_as_a_memory_map(tmp_path: Path) -> None:
    """Field by field where Megatron's reader looks for it: `np.frombuffer` over a `np.memmap`."""
    lengths = np.array([3, 0, 70_000, 5], np.int32)
    path = tmp_path / "a.idx"
    path.write_bytes(b"".join(encode_idx(U16, lengths)))
    mapped = memoryview(np.memmap(path, mode="r"))
    assert bytes(mapped[:9]) == b"MMIDIDX\x00\x00"
    assert np.frombuffer(mapped, "<u8", 1, 9)[0] == 1
    assert mapped[17] == 8
    assert np.frombuffer(mapped, "<u8", 2, 18).tolist() == [4, 5]
    assert np.frombuffer(mapped, np.int32, 4, 34).tolist() == lengths.tolist()
    assert np.frombuffer(mapped, np.int64, 4, 34 + 16).tolist() == [0, 6, 6, 140_006]
    assert np.frombuffer(mapped, np.int64, 5, 34 + 16 + 32).tolist() == [0, 1, 2, 3, 4]
    assert len(mapped) == 34 + 16 + 32 + 40


def test_documents_of_several_sequences_and_modes_are_read() -> None:
    data = written_plainly(I32, [2, 3, 4], [0, 2, 2, 3])
    for tail in (b"", b"\x00\x01\x00"):
        index = parse_idx(data + tail, "x.idx", 36)
        assert index.document_starts().tolist() == [0, 5, 5, 9]


GOOD = written_plainly(U16, [3, 1, 2])


def _patched(offset: int, form: str, value: int) -> bytes:
    data = bytearray(GOOD)
    struct.pack_into(form, data, offset, value)
    return bytes(data)


BAD = {
    "nothing": (b"", "too short"),
    "a header cut off": (GOOD[:33], "too short"),
    "cut off": (GOOD[:-1], "wrong size"),
    "a byte more": (GOOD + b"x", "wrong size"),
    "magic": (b"MMIDIDY" + GOOD[7:], "does not begin as one"),
    "version": (_patched(9, "<Q", 2), "version"),
    "floats": (_patched(17, "<B", 7), "float32"),
    "dtype": (_patched(17, "<B", 99), "unknown"),
    "sequences": (_patched(18, "<Q", 4), "wrong size"),
    "2^64 - 1 sequences": (_patched(18, "<Q", 2**64 - 1), "wrong size"),
    "documents": (_patched(26, "<Q", 2**63), "wrong size"),
    "negative length": (_patched(34, "<i", -1), "negative length"),
    "length": (_patched(38, "<i", 5), "wrong pointer"),
    "pointer": (_patched(34 + 12 + 8, "<q", 8), "wrong pointer"),
    "first document": (_patched(34 + 36, "<q", 1), "document index"),
    "last document": (_patched(34 + 36 + 24, "<q", 2), "document index"),
    "documents fall": (_patched(34 + 36 + 8, "<q", 3), "document index"),
    "no documents": (written_plainly(U16, [], []), "no document index"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(name: str) -> None:
    data, say = BAD[name]
    with pytest.raises(DatasetError, match=say) as caught:
        parse_idx(data, "x.idx", 12)
    assert "x.idx" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_index_of_other_tokens_is_refused() -> None:
    with pytest.raises(DatasetError, match="does not fit its"):
        parse_idx(GOOD, "x.idx", 14)


@settings(max_examples=300)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_a_changed_byte_is_found(place: int, change: int) -> None:
    """Every byte says something that another says too, but which sequences the documents in the middle begin with."""
    data = bytearray(GOOD)
    data[place] ^= change
    try:
        index = parse_idx(bytes(data), "x.idx", 12)
    except DatasetError:
        return
    assert 34 + 36 + 8 <= place < 34 + 36 + 24
    assert index.lengths.tolist() == [3, 1, 2]
    assert index.documents.tolist() == sorted(index.documents.tolist()) != [0, 1, 2, 3]


@settings(max_examples=300)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_give_an_index_or_an_error(data: bytes, headed: bool) -> None:
    if headed:
        data = GOOD[:18] + data
    try:
        index = parse_idx(data, "x.idx")
    except DatasetError:
        return
    assert isinstance(index, Index)


def test_a_huge_count_allocates_nothing() -> None:
    # 2^60 sequences in a file that says to be as long: the header alone must not make arrays.
    data = _patched(18, "<Q", 1 << 58)
    header = parse_idx_header(data, 34 + 12 * (1 << 58) + 8 * 4, "x.idx")
    assert header.sequence_count == 1 << 58
