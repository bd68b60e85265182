"""Where a loader stands: a few numbers, and enough to refuse every resume that would not be exact.

The order of samples is a function of the seed and of how many samples there are, so the state is a counter. What else
is in it are checks: which data, which order, which window length, and a hash of the samples that come next. A state
that does not fit is an error that says what differs, never a silent restart from another place.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from headrace.dataset.sampler import ORDER, Sampler
from headrace.dataset.stream import TokenStream
from headrace.errors import DatasetError

#: Layout of the dictionary.
STATE_VERSION = 1
#: Samples in the hash of what comes next.
NEXT_SAMPLES = 64


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """`consumed` and what it is true for. The number of ranks is not part of it: any number may go on from here."""

    seed: int
    #: Samples handed out to all ranks together, over all epochs.
    consumed: int
    #: Samples a step. It does not change the order, but it changes the training, so it may not change by accident.
    global_batch: int
    sequence_length: int
    token_count: int
    dtype: str
    #: SHA-256 of the tokens where their manifest gives it, else "".
    tokens_sha256: str
    #: Volume, name and allocation of the tokens. Decides where there is no hash: then a copy is not known to be one.
    object: str
    #: Name of the order.
    order: str
    #: Hash of the numbers of the next `NEXT_SAMPLES` samples.
    next_samples: str

    def to_dict(self) -> dict[str, int | str]:
        """Plain numbers and strings, for any checkpoint."""
        return {"version": STATE_VERSION, **asdict(self)}

    @staticmethod
    def from_dict(state: dict[str, Any]) -> LoaderState:
        """`DatasetError` where `state` is none of `to_dict`."""
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            found = repr(state.get("version")) if isinstance(state, dict) else type(state).__name__
            raise DatasetError("not a loader's state", expected=f"version {STATE_VERSION}", found=found)
        values: dict[str, Any] = {}
        for name, kind in LoaderState.__annotations__.items():
            value = state.get(name)
            # Checkpointers may give an int back as a tensor or array of no dimension.
            if kind == "int" and not isinstance(value, (int, str, type(None))) and hasattr(value, "item"):
                value = value.item()
            if not isinstance(value, int if kind == "int" else str) or isinstance(value, bool):
                raise DatasetError(f"the loader's state has no valid {name!r}", found=repr(value)[:80])
            values[name] = value
        if not 0 <= values["consumed"] < 1 << 63:
            raise DatasetError("the loader's state has no valid 'consumed'", found=str(values["consumed"]))
        return LoaderState(**values)


def current_state(
    stream: TokenStream, sampler: Sampler, *, sequence_length: int, global_batch: int, consumed: int
) -> LoaderState:
    """The state of a loader with these settings after `consumed` samples."""
    samples = sampler.positions(consumed, NEXT_SAMPLES)
    manifest = stream.manifest
    return LoaderState(
        seed=sampler.seed,
        consumed=consumed,
        global_batch=global_batch,
        sequence_length=sequence_length,
        token_count=stream.token_count,
        dtype=stream.dtype.name,
        tokens_sha256=manifest.tokens_sha256 if manifest else "",
        object=object_identity(stream),
        order=ORDER,
        next_samples=hashlib.blake2b(samples.astype("<i8").tobytes(), digest_size=16).hexdigest(),
    )


def object_identity(stream: TokenStream) -> str:
    """What only this very object has: the volume and, in it, the allocation."""
    return f"{stream.volume.id}/{stream.bin_info.name}#{stream.bin_info.sequence}"


def check_state(saved: LoaderState, ours: LoaderState, *, allow_global_batch_change: bool = False) -> None:
    """`ours` is the loader's own state at `saved.consumed`. `DatasetError` names every difference."""
    ignored = {"object"} if saved.tokens_sha256 and ours.tokens_sha256 else {"tokens_sha256"}
    if allow_global_batch_change:
        ignored.add("global_batch")
    names = [name for name in LoaderState.__annotations__ if name not in ignored]
    different = [name for name in names if getattr(saved, name) != getattr(ours, name)]
    if not different:
        return
    if len(different) > 1 and "next_samples" in different:
        # It follows from the others and tells nobody anything.
        different.remove("next_samples")
    advice = "resume with the data and settings that the state was saved with"
    if different == ["global_batch"]:
        advice = "allow_global_batch_change=True goes on at the same sample with the new batch"
    raise DatasetError(
        "the loader's state does not fit: " + ", ".join(different),
        expected=", ".join(f"{name} {getattr(saved, name)}" for name in different),
        found=", ".join(f"{name} {getattr(ours, name)}" for name in different),
        next_step=advice,
    )
