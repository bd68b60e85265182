"""What a reader reads: exact ranges, straight into the destination where possible, and every other way right too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from headrace.torch import VolumeReader, VolumeWriter
from headrace.volume import Volume

MIB = 1 << 20
SAVED = {
    "rows": torch.arange(4000 * 100, dtype=torch.int32).view(4000, 100),
    "wide": torch.arange(8 * 200_000, dtype=torch.float32).view(8, 200_000),
    "cube": torch.arange(30 * 20 * 10, dtype=torch.int64).view(30, 20, 10),
    "half": torch.linspace(-1, 1, 999).to(torch.bfloat16),
    "scalar": torch.tensor(3.25, dtype=torch.float64),
    "empty": torch.zeros(0, 5),
    "flag": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
    "fp8": torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "columns": torch.arange(60, dtype=torch.int16).view(6, 10).t(),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
}


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Volume:
    folder = tmp_path_factory.mktemp("volume")
    uris = [f"file:{folder}/member{i}" for i in range(3)]
    Volume.create([f"{uri}?create=64MiB" for uri in uris], stripe_bytes=65536).close()
    with VolumeWriter(uris) as writer:
        writer.save({**SAVED, "text": "x" * 100_000, "none": None}, "run/step-1")
    return Volume.open(uris)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    a, b = (t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def test_every_dtype_and_layout_comes_back_bit_for_bit(volume: Volume) -> None:
    into: dict[str, Any] = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in SAVED.items()}
    # A destination that is not contiguous, and one of another dtype, go through a bounce buffer.
    into["rows"] = torch.zeros(100, 4000, dtype=torch.int32).t()
    into["cube"] = torch.zeros(30, 20, 10, dtype=torch.float64)
    into |= {"text": "", "none": 1}
    reader = VolumeReader(volume, "run")
    report = reader.load(into)
    for name, tensor in SAVED.items():
        assert same(into[name].to(tensor.dtype), tensor), name
    assert into["text"] == "x" * 100_000
    assert into["none"] is None
    assert report.read_bytes == report.wanted_bytes
    assert report.checkpoint_id == "run/step-00000001"


def read_box(volume: Volume, name: str, offsets: list[int], lengths: list[int]) -> tuple[torch.Tensor, VolumeReader]:
    """One box of one tensor, as a reader of another sharding would ask for it."""
    target = torch.zeros(lengths, dtype=SAVED[name].dtype)
    state = {name: target}
    reader, planner = VolumeReader(volume, "run/step-1"), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    item = ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(name),
        dest_offsets=torch.Size([0] * len(lengths)),
        storage_index=MetadataIndex(name, [0] * len(lengths)),
        storage_offsets=torch.Size(offsets),
        lengths=torch.Size(lengths),
    )
    reader.read_data(LoadPlan([item]), planner).wait()
    return target, reader


@pytest.mark.parametrize(
    ("name", "offsets", "lengths", "amplification"),
    [
        ("rows", [17, 0], [3000, 100], 1.0),
        ("rows", [17, 3], [40, 5], 20.0),
        ("wide", [2, 1000], [5, 100_000], 1.0),
        ("wide", [0, 199_999], [8, 1], 200_000.0),
        ("cube", [3, 4, 5], [6, 7, 5], 200 / 35),
        ("cube", [0, 0, 0], [30, 20, 10], 1.0),
        ("half", [500], [7], 1.0),
        ("rows", [5, 5], [0, 10], 1.0),
    ],
)
def test_a_box_reads_exact_ranges_or_the_rows_around_it(
    volume: Volume, name: str, offsets: list[int], lengths: list[int], amplification: float
) -> None:
    found, reader = read_box(volume, name, offsets, lengths)
    view = SAVED[name]
    for dimension, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        view = view.narrow(dimension, start, length)
    assert same(found, view)
    assert reader.read_bytes == pytest.approx(reader.wanted_bytes * amplification)


def test_bounce_buffers_are_bounded(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.torch.load.reading.BOUNCE_BYTES", MIB)
    into = {name: torch.zeros(t.shape, dtype=torch.float64) for name, t in SAVED.items() if not t.is_complex()}
    VolumeReader(volume, "run").load(into)
    for name, tensor in into.items():
        assert torch.equal(tensor, SAVED[name].to(torch.float64)), name


def test_a_failed_load_leaves_no_read_under_way(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are the caller's again with the error, so each read that was begun must have been waited for."""
    waited: dict[int, bool] = {}

    class Watched:
        def __init__(self, transfer: Any) -> None:
            self._transfer = transfer
            waited[id(self)] = False

        def wait(self, timeout_s: float | None = None) -> None:
            waited[id(self)] = True
            self._transfer.wait(timeout_s)

    kept = []
    submit = volume.submit_read

    def watched(*arguments: Any, **options: Any) -> Any:
        kept.append(Watched(submit(*arguments, **options)))
        return kept[-1]

    def full(*_: object) -> None:
        raise RuntimeError("the first tensor does not fit")

    monkeypatch.setattr(volume, "submit_read", watched)
    # Another dtype takes a bounce; small lots, so that several are under way.
    monkeypatch.setattr("headrace.torch.load.reading.BOUNCE_BYTES", 2)
    monkeypatch.setattr(DefaultLoadPlanner, "commit_tensor", full)
    into = {name: torch.zeros(SAVED[name].shape, dtype=torch.float64) for name in ("rows", "wide", "cube")}
    with pytest.raises(BaseException, match="does not fit"):
        VolumeReader(volume, "run").load(into)
    assert len(waited) > 1 and all(waited.values())
