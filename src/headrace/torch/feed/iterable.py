"""Tokens of a volume as an `IterableDataset` of whole batches, with a state.

data = TokenIterable(dataset, global_batch=32)
loader = StatefulDataLoader(data, batch_size=None, num_workers=2)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.utils.data

from headrace.dataset.feed.chosen import ChosenRead
from headrace.errors import DatasetError, UsageError
from headrace.torch.feed.dataset import TokenDataset
from headrace.torch.feed.sampler import Layout, LayoutOptions, refuse_dealers

if TYPE_CHECKING:
    from typing_extensions import Unpack


class TokenIterable(torch.utils.data.IterableDataset[Any]):
    """Batches of this rank, without end, as those of `TokenLoader`: what a `DataLoader` with `batch_size=None` hands
    on as it is. Epochs follow one another without a gap: worker processes would begin each iteration with the same one.

    `prefetch` batches are read ahead. Worker w of n reads batches w, w + n, ... of the rank, which is the order in
    which `DataLoader` takes them. `state_dict` counts batches handed out, not those read ahead; without workers it is
    that of `TokenLoader`, and may be resumed with another world; a worker's fits the same number of workers.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        global_batch: int,
        prefetch: int = 4,
        **layout: Unpack[LayoutOptions],
    ) -> None:
        if prefetch < 1:
            raise UsageError("prefetch is out of range", expected="1 or more", found=str(prefetch))
        self.dataset = dataset
        self.prefetch = prefetch
        self._layout = Layout(dataset, global_batch=global_batch, **layout)
        #: Where this iteration began, the same for all workers, and how many batches of this worker's it has had.
        self._start = self._given = 0

    def __iter__(self) -> Iterator[Any]:
        """Goes on where the last iteration, or the state that was loaded, stands."""
        if self._layout.options.world > 1:
            refuse_dealers("TokenIterable", "give its DataLoader to the training loop as it is, not to `prepare`")
        return self._batches()

    def state_dict(self) -> dict[str, int | str]:
        worker, workers = _worker()
        if workers == 1:
            return self._layout.state(self._start + self._given * self._layout.options.joint_batch)
        return {**self._layout.state(self._start), "worker": worker, "workers": workers, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before the iteration. `DatasetError` says what differs."""
        here, told = _worker(), (state.get("worker", 0), state.get("workers", 1))
        if here != told:
            raise DatasetError(
                "the state is of another number of worker processes",
                expected="worker {} of {}".format(*told),
                found="worker {} of {}".format(*here),
                next_step="resume with as many as before; without workers states fit everywhere",
            )
        self._start, self._given = self._layout.load(state), int(state.get("given", 0))

    def _batches(self) -> Iterator[Any]:
        worker, workers = _worker()
        options = self._layout.options
        first = self._start + worker * options.joint_batch + options.rank * options.local_batch
        ahead: deque[ChosenRead] = deque()
        planned = self._given
        while True:
            while len(ahead) < self.prefetch:
                place = first + planned * workers * options.joint_batch
                ahead.append(self.dataset.submit(range(place, place + options.local_batch)))
                planned += 1
            for read in ahead:
                read.advance()
            batch = self.dataset.batch(ahead[0].wait())
            ahead.popleft()
            self._given += 1
            yield batch


def _worker() -> tuple[int, int]:
    """Which of how many worker processes this is."""
    info = torch.utils.data.get_worker_info()
    return (info.id, info.num_workers) if info is not None else (0, 1)
