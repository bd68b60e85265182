"""safetensors headers: the library is the oracle in both directions; malformed ones are refused by name."""

import itertools
import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ModelError, UsageError
from headrace.model.dtypes import safetensors_dtype
from headrace.model.header import HEADER_LIMIT, build, parse, parse_prefix

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "float16",
    "uint32",
    "int32",
    "float32",
    "complex64",
    "float64",
    "int64",
    "uint64",
]


def split(file: bytes) -> tuple[bytes, int]:
    length = parse_prefix(file[:8], len(file))
    return file[8 : 8 + length], len(file)


def raw(header: object, data: int = 0) -> tuple[bytes, int]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return text, 8 + len(text) + data


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda n: n != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        min_size=1,
        max_size=6,
    ),
    st.none()
    | st.dictionaries(st.just('k"\\\x7f'), st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=1),
)
def test_headers_are_those_of_the_library(
    tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None
) -> None:
    arrays = {name: np.zeros(shape, dtype) for name, (dtype, shape) in tensors.items()}
    file = safetensors.numpy.save(arrays, metadata or None)
    prefix, header = build(((n, safetensors_dtype(a.dtype), a.shape) for n, a in arrays.items()), metadata or None)
    assert prefix == file[: len(prefix)]
    assert header.file_bytes == len(file)
    assert parse(*split(file)) == header


def test_an_empty_file_is_that_of_the_library() -> None:
    prefix, header = build([])
    assert prefix == safetensors.numpy.save({})
    assert parse(*split(prefix)) == header


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


MALFORMED = {
    "not JSON": (raw(b"{", 0), "not JSON"),
    "not UTF-8": (raw(b'{"\xff": 1}'), "not JSON"),
    "leading space": (raw(b" {}"), "begin with"),
    "a list": (raw([]), "begin with"),
    "deep": (raw(b'{"a":' + b"[" * 100_000), "not JSON"),
    "not a number": (raw(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,0]}}'), "not one"),
    "duplicate": (
        raw(b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}", 8),
        "one name",
    ),
    "hole in front": (raw({"a": entry(offsets=(8, 16))}, 16), "hole"),
    "hole between": (raw({"a": entry(), "b": entry(offsets=(12, 20))}, 20), "hole"),
    "overlap": (raw({"a": entry(), "b": entry(offsets=(4, 12))}, 12), "overlaps"),
    "data left over": (raw({"a": entry()}, 9), "fill the file"),
    "data missing": (raw({"a": entry()}, 7), "fill the file"),
    "wrong length": (raw({"a": entry(offsets=(0, 4))}, 4), "offsets of tensor"),
    "backwards": (raw({"a": entry(shape=(0,), offsets=(8, 0))}, 8), "offsets of tensor"),
    "unknown dtype": (raw({"a": entry(dtype="F31")}, 8), "not known"),
    "dtype no text": (raw({"a": entry(dtype=3)}, 8), "dtype of tensor"),
    "negative shape": (raw({"a": entry(shape=(-2,))}, 8), "shape of tensor"),
    "shape of booleans": (raw({"a": entry(shape=(True, 2))}, 8), "shape of tensor"),
    "shape of floats": (raw({"a": entry(shape=(2.0,))}, 8), "shape of tensor"),
    "huge shape": (raw({"a": entry(shape=(1 << 62, 4))}, 8), "offsets of tensor"),
    "huge offset": (raw({"a": entry(offsets=(1 << 64, (1 << 64) + 8))}, 8), "offsets of tensor"),
    "three offsets": (raw({"a": entry(offsets=(0, 8, 8))}, 8), "offsets of tensor"),
    "half a byte": (raw({"a": entry(dtype="F4", shape=(3,), offsets=(0, 1))}, 1), "whole bytes"),
    "extra field": (raw({"a": {**entry(), "x": 1}}, 8), "entry of tensor"),
    "metadata of numbers": (raw({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata a list": (raw({"__metadata__": ["a"]}), "__metadata__"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_headers_are_refused_by_name(case: str) -> None:
    (header, file_bytes), says = MALFORMED[case]
    with pytest.raises(ModelError, match=says):
        parse(header, file_bytes)


def test_the_length_of_the_header_is_bounded_before_it_is_read() -> None:
    with pytest.raises(ModelError, match="too long"):
        parse_prefix((HEADER_LIMIT + 1).to_bytes(8, "little"), 1 << 60)
    with pytest.raises(ModelError, match="longer than the file"):
        parse_prefix((93).to_bytes(8, "little"), 100)
    for short in (b"", b"\0" * 7):
        with pytest.raises(ModelError, match="too short"):
            parse_prefix(short, len(short))


def test_every_flipped_byte_is_refused_or_harmless() -> None:
    """Invariant: parse returns a Header whose tensors tile the file, or raises ModelError."""
    header, file_bytes = split(
        safetensors.numpy.save({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.int8)}, {"k": "v"})
    )
    for at, bit in itertools.product(range(len(header)), (0x01, 0x10, 0x80)):
        damaged = bytearray(header)
        damaged[at] ^= bit
        try:
            parsed = parse(bytes(damaged), file_bytes)
        except ModelError:
            continue
        assert parsed.file_bytes == file_bytes
        assert all(a.end == b.begin for a, b in itertools.pairwise(parsed.tensors))


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ([("__metadata__", "F32", (1,))], None),
        ([("a", "F31", (1,))], None),
        ([("a", "F32", (1,)), ("a", "F32", (1,))], None),
        ([("\ud800", "F32", (1,))], None),
        ([("a", "F32", (1,))], {"k": 1}),
    ],
)
def test_what_the_format_cannot_hold_is_refused(
    tensors: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    with pytest.raises(UsageError):
        build(tensors, metadata)
