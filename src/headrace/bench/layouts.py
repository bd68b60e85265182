"""Which files each rank of a checkpoint writes: the layouts of MLPerf Storage's checkpoint workloads.

From the shapes in its rules (v2.0 and v3.0; `mlcommons/storage`, and DLIO, which writes them): weights in 2 bytes,
optimizer in 12 (master weights, two moments) of each parameter. ZeRO 3 shards both over all ranks; ZeRO 1 the optimizer
over all, the weights of each layer over the tensor ranks of its stage, written by the first replica alone. What is
written is of these sizes, by this project's own processes: its figures are no MLPerf results.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.bench.places.protocol import Shard
from headrace.errors import UsageError

WEIGHT_BYTES = 2
OPTIMIZER_BYTES = 12
_VOCAB = 128_256
#: Files that are scaled keep at least this.
_LEAST = 4096


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder of Llama's family, as the workload builds it."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    tensor: int
    pipeline: int
    data: int
    zero: int

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def layer(self) -> int:
        """Parameters of a layer: attention with grouped keys and values, gated feed-forward, two norms."""
        kv = self.hidden * self.kv_heads // self.heads
        return 2 * self.hidden**2 + 2 * self.hidden * kv + 3 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def embedding(self) -> int:
        """Of the input, or of the output."""
        return _VOCAB * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + 2 * self.embedding + self.hidden


MODELS = {
    "8b": Model(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, tensor=1, pipeline=1, data=8, zero=3),
    "70b": Model(hidden=8192, ffn=28672, layers=80, heads=128, kv_heads=8, tensor=8, pipeline=1, data=8, zero=3),
    "405b": Model(hidden=16384, ffn=53248, layers=126, heads=128, kv_heads=8, tensor=8, pipeline=32, data=2, zero=1),
    "1t": Model(hidden=25872, ffn=98304, layers=128, heads=192, kv_heads=32, tensor=8, pipeline=64, data=2, zero=1),
}


def model_of(name: str) -> Model:
    """UsageError where there is none of this name."""
    found = MODELS.get(name.lower())
    if found is None:
        raise UsageError("no such layout of a checkpoint", expected=", ".join(MODELS), found=repr(name)[:60])
    return found


def files_of(model: Model, rank: int, scale: float = 1.0) -> list[Shard]:
    """Of a rank, with their lengths times `scale`. Ranks count tensor first, then pipeline, then data."""
    tensor = rank % model.tensor
    stage = rank // model.tensor % model.pipeline
    replica = rank // model.tensor // model.pipeline
    name = f"zero_pp_rank_{replica}_mp_rank_{stage * model.tensor + tensor:02}"
    files = [Shard(f"{name}_optim_states.pt", model.parameters * OPTIMIZER_BYTES // model.ranks)]
    if model.zero == 3:
        files.append(Shard(f"{name}_model_states.pt", model.parameters * WEIGHT_BYTES // model.ranks))
    elif replica == 0:
        for layer, parameters in _of_stage(model, stage):
            length = parameters * WEIGHT_BYTES // model.tensor
            files.append(Shard(f"layer_{layer:03}-model_{tensor:02}_model_states.pt", length))
    return [Shard(name, max(_LEAST, int(length * scale))) for name, length in files]


def _of_stage(model: Model, stage: int) -> list[tuple[int, int]]:
    """(number, parameters) of each layer file: the embedding is the first stage's, norm and output the last's."""
    each, more = divmod(model.layers, model.pipeline)
    first = stage * each + min(stage, more)
    found = [(1 + layer, model.layer) for layer in range(first, first + each + (stage < more))]
    if stage == 0:
        found.insert(0, (0, model.embedding))
    if stage == model.pipeline - 1:
        found += [(1 + model.layers, model.hidden), (2 + model.layers, model.embedding)]
    return found


def layout(name: str, ranks: int, scale: float = 1.0) -> list[list[Shard]]:
    """Of the first `ranks` of a checkpoint. UsageError where it has fewer."""
    model = model_of(name)
    if ranks > model.ranks:
        raise UsageError("ranks of this layout", expected=f"1 to {model.ranks}", found=str(ranks))
    return [files_of(model, rank, scale) for rank in range(ranks)]


def total_bytes(ranks: list[list[Shard]]) -> int:
    return sum(shard.length_bytes for files in ranks for shard in files)


def scale_for(name: str, ranks: int, most_bytes: int) -> float:
    """The largest scale at which so many ranks write no more than this, at most 1."""
    return min(1.0, most_bytes / total_bytes(layout(name, ranks)))
