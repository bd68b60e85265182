"""Everything that a training job is, as one state dict, and back: model, optimizer, position in the data, RNG, extras.

    model.*       optimizer.*     tensors under names that do not depend on how they are spread over ranks
                                  (`torch.distributed.checkpoint.state_dict`: plain, DDP, FSDP2, DTensor)
    training.facts                written by rank 0: step, number of ranks, position in the data, extras
    training.rank-NNNNN           of each rank: its random number generators; its position, where each has its own

Facts are JSON where they are plain values, else what `torch.save` makes of them and `torch.load(weights_only=True)`
gives back, which is tried when they are saved. The planner finds out what a checkpoint holds from its metadata, so one
load does it, whatever number of ranks saved.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from headrace.errors import CheckpointFailed, HeadraceError, UsageError
from headrace.torch.metadata import decode_plain, encode_plain
from headrace.torch.ranks.agreement import Ranks

Optimizers: TypeAlias = "torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None"

VERSION = 1
_FACTS = "training.facts"
_RANK = "training.rank-"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What is saved and restored together. `loader` and values of `extra` may be anything with `state_dict` and
    `load_state_dict`; other values of `extra` are saved as they are."""

    model: torch.nn.Module | None = None
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    loader: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(model: torch.nn.Module | None, optimizer: Optimizers, loader: Any, extra: Mapping[str, Any] | None) -> Parts:
        optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer or ())
        if optimizers and model is None:
            raise UsageError("an optimizer is named by its model's parameters", expected="model=", found="no model")
        for name, what in (("model", model), *(("optimizer", each) for each in optimizers), ("loader", loader)):
            if what is not None and not _has_state(what):
                raise UsageError(
                    f"this {name} has no state", expected="state_dict and load_state_dict", found=type(what).__name__
                )
        return Parts(model=model, optimizers=optimizers, loader=loader, extra=dict(extra or {}))


def _has_state(what: object) -> bool:
    return callable(getattr(what, "state_dict", None)) and callable(getattr(what, "load_state_dict", None))


# ---- to a state dict ------------------------------------------------------------------------------------------------


def collect(parts: Parts, step: int, ranks: Ranks) -> dict[str, Any]:
    """The state dict of this rank. Its tensors are those of model and optimizer, not copies. Collective: what one rank
    fails with, all hear, before a save begins."""
    digest, failure = None, None
    try:
        state, fresh, position, extra = _of_this_rank(parts)
        digest = None if position is None else hashlib.sha256(position).hexdigest()
    except Exception as error:
        failure = error
    told = ranks.gather((digest, None if failure is None else f"{failure}"), "collecting what is to be saved")
    if failure is not None:
        raise failure
    failed = {rank: text for rank, (_, text) in enumerate(told) if text is not None}
    if failed:
        raise CheckpointFailed(f"rank {min(failed)} cannot say what is to be saved", found=failed[min(failed)])
    # Loaders that count for all ranks have one state, with which any number of ranks goes on. Others have one a rank.
    shared = len({each for each, _ in told}) == 1
    training = {f"rank-{ranks.rank:05d}": _to_bytes({"rng": rng_state(), "position": None if shared else position})}
    if ranks.rank == 0:
        training["facts"] = _to_bytes(
            {
                "version": VERSION,
                "step": step,
                "ranks": ranks.world,
                "fresh": fresh,
                "position": position if shared else None,
                "position_by_rank": not shared,
                "extra": extra,
            }
        )
    return {**state, "training": training}


def _of_this_rank(parts: Parts) -> tuple[dict[str, Any], list[bool], bytes | None, dict[str, bytes]]:
    fresh = [not optimizer.state for optimizer in parts.optimizers]
    state = tensors_of(parts)
    # torch makes the state of an optimizer that has none by a step that changes nothing but its count of steps, so that
    # the next one would not be what it is in a run that saves nothing.
    _forget(parts, fresh)
    position = None if parts.loader is None else _encode("the loader's state", parts.loader.state_dict())
    extra = {
        name: _encode(f"extra {name!r}", value.state_dict() if _has_state(value) else value)
        for name, value in parts.extra.items()
    }
    return state, fresh, position, extra


def tensors_of(parts: Parts) -> dict[str, Any]:
    """Model and optimizer by name. What a load fills in place is this, too."""
    if parts.model is None:
        return {}
    state: dict[str, Any] = {"model": get_model_state_dict(parts.model)}
    if parts.optimizers:
        state["optimizer"] = get_optimizer_state_dict(parts.model, parts.optimizers)
    return state


def _forget(parts: Parts, fresh: Sequence[bool]) -> None:
    for optimizer, new in zip(parts.optimizers, fresh, strict=True):
        if new:
            optimizer.state.clear()


def _encode(what: str, value: Any) -> bytes:
    try:
        return b"J" + json.dumps(encode_plain(value)).encode()
    except (HeadraceError, ValueError):
        pass
    data = io.BytesIO()
    try:
        torch.save(value, data)
        torch.load(io.BytesIO(data.getbuffer()), weights_only=True)
    except Exception as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise UsageError(
            f"{what} cannot be saved so that it can be had back",
            expected="numbers, text, bytes, tensors, and lists, tuples and dictionaries of them",
            found=named[1] if named else str(error).splitlines()[0],
        ) from error
    return b"T" + data.getvalue()


def _decode(data: bytes) -> Any:
    if data[:1] == b"J":
        return decode_plain(json.loads(data[1:]))
    return torch.load(io.BytesIO(data[1:]), weights_only=True)


