"""What all loaders say of the order that they follow, and of where they stand in it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

from headrace.dataset.order.mixture import GlobalOrder
from headrace.dataset.order.state import OrderState
from headrace.dataset.order.steps import StepOptions
from headrace.device import BlockDevice
from headrace.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self


class InOrder(Protocol):
    """A feed: of tokens, of records."""

    @property
    def name(self) -> str: ...

    @property
    def sources(self) -> Mapping[str, Any]: ...

    @property
    def order(self) -> GlobalOrder: ...

    @property
    def consumed(self) -> int: ...

    @property
    def devices(self) -> list[BlockDevice]: ...

    @property
    def waited(self) -> tuple[float, float, int]: ...

    def state(self) -> OrderState: ...

    def load_state(self, saved: Any) -> None: ...

    def skip(self, batches: int) -> None: ...

    def describe(self) -> dict[str, Any]: ...


class Ordered:
    """Over a feed."""

    options: StepOptions
    _feed: InOrder
    #: Of its states.
    _state: ClassVar[type[OrderState]]

    @property
    def sample_counts(self) -> dict[str, int]:
        """Samples an epoch, of each dataset."""
        samplers = self._feed.order.samplers
        return {name: sampler.sample_count for name, sampler in zip(self._feed.sources, samplers, strict=True)}

    @property
    def sample_count(self) -> int:
        """Samples an epoch, of all datasets together."""
        return sum(self.sample_counts.values())

    @property
    def shares(self) -> dict[str, int]:
        """Samples of each dataset in any window of a mixture."""
        return dict(zip(self._feed.sources, self._feed.order.shares, strict=True))

    @property
    def consumed(self) -> int:
        """Samples handed out to all ranks together, over all epochs."""
        return self._feed.consumed

    @property
    def epochs(self) -> dict[str, float]:
        """How often each dataset was handed out by now."""
        counts = self._feed.order.counts(self._feed.consumed)
        return {name: done / count for (name, count), done in zip(self.sample_counts.items(), counts, strict=True)}

    @property
    def name(self) -> str:
        """Of its datasets."""
        return self._feed.name

    @property
    def devices(self) -> list[BlockDevice]:
        """Members of the volume."""
        return self._feed.devices

    @property
    def waited(self) -> tuple[float, float, int]:
        """Seconds that steps waited for reads, and for batches in all, and bytes handed out: what
        `headrace.measure.Watch` asks before and after each batch."""
        return self._feed.waited

    def describe(self) -> dict[str, Any]:
        """Which share of the bytes came from where, by dataset: `headrace.dataset.Feed.describe`."""
        return self._feed.describe()

    def state_dict(self) -> dict[str, int | str]:
        """A few numbers and strings; the same on every rank."""
        return self._feed.state().to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` stands, in no time, with any number of ranks."""
        self._feed.load_state(self._state.from_dict(state))

    def skip(self, batches: int) -> None:
        """Leave out the next `batches` of this loader, in no time: past data that does harm, say. Before the first
        one."""
        self._feed.skip(batches)

    @abstractmethod
    def __next__(self) -> Any:
        """The next batch of this rank."""

    @abstractmethod
    def close(self) -> None: ...

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a loader cannot leave its process",
            where=self._feed.name,
            next_step="send its state, and make one of the same options there; or use TokenDataset under a DataLoader",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
