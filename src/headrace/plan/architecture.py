"""How many parameters a decoder-only transformer has, from its shape or from the config that is published with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import UsageError
from headrace.plan.job import Job, read_bounded

#: Shapes whose parameters are counted here to the last one. Others are refused, not guessed.
KNOWN = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")

FORMULA = (
    "layers * (2 hidden * heads * head + 2 hidden * kv_heads * head + experts * 3 hidden * ffn + 2 hidden) "
    "+ 2 vocab * hidden + hidden"
)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A transformer of the Llama family: gated feed-forward, grouped keys and values, RMS norms.

    `q_width` and `kv_width`: heads, of queries and of keys and values, times the width of a head.
    """

    layers: int
    hidden: int
    ffn: int
    q_width: int
    kv_width: int
    vocab: int
    tied: bool = False
    #: Experts of a layer, those that a token goes through, and whether a router chooses them.
    experts: int = 1
    active_experts: int = 1
    #: Parameters of biases and further norms of one layer.
    extra: int = 0

    @property
    def router(self) -> int:
        return self.experts * self.hidden if self.experts > 1 else 0

    @property
    def embedding(self) -> int:
        """Parameters of one embedding, of the input or of the output."""
        return self.vocab * self.hidden

    def layer(self, experts: int) -> int:
        attention = 2 * self.hidden * self.q_width + 2 * self.hidden * self.kv_width
        return attention + experts * 3 * self.hidden * self.ffn + self.router + 2 * self.hidden + self.extra

    def _total(self, experts: int) -> int:
        return self.layers * self.layer(experts) + self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self._total(self.experts)

    @property
    def active_parameters(self) -> int:
        """Those that one token goes through."""
        return self._total(self.active_experts)


def architecture(job: Job) -> Architecture | None:
    """None: the job names no shape. UsageError where one is named in part, or twice."""
    config = job.text("model.config")
    shape = ("model.layers", "model.hidden", "model.ffn", "model.heads", "model.vocab")
    said = [key for key in (*shape, "model.kv_heads", "model.tied") if job.has(key)]
    if config is not None:
        if said:
            raise UsageError("the model's shape is said twice", found=f"model.config and {said[0]}")
        return read_config(config)
    if not said:
        return None
    missing = [key for key in shape if not job.has(key)]
    if missing:
        raise UsageError(
            "the model's shape is not whole", found=", ".join(said), expected=f"{', '.join(missing)}, too",
            next_step="or give model.parameters alone",
        )  # fmt: skip
    hidden, heads = job.whole("model.hidden"), job.whole("model.heads")
    kv_heads = job.whole("model.kv_heads") if job.has("model.kv_heads") else heads
    if not kv_heads <= heads <= hidden:
        raise UsageError(
            "model.heads", expected="kv_heads at most heads, and heads at most hidden",
            found=f"kv_heads {kv_heads}, heads {heads}, hidden {hidden}",
        )  # fmt: skip
    return Architecture(
        layers=job.whole("model.layers"), hidden=hidden, ffn=job.whole("model.ffn"), q_width=hidden,
        kv_width=hidden // heads * kv_heads, vocab=job.whole("model.vocab"), tied=job.flag("model.tied"),
    )  # fmt: skip


def read_config(path: str) -> Architecture:
    """A `config.json` as it is published with weights. UsageError where it is none, or of a shape not known here."""
    try:
        tree = json.loads(read_bounded(path))
    except (ValueError, RecursionError):
        raise UsageError("not a model's config", where=path, expected="a config.json, of JSON") from None
    if not isinstance(tree, dict):
        raise UsageError("not a model's config", where=path, expected="an object of JSON")
    kind = tree.get("model_type")
    if kind not in KNOWN:
        raise UsageError(
            "model_type", where=path, expected=f"one of {', '.join(KNOWN)}", found=repr(kind)[:60],
            next_step="give model.parameters instead",
        )  # fmt: skip
    hidden, heads = _whole(tree, "hidden_size", path), _whole(tree, "num_attention_heads", path)
    head = _whole(tree, "head_dim", path, hidden // heads)
    q_width = heads * head
    kv_width = _whole(tree, "num_key_value_heads", path, heads) * head
    experts = active = 1
    ffn = _whole(tree, "intermediate_size", path)
    if kind == "mixtral":
        experts, active = _whole(tree, "num_local_experts", path), _whole(tree, "num_experts_per_tok", path)
    elif kind == "qwen3_moe":
        experts, active = _whole(tree, "num_experts", path), _whole(tree, "num_experts_per_tok", path)
        ffn = _whole(tree, "moe_intermediate_size", path)
        if tree.get("mlp_only_layers") or tree.get("decoder_sparse_step", 1) != 1:
            raise UsageError("layers with and without experts", where=path, next_step="give model.parameters instead")
    if active > experts:
        raise UsageError("num_experts_per_tok", where=path, expected=f"at most {experts}", found=str(active))
    extra = 0
    if kind == "qwen2" or tree.get("attention_bias") is True:
        extra += q_width + 2 * kv_width
    if kind.startswith("qwen3"):
        extra += 2 * head
    if tree.get("attention_bias") is True:
        extra += hidden
    return Architecture(
        layers=_whole(tree, "num_hidden_layers", path), hidden=hidden, ffn=ffn, q_width=q_width, kv_width=kv_width,
        vocab=_whole(tree, "vocab_size", path), tied=tree.get("tie_word_embeddings") is True, experts=experts,
        active_experts=active, extra=extra,
    )  # fmt: skip


def _whole(tree: Mapping[str, Any], key: str, path: str, default: int | None = None) -> int:
    value = tree.get(key)
    if value is None and default is not None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 100_000_000:
        found = "nothing" if value is None else "another thing" if not isinstance(value, int) else "another number"
        raise UsageError(key, where=path, expected="a whole number from 1 to 100000000", found=found)
    return value