def _to_bytes(facts: dict[str, Any]) -> bytes:
    return json.dumps(encode_plain(facts)).encode()


# ---- and back -------------------------------------------------------------------------------------------------------


class Planner(DefaultLoadPlanner):
    """Asks for the facts and for this rank's own part beside what it is given, as far as the checkpoint has them."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self._training: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        there = metadata.state_dict_metadata
        for part in ("model", "optimizer"):
            if part in state_dict and not any(name.startswith(f"{part}.") for name in there):
                raise CheckpointFailed(f"this checkpoint holds no {part}")
        if "optimizer" in state_dict:
            # A parameter that has had no gradient yet has no state, neither there nor here.
            known = {name.removeprefix("optimizer.state.") for name in there if name.startswith("optimizer.state.")}
            states = state_dict["optimizer"]["state"]
            for name in [n for n, of in states.items() if not any(f"{n}.{key}" in known for key in of)]:
                del states[name]
        wanted = [_FACTS, f"{_RANK}{self._ranks.rank:05d}"]
        if sum(name.startswith(_RANK) for name in there) != self._ranks.world:
            del wanted[1]
        self._training = {name.partition(".")[2]: b"" for name in wanted if name in there}
        super().set_up_planner({**state_dict, "training": self._training}, metadata, is_coordinator)

    @property
    def facts(self) -> dict[str, Any] | None:
        """None: it was not a `Checkpointer` that saved this."""
        return self._read("facts")

    @property
    def own(self) -> dict[str, Any] | None:
        """This rank's part; None where another number of ranks saved."""
        return self._read(f"rank-{self._ranks.rank:05d}")

    def _read(self, name: str) -> dict[str, Any] | None:
        data = self._training.get(name)
        if data is None:
            return None
        facts = decode_plain(json.loads(data))
        if not isinstance(facts, dict) or (name == "facts" and facts.get("version") != VERSION):
            raise CheckpointFailed(
                "this checkpoint was saved by another version of the checkpointer",
                expected=f"version {VERSION}",
                found=str(facts.get("version")) if isinstance(facts, dict) else type(facts).__name__,
            )
        return facts


@dataclass(frozen=True, kw_only=True)
class PutBack:
    """What became of what is not tensors; for the certificate."""

    rng: str
    data: str
    extra: Mapping[str, Any]


def put_back(parts: Parts, state: dict[str, Any], planner: Planner, ranks: Ranks) -> PutBack:
    """Into model, optimizers, loader and extras, of which the tensors are there already; random numbers last."""
    facts, own = planner.facts, planner.own
    if facts is None and (parts.loader is not None or parts.extra):
        raise CheckpointFailed(
            "this checkpoint holds neither a position in data nor extras: no Checkpointer saved it",
            next_step="restore model and optimizer alone, and set the loader by hand",
        )
    if parts.model is not None:
        if parts.optimizers:
            loose = StateDictOptions(strict=False)
            set_optimizer_state_dict(parts.model, parts.optimizers, optim_state_dict=state["optimizer"], options=loose)
        set_model_state_dict(parts.model, state["model"])
    if facts is None:
        return PutBack(rng="not saved", data="not saved", extra={})
    if len(facts["fresh"]) == len(parts.optimizers):
        _forget(parts, facts["fresh"])
    data = "not asked for"
    if parts.loader is not None:
        parts.loader.load_state_dict(_decode(_position(facts, own, ranks)))
        data = "position restored"
    extra = {name: _decode(value) for name, value in facts["extra"].items()}
    for name, target in parts.extra.items():
        if name not in extra:
            raise CheckpointFailed(f"this checkpoint holds no extra {name!r}", found=", ".join(extra) or "none")
        if _has_state(target):
            target.load_state_dict(extra[name])
    if own is None:
        rng = f"NOT restored (saved by {facts['ranks']} ranks, {ranks.world} now)"
    else:
        rng = set_rng_state(own["rng"])
    return PutBack(rng=rng, data=data, extra=extra)


def _position(facts: dict[str, Any], own: dict[str, Any] | None, ranks: Ranks) -> bytes:
    position = facts["position"]
    if facts["position_by_rank"]:
        if own is None:
            raise CheckpointFailed(
                "every rank's loader has a position of its own, which no other number of ranks can go on from",
                expected=f"{facts['ranks']} ranks",
                found=f"{ranks.world}",
                next_step="use a loader that counts for all ranks (headrace.torch.TokenLoader), or leave loader out",
            )
        position = own["position"]
    if position is None:
        raise CheckpointFailed("this checkpoint holds no position in the data", next_step="leave loader out")
    return bytes(position)


# ---- random numbers -------------------------------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    kind, words, position, has_gauss, gauss = np.random.get_state()
    # Not where CUDA is there and unused: asking would make a context, of some hundreds of MiB.
    used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state() if used else None
    return {
        "torch": _tensor_bytes(torch.get_rng_state()),
        "cuda": None if cuda is None else _tensor_bytes(cuda),
        "python": random.getstate(),
        "numpy": (kind, np.asarray(words, "<u4").tobytes(), position, has_gauss, gauss),
    }


def set_rng_state(state: dict[str, Any]) -> str:
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    random.setstate(state["python"])
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, np.frombuffer(words, "<u4"), *rest))
    if state["cuda"] is None:
        return "restored"
    if not torch.cuda.is_available():
        return "restored, but for CUDA's (no CUDA here)"
    torch.cuda.set_rng_state(_bytes_tensor(state["cuda"]))
    return "restored"


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
