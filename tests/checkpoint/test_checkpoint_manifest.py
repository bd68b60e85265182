"""A manifest survives the way there and back, and no damaged one is believed or ends in a traceback."""

import dataclasses
import json
import struct

import numpy as np
import pytest

from headrace.checkpoint.manifest import Manifest, ObjectEntry, Summary, TensorEntry, decode, decode_summary, encode
from headrace.errors import CheckpointFailed


def column(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def example() -> Manifest:
    """w: float32[4, 3] in two chunks of rows on two ranks; a scalar; one item of bytes."""
    prefix = "run/step-00000007"
    return Manifest(
        summary=Summary(run="run", step=7, created_unix=1.5, ranks=2, item_count=4, data_bytes=24 + 24 + 2 + 9),
        objects=(
            ObjectEntry(name=f"{prefix}/rank-00000.data", length_bytes=100),
            ObjectEntry(name=f"{prefix}/rank-00001.data", length_bytes=24),
        ),
        tensors=(
            TensorEntry(fqn="w", dtype="float32", shape=(4, 3), properties={"requires_grad": True}),
            TensorEntry(fqn="ü", dtype="bfloat16", shape=(), properties={}),
        ),
        blobs=("loader",),
        planner=["d", ["w", ["t", "model", 0]]],
        key=column(0, 0, 1, 2),
        object=column(0, 1, 0, 0),
        offset=column(0, 0, 64, 91),
        length=column(24, 24, 2, 9),
        chunk_offset=column(0, 0, 2, 0),
        chunk_size=column(2, 3, 2, 3),
    )


def equal(a: Manifest, b: Manifest) -> bool:
    return all(
        np.array_equal(getattr(a, f.name), getattr(b, f.name))
        if isinstance(getattr(a, f.name), np.ndarray)
        else getattr(a, f.name) == getattr(b, f.name)
        for f in dataclasses.fields(Manifest)
    )


def test_there_and_back() -> None:
    manifest = example()
    encoded = encode(manifest)
    assert equal(decode(encoded), manifest)
    assert equal(decode(memoryview(bytearray(encoded))), manifest)
    assert decode_summary(encoded[:4096]) == manifest.summary


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"key": column(0, 0, 1, 3)}, "belongs to no entry"),
        ({"key": column(0, 1, 0, 2)}, "not sorted"),
        ({"object": column(0, 2, 0, 0)}, "lies in no object"),
        ({"offset": column(0, 0, 64, 92)}, "beyond the end of its object"),
        ({"offset": column(0, 2**64 - 1, 64, 91)}, "beyond the end of its object"),
        ({"length": column(24, 20, 2, 9)}, "length of a chunk of tensor 'w'"),
        ({"length": column(24, 24, 2, 2**64 - 1)}, "beyond the end of its object"),
        ({"chunk_offset": column(0, 0, 3, 0)}, "reaches beyond tensor 'w'"),
        ({"chunk_offset": column(0, 0, 2**64 - 2, 0)}, "reaches beyond tensor 'w'"),
        ({"chunk_size": column(2, 3, 2)}, "chunk coordinates"),
        ({"chunk_size": column(2, 2, 2, 3)}, "length of a chunk of tensor 'w'"),
        ({"blobs": ("w",)}, "two entries have one name"),
        ({"length": column(24, 24, 2)}, "differ in length"),
        ({"objects": (ObjectEntry(name="other/step-00000007/rank-00000.data", length_bytes=100),) * 2}, "outside"),
    ],
)
def test_a_manifest_that_points_outside_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(CheckpointFailed, match=says):
        dataclasses.replace(example(), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (TensorEntry(fqn="w", dtype="float31", shape=(4, 3), properties={}), "dtype"),
        (TensorEntry(fqn="w", dtype="float32", shape=(1 << 40, 1 << 40), properties={}), "impossible shape"),
        (TensorEntry(fqn="w", dtype="float32", shape=(1,) * 65, properties={}), "impossible shape"),
    ],
)
def test_an_impossible_tensor_is_refused(tensor: TensorEntry, says: str) -> None:
    with pytest.raises(CheckpointFailed, match=says):
        dataclasses.replace(example(), tensors=(tensor, example().tensors[1]))


def test_every_cut_and_every_flipped_byte_is_refused_or_harmless() -> None:
    """Invariant: decode returns a checked Manifest or raises CheckpointFailed, never anything else."""
    encoded = encode(example())
    for length in range(len(encoded)):
        with pytest.raises(CheckpointFailed):
            decode(encoded[:length])
    for at in range(len(encoded)):
        for bit in (0x01, 0x80):
            damaged = bytearray(encoded)
            damaged[at] ^= bit
            try:
                decode(damaged)
            except CheckpointFailed:
                continue


def test_a_newer_version_is_refused_by_number() -> None:
    encoded = bytearray(encode(example()))
    encoded[8:12] = struct.pack("<I", 2)
    with pytest.raises(CheckpointFailed, match=r"version.*expected 1, found 2.*upgrade"):
        decode(encoded)


@pytest.mark.parametrize(
    "tables",
    [
        b"[" * 100_000,
        b"[]",
        b"{}",
        json.dumps({"objects": [["a"]], "tensors": [], "blobs": []}).encode(),
        json.dumps({"objects": [], "tensors": [["w", "float32", [True], {}]], "blobs": []}).encode(),
        json.dumps({"objects": [], "tensors": [["w", "float32", 3, {}]], "blobs": []}).encode(),
        json.dumps({"objects": [["a", -1]], "tensors": [], "blobs": []}).encode(),
        json.dumps({"objects": [], "tensors": [], "blobs": [1]}).encode(),
    ],
)
def test_tables_of_another_shape_are_refused(tables: bytes) -> None:
    summary = json.dumps(
        {"run": "run", "step": 7, "created_unix": 0, "ranks": 1, "item_count": 0, "data_bytes": 0}
    ).encode()
    fixed = struct.pack("<8sIIQQQ24x", b"HRCKPT\r\n", 1, len(summary), len(tables), 0, 0)
    head = fixed + summary + tables
    with pytest.raises(CheckpointFailed):
        decode(head + bytes(-len(head) % 8))


def test_sizes_in_the_fixed_part_are_bounded_before_anything_is_allocated() -> None:
    for summary, tables, items, coordinates in (
        (5000, 0, 0, 0),
        (10, 1 << 62, 0, 0),
        (10, 10, 1 << 61, 0),
        (10, 10, 0, 1 << 62),
    ):
        fixed = struct.pack("<8sIIQQQ24x", b"HRCKPT\r\n", 1, summary, tables, items, coordinates)
        with pytest.raises(CheckpointFailed):
            decode(fixed + bytes(100))
