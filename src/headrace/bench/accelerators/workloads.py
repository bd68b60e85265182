"""What an accelerator asks of storage: MLPerf Storage's training workloads, and the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.errors import UsageError

#: Bounds of what can be meant; NaN is outside of each.
_MOST_BATCH_BYTES = 64 << 30
_LEAST_COMPUTE_S, _MOST_COMPUTE_S = 1e-4, 3600.0


def _within(what: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UsageError(what, expected=f"{low:g} to {high:g}", found=f"{value:g}")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step of one accelerator: `batch` samples of `sample_bytes`, then `compute_s` seconds without storage.

    `au`: the utilisation that counts as enough, as a share. `samples_per_file`: samples that lie together and are read
    one after the other; files come in random order. `ahead`: batches that the loader keeps ready.
    """

    name: str
    batch: int
    sample_bytes: int
    compute_s: float
    au: float = 0.90
    samples_per_file: int = 1
    ahead: int = 2
    source: str = "the user's own"

    def __post_init__(self) -> None:
        _within("samples in a batch", self.batch, 1, 1 << 24)
        _within("bytes of a sample", self.sample_bytes, 1, 16 << 30)
        _within("bytes of a batch", self.batch_bytes, 1, _MOST_BATCH_BYTES)
        _within("seconds of computing", self.compute_s, _LEAST_COMPUTE_S, _MOST_COMPUTE_S)
        _within("AU that is enough", self.au, 0.01, 0.999)
        _within("samples in a file", self.samples_per_file, 1, 1 << 30)
        _within("batches ahead", self.ahead, 1, 64)

    @property
    def batch_bytes(self) -> int:
        return self.batch * self.sample_bytes

    @property
    def demand_bytes_per_s(self) -> float:
        """What one accelerator reads when it never waits."""
        return self.batch_bytes / self.compute_s


def _preset(name: str, batch: int, sample_bytes: int, compute_s: float, au: float, per_file: int, of: str) -> Workload:
    return Workload(
        name=name, batch=batch, sample_bytes=sample_bytes, compute_s=compute_s, au=au, samples_per_file=per_file,
        source=f"MLPerf Storage {of} (mlcommons/storage, configs/dlio/workload)",
    )  # fmt: skip


#: By name. Every sample has the mean size (those of 3D U-Net differ by 68 MB, standard deviation); of DLRM's rows the
#: 40 columns of 200 that are read, and the rows of a batch are taken as lying together.
WORKLOADS: Mapping[str, Workload] = {
    one.name: one
    for one in (
        _preset("unet3d-a100", 7, 146_600_628, 0.636, 0.90, 1, "v1.0 and v2.0"),
        _preset("unet3d-h100", 7, 146_600_628, 0.323, 0.90, 1, "v1.0 and v2.0"),
        _preset("unet3d-b200", 7, 146_600_628, 0.162, 0.90, 1, "v3.0; computed there as half of H100's time"),
        _preset("resnet50-a100", 400, 114_660, 0.435, 0.90, 1251, "v1.0 and v2.0"),
        _preset("resnet50-h100", 400, 114_660, 0.224, 0.90, 1251, "v1.0 and v2.0"),
        _preset("cosmoflow-a100", 1, 2_828_486, 0.00551, 0.70, 1, "v1.0 and v2.0"),
        _preset("cosmoflow-h100", 1, 2_828_486, 0.0035, 0.70, 1, "v1.0 and v2.0"),
        _preset("retinanet-b200", 24, 322_957, 0.04755, 0.85, 1, "v3.0"),
        _preset("dlrm-b200", 16_384, 160, 0.000375, 0.70, 16_384, "v3.0"),
        _preset("flux-b200", 48, 2_164_832, 1.35, 0.90, 288, "v3.0"),
    )
}


def workload_of(name: str, **changes: object) -> Workload:
    """The workload of this name, with some of its values changed (None: as it is). `UsageError` lists the names."""
    found = WORKLOADS.get(name.strip().lower())
    if found is None:
        raise UsageError("workload", expected=", ".join(WORKLOADS), found=repr(name)[:60])
    given = {key: value for key, value in changes.items() if value is not None}
    if not given:
        return found
    return replace(found, **given, name=f"{found.name}, changed", source=f"{found.source}, changed")  # type: ignore[arg-type]
