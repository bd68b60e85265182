"""Where a loader stands: a few numbers, and enough to refuse every resume that would not be exact.

The order of samples is a function of the seed, of how many samples there are and of their shares, so the state is a
counter. What else is in it are checks: which data, which order, which samples, and a hash of those that come next. A
state that does not fit is an error that says what differs, never a silent restart from another place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.dataset.order.mixture import GlobalOrder
from headrace.dataset.tokens.samples import Samples
from headrace.errors import DatasetError

if TYPE_CHECKING:
    from typing_extensions import Self

#: Layout of the dictionary.
STATE_VERSION = 2
#: Samples in the hash of what comes next.
NEXT_SAMPLES = 64
#: Positions are 64 bits wide, with room for those that are read ahead.
MAX_CONSUMED = 1 << 62
#: Between the name of a dataset of a mixture and that of a fact about it, in the dictionary.
_OF = ": "


@dataclass(frozen=True, kw_only=True)
class OrderState:
    """`consumed` and what it is true for. The numbers of ranks, of micro-batches a step and of batches read ahead are
    no part of it: any may go on from here. Subclasses say what is told of the data."""

    #: What the loader reads.
    of: ClassVar[str]
    #: A dataclass of what is told of each dataset, and the field of it that every dataset has.
    source: ClassVar[type]
    count: ClassVar[str]

    seed: int
    #: Samples handed out to all ranks together, over all epochs.
    consumed: int
    #: Samples a step. It does not change the order, but it changes the training, so it may not change by accident.
    global_batch: int
    #: Where steps are counted from: `consumed` when the global batch was changed last, else 0.
    steps_from: int
    #: Samples in which the shares of a mixture hold; 1 for a single dataset.
    window: int
    #: Name of the order.
    order: str
    #: Hash of the sources and numbers of the next `NEXT_SAMPLES` samples.
    next_samples: str
    #: By name; a single one has the name "".
    sources: Mapping[str, Any]

    def to_dict(self) -> dict[str, int | str]:
        """Plain numbers and strings, for any checkpoint."""
        return {"version": STATE_VERSION, **({} if self.of == _FIRST else {"of": self.of}), **self._facts()}

    def _facts(self) -> dict[str, int | str]:
        facts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "sources"}
        for source, state in self.sources.items():
            facts |= {_key(source, name): value for name, value in asdict(state).items()}
        return facts

    def ignored(self, ours: OrderState) -> set[str]:
        """Facts that do not count beside a state of `ours`."""
        return set()

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Self:
        """`DatasetError` where `state` is none of `to_dict`."""
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            found = repr(state.get("version")) if isinstance(state, dict) else type(state).__name__
            raise DatasetError("not a loader's state", expected=f"version {STATE_VERSION}", found=found)
        if (of := state.get("of", _FIRST)) != cls.of:
            raise DatasetError(
                "the state is of another kind of loader", expected=f"of {cls.of}", found=f"of {of!s:.80}"
            )
        names = [key.removesuffix(cls.count) for key in state if isinstance(key, str) and key.endswith(cls.count)]
        sources = [name.removesuffix(_OF) for name in names if name == "" or name.endswith(_OF)]
        state = {"steps_from": 0, **state}
        values = {name: _value(state, name, kind) for name, kind in _kinds(cls).items()}
        for name, end in (("consumed", MAX_CONSUMED), ("steps_from", values["consumed"] + 1)):
            if not 0 <= values[name] < end:
                raise DatasetError(f"the loader's state has no valid {name!r}", found=str(values[name]))
        if values["global_batch"] < 1:
            raise DatasetError("the loader's state has no valid 'global_batch'", found=str(values["global_batch"]))
        return cls(
            **values,
            sources={
                source: cls.source(
                    **{name: _value(state, _key(source, name), kind) for name, kind in _kinds(cls.source).items()}
                )
                for source in sources or [""]
            },
        )


@dataclass(frozen=True, kw_only=True)
class SourceState:
    """Which data, of one dataset."""

    #: Samples of it in each window of the mixture.
    share: int
    #: "windows", "packed" or "padded".
    samples: str
    token_count: int
    dtype: str
    #: SHA-256 of the tokens where their manifest gives it, else "".
    tokens_sha256: str
    #: Volume, name and allocation of the tokens. Decides where there is no hash: then a copy is not known to be one.
    object: str
    #: SHA-256 of the packing; "" for windows.
    packing: str


@dataclass(frozen=True, kw_only=True)
class LoaderState(OrderState):
    """Of a loader of tokens."""

    of = "tokens"
    source = SourceState
    count = "token_count"

    sequence_length: int

    def ignored(self, ours: OrderState) -> set[str]:
        """Where both know a hash of the tokens, it does not matter which copy they are; else nothing but that does."""
        theirs, mine = self._facts(), ours._facts()
        result = set()
        for source in {*self.sources, *ours.sources}:
            sha = _key(source, "tokens_sha256")
            result.add(_key(source, "object") if theirs.get(sha) and mine.get(sha) else sha)
        return result


#: What states are of that do not say it.
_FIRST = LoaderState.of


def _kinds(of: Any) -> dict[str, str]:
    """Types of the plain fields of a dataclass, by name."""
    return {field.name: str(field.type) for field in fields(of) if field.name != "sources"}


def _key(source: str, name: str) -> str:
    return f"{source}{_OF}{name}" if source else name


def _value(state: dict[str, Any], name: str, kind: str) -> Any:
    value = state.get(name)
    # Checkpointers may give an int back as a tensor or array of no dimension.
    if kind == "int" and not isinstance(value, (int, str, type(None))) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, int if kind == "int" else str) or isinstance(value, bool):
        raise DatasetError(f"the loader's state has no valid {name!r}", found=repr(value)[:80])
    return value


def current_state(
    sources: Mapping[str, Samples], order: GlobalOrder, *, global_batch: int, consumed: int, steps_from: int = 0
) -> LoaderState:
    """The state of a loader of these samples after `consumed` of them."""
    return LoaderState(
        seed=order.seed,
        consumed=consumed,
        global_batch=global_batch,
        steps_from=steps_from,
        sequence_length=next(iter(sources.values())).sequence_length,
        window=order.window,
        order=order.name,
        next_samples=order.digest(consumed, NEXT_SAMPLES),
        sources={
            name if len(sources) > 1 else "": SourceState(
                share=share,
                samples=samples.kind,
                token_count=samples.stream.token_count,
                dtype=samples.stream.dtype.name,
                tokens_sha256=samples.stream.manifest.tokens_sha256 if samples.stream.manifest else "",
                object=samples.stream.identity,
                packing=samples.packing,
            )
            for (name, samples), share in zip(sources.items(), order.shares, strict=True)
        },
    )


def check_state(saved: OrderState, ours: OrderState, *, allow_global_batch_change: bool = False) -> None:
    """`ours` is the loader's own state at `saved.consumed`. `DatasetError` names every difference."""
    theirs, mine = saved._facts(), ours._facts()
    ignored = {"steps_from", *saved.ignored(ours), *(["global_batch"] if allow_global_batch_change else [])}
    keys = [key for key in {**theirs, **mine} if key not in ignored]
    different = [key for key in keys if theirs.get(key) != mine.get(key)]
    if set(saved.sources) != set(ours.sources):
        different = [key for key in different if key in _kinds(type(ours))]
        theirs["datasets"], mine["datasets"] = _names(saved), _names(ours)
        different.append("datasets")
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
        expected=", ".join(f"{name} {theirs[name]}" for name in different),
        found=", ".join(f"{name} {mine[name]}" for name in different),
        next_step=advice,
    )


def _names(state: OrderState) -> str:
    return " ".join(name or "one alone" for name in state.sources)
