"""Where a loader of records stands: as one of tokens (`state`), with what is known of records.

Nothing in a dataset of records says what its bytes are but the bytes themselves, so a state belongs to the very
records it was saved with, and not to a copy of them: volume and allocation are part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.dataset.order.mixture import GlobalOrder
from headrace.dataset.order.state import NEXT_SAMPLES, OrderState
from headrace.dataset.records.records import Records


@dataclass(frozen=True, kw_only=True)
class RecordSource:
    """Which records, of one dataset."""

    #: Records of it in each window of the mixture.
    share: int
    record_count: int
    #: Of all fields.
    record_bytes: int
    #: Volume, name and allocation.
    object: str


@dataclass(frozen=True, kw_only=True)
class RecordState(OrderState):
    """Of a loader of records."""

    of = "records"
    source = RecordSource
    count = "record_count"


def record_state(
    sources: Mapping[str, Records], order: GlobalOrder, *, global_batch: int, consumed: int, steps_from: int
) -> RecordState:
    """The state of a loader of these records after `consumed` of them."""
    return RecordState(
        seed=order.seed,
        consumed=consumed,
        global_batch=global_batch,
        steps_from=steps_from,
        window=order.window,
        order=order.name,
        next_samples=order.digest(consumed, NEXT_SAMPLES),
        sources={
            name if len(sources) > 1 else "": RecordSource(
                share=share, record_count=len(records), record_bytes=records.size_bytes, object=records.identity
            )
            for (name, records), share in zip(sources.items(), order.shares, strict=True)
        },
    )
