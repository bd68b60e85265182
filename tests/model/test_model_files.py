"""Models in a volume: what the safetensors library writes we read, and what we write it reads, byte for byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from headrace.errors import ModelError, ObjectNotFound, UsageError
from headrace.model import RawTensor, open_safetensors, write_safetensors
from headrace.volume import Session, Volume

MIB = 1 << 20


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    uris = [f"file:{tmp_path}/member{i}?create=32MiB" for i in range(2)]
    Volume.create(uris, stripe_bytes=65536).close()
    with Volume.open(uris, write=True) as opened:
        yield opened


@pytest.fixture
def session(volume: Volume) -> Session:
    with volume.session(run_id="publish") as session:
        yield session


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "big": rng.standard_normal((700, 1000)).astype(np.float32),
        "turned": rng.integers(0, 100, (40, 60)).astype(np.int16).T,
        "other end": np.arange(10, dtype=">i4"),
        "scalar": np.float64(2.5) * np.ones(()),
        "empty": np.zeros((0, 3), np.float16),
        "flags": np.array([True, False]),
    }


def test_our_file_is_that_of_the_library(session: Session, volume: Volume, tmp_path: Path) -> None:
    mine = tensors()
    header = write_safetensors(session, "models/a.safetensors", mine, {"format": "np"})
    exported = tmp_path / "a.safetensors"
    exported.write_bytes(volume.read("models/a.safetensors"))
    assert exported.stat().st_size == header.file_bytes
    straight = {name: np.ascontiguousarray(a.astype(a.dtype.newbyteorder("<"))) for name, a in mine.items()}
    # (`ascontiguousarray` makes a 0-d array 1-d.)
    straight["scalar"] = straight["scalar"].reshape(())
    assert exported.read_bytes() == safetensors.numpy.save(straight, {"format": "np"})
    for name, array in safetensors.numpy.load_file(exported).items():
        assert np.array_equal(array, mine[name]), name


def test_a_file_of_the_library_is_read(session: Session, volume: Volume) -> None:
    mine = {name: np.ascontiguousarray(a) for name, a in tensors().items() if a.dtype.byteorder != ">"}
    with session.transaction() as tx:
        tx.put("b", safetensors.numpy.save(mine, {"k": "v"}))
    model = open_safetensors(volume, "b")
    assert set(model.keys()) == set(mine)
    assert model.metadata == {"k": "v"}
    assert model.info("big").shape == (700, 1000)
    found = model.read_all()
    assert all(np.array_equal(found[name], mine[name]) and found[name].dtype == mine[name].dtype for name in mine)
    # Some of them, into the caller's own memory.
    buffers = {"big": np.empty((700, 1000), np.float32), "flags": bytearray(2)}
    model.read_into(buffers)
    assert np.array_equal(buffers["big"], mine["big"])
    assert bytes(buffers["flags"]) == b"\1\0"


def test_a_header_longer_than_the_first_read(session: Session, volume: Volume) -> None:
    many = {f"layer.{i:05d}.weight": np.full(3, i, np.int32) for i in range(2000)}
    header = write_safetensors(session, "many", many)
    assert header.data_offset > 100_000
    found = open_safetensors(volume, "many").read_all(["layer.01999.weight"])
    assert found["layer.01999.weight"].tolist() == [1999] * 3


def test_dtypes_that_numpy_lacks_are_read_as_bytes(session: Session, volume: Volume) -> None:
    data = bytes(range(8))
    write_safetensors(session, "raw", {"w": RawTensor(dtype="BF16", shape=(2, 2), data=data)})
    model = open_safetensors(volume, "raw")
    into = bytearray(8)
    model.read_into({"w": into})
    assert bytes(into) == data
    with pytest.raises(ModelError, match="numpy has no dtype"):
        model.read_all()


def test_two_models_in_one_commit(session: Session, volume: Volume) -> None:
    with pytest.raises(RuntimeError), session.transaction() as tx:
        write_safetensors(tx, "one", tensors())
        raise RuntimeError("changed my mind")
    assert volume.list("") == []
    with session.transaction() as tx:
        write_safetensors(tx, "one", tensors())
        write_safetensors(tx, "two", tensors())
        assert "one" not in volume
    assert [entry.name for entry in volume.list("")] == ["one", "two"]


def test_what_cannot_be_meant_is_refused(session: Session, volume: Volume) -> None:
    with pytest.raises(UsageError, match="cannot hold this dtype"):
        write_safetensors(session, "x", {"a": np.array(["text"])})
    with pytest.raises(UsageError, match="8 bytes"):
        RawTensor(dtype="F32", shape=(2,), data=b"1234")
    assert volume.list("") == []
    write_safetensors(session, "x", {"a": np.zeros(4, np.float32)})
    model = open_safetensors(volume, "x")
    for buffer in (bytearray(15), bytes(16)):
        with pytest.raises(UsageError, match="16 writable"):
            model.read_into({"a": buffer})
    with pytest.raises(ModelError, match="no tensor 'b'"):
        model.info("b")
    with pytest.raises(ObjectNotFound):
        open_safetensors(volume, "y")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (10).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_another_object_is_no_model(session: Session, volume: Volume, content: bytes) -> None:
    with session.transaction() as tx:
        tx.put("bad", content)
    with pytest.raises(ModelError, match="at bad"):
        open_safetensors(volume, "bad")


def test_a_model_that_is_replaced_is_never_read_by_the_header_of_the_one_before(session: Session) -> None:
    volume = session.volume
    write_safetensors(session, "model", {"a": np.full(100, 1.0), "b": np.full(200, 2.0)})
    old = open_safetensors(volume, "model")
    with session.transaction() as tx:
        tx.delete("model")
        write_safetensors(tx, "model", {"a": np.full(200, 3.0), "b": np.full(100, 4.0)})
    with pytest.raises(ObjectNotFound, match="replaced"):
        old.read_all()
    assert open_safetensors(volume, "model").read_all()["b"].tolist() == [4.0] * 100
