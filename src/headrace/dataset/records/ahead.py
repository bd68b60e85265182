"""Records ahead of time: batches that the native engine reads while earlier ones are worked on, and decoded in threads.

    with RecordsAhead(records, batches, decode=to_image, threads=4) as ahead:
        for images in ahead:                      # the records of one batch, in the order that was asked for
            ...

Which records a batch has is the caller's: `batches` gives arrays of numbers, as far ahead as they are read. Where they
lie is looked up for several batches in one go, while others are on their way. Nothing runs here between two calls but
the threads that decode: a batch is handed to them when a call finds that its bytes have come.

    batches ->  located: it is known where they lie  ->  in flight, oldest first  ->  decoded  ->  handed out
                (up to `prefetch`)                       (up to `prefetch`, and `ahead_bytes`)
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from headrace.dataset.decoding.decoder import Decoder, decode_one
from headrace.dataset.decoding.decoder import Record as Record
from headrace.dataset.decoding.processes import decoder_of
from headrace.dataset.records.memory import KeptMemory
from headrace.errors import DeviceTimeout, HeadraceError, UsageError
from headrace.units import GIB, MIB, format_bytes
from headrace.volume import hunger
from headrace.volume.data import patience

if TYPE_CHECKING:
    from typing_extensions import Self

I64 = npt.NDArray[np.int64]
T = TypeVar("T")


#: Seconds that look-ups for later batches may take: what takes longer is done when it is needed.
_AHEAD_S = 1.0


@dataclass(frozen=True, kw_only=True)
class AheadOptions:
    """How far ahead, and who decodes."""

    #: Batches that are read ahead.
    prefetch: int = 4
    #: No further batch is begun while as many bytes are ahead; one always is.
    ahead_bytes: int = 1 * GIB
    #: Of memory that was handed out and is nobody's any more, kept for the next batches.
    kept_bytes: int = 256 * MIB
    #: Of the index that may stay in memory, so that nothing has to be looked up on the way: for some 40 bytes a record.
    index_bytes: int = 32 * MIB
    #: That decode; 0: the thread that asks for the batch.
    threads: int = 0
    #: That decode, in place of threads: for functions that keep other threads from running. They must be able to import
    #: the function; what it gets is theirs until it returns, and what it gives must be picklable.
    processes: int = 0
    #: Seconds that a batch may let the step wait, and a process may be at one record.
    stall_timeout_s: float = 300.0
    #: Verify the checksum of every block that is read.
    verify: bool = True

    def __post_init__(self) -> None:
        for name, low, high in (
            ("prefetch", 1, 1024),
            ("ahead_bytes", 1, 1 << 50),
            ("kept_bytes", 0, 1 << 50),
            ("index_bytes", 0, 1 << 40),
            ("threads", 0, 1024),
            ("processes", 0, 1024),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise UsageError(f"{name} is out of range", expected=f"{low} to {high}", found=repr(value))
        if self.threads and self.processes:
            raise UsageError("records are decoded by threads or by processes", expected="one of the two")
        if not self.stall_timeout_s > 0:
            raise UsageError("stall_timeout_s is out of range", expected="more than 0", found=str(self.stall_timeout_s))


@dataclass(frozen=True, kw_only=True)
class AheadMetrics:
    """Counters since it was made; times in seconds."""

    batches: int
    records: int
    #: Of fields, handed out.
    payload_bytes: int
    #: Waited for batches, all together, the last one, the longest one.
    wait_s: float
    last_wait_s: float
    longest_wait_s: float
    #: Batches that lie ready now, of those in flight, and the bytes of all of these.
    ready: int
    in_flight: int
    ahead_bytes: int
    #: Kept for the next batches; asked of the system so far.
    kept_bytes: int
    made_bytes: int


class Readable(Protocol):
    """`Records`, or several datasets of them as one (`JoinedRecords`). What look-ups give is what reads are made of;
    both have `done`, `wait` and `waiting`."""

    @property
    def name(self) -> str: ...

    def called(self, record: int) -> str: ...

    def hold_index(self, most_bytes: int) -> int: ...

    def submit_locate(self, batches: Sequence[npt.ArrayLike], kinds: Sequence[str] | None = None) -> Any: ...

    def submit_places(self, places: Any, *, verify: bool = True, memory: KeptMemory | None = None) -> Any: ...


@dataclass
class _Flight(Generic[T]):
    numbers: I64
    places: Any
    batch: Any
    #: Once the bytes are here: the records, and what is made of them.
    found: list[Record] | None = None
    decoding: Sequence[Future[Sequence[T]]] = field(default_factory=list)
    #: The read ended with an error that was raised: read again when it is asked for again.
    failed: bool = False


class RecordsAhead(Generic[T]):
    """Iterator over batches of decoded records. Not for several threads at once.

    `batches`: numbers of the records of each batch, taken from it as they are read ahead. `kinds`: the fields that are
    read; None: all. `decode`: of one record, its fields by kind, views of memory that lives as long as any of them;
    None: the fields themselves. In the order of `batches`, whichever record is decoded first. `decoder`: who decodes
    instead, and stays the caller's, who closes it.

    An error of a read, and what `decode` raises, comes out of the call that would have given the batch; the next call
    tries the same batch again. `DeviceTimeout` where it does not come within `stall_timeout_s`. What `batches` raises
    comes when all that it gave before was handed out, and from then on: nobody takes it for the end.
    """

    def __init__(
        self,
        records: Readable,
        batches: Iterable[npt.ArrayLike],
        *,
        kinds: Sequence[str] | None = None,
        decode: Callable[[Record], T] | None = None,
        decoder: Decoder[T] | None = None,
        options: AheadOptions | None = None,
    ) -> None:
        self.records = records
        self.options = options or AheadOptions()
        self._batches = iter(batches)
        self._batches_error: BaseException | None = None
        self._kinds = kinds
        self._decode = decode
        self._located: deque[tuple[I64, Any]] = deque()
        #: Taken from `batches`, and being looked up (None: that failed, and is to be tried again) together; of so many
        #: that could not be, the first one alone.
        self._sought: list[I64] = []
        self._lookup: Any = None
        self._singly = 0
        self._indexed = False
        self._flights: deque[_Flight[T]] = deque()
        self._memory = KeptMemory(self.options.kept_bytes)
        #: Made here, and so closed here.
        self._own: Decoder[T] | None = None
        if decoder is None:
            self._own = decoder_of(
                decode,
                threads=self.options.threads,
                processes=self.options.processes,
                patience_s=self.options.stall_timeout_s,
            )
        self._decoder = decoder or self._own
        self._begun = self._closed = False
        self._process = os.getpid()
        self._batch_count = self._record_count = self._payload_bytes = 0
        self._wait_s = self._last_wait_s = self._longest_wait_s = 0.0
        #: Of all waiting that for reads, of records or of where they lie; the rest is for who decodes.
        self.fetch_wait_s = 0.0
        hunger.join(self)

    def __iter__(self) -> Self:
        self._usable()
        self._begin()
        return self

    def __next__(self) -> list[T]:
        self._usable()
        started = time.monotonic()
        end = started + self.options.stall_timeout_s
        if not self._begun:
            self._begin()
        try:
            made = patience.by(end, self._next, end)
        finally:
            self._last_wait_s = time.monotonic() - started
            self._wait_s += self._last_wait_s
            self._longest_wait_s = max(self._longest_wait_s, self._last_wait_s)
        flight = self._flights.popleft()
        self._batch_count += 1
        self._record_count += len(flight.numbers)
        self._payload_bytes += flight.places.total_bytes
        # What is wrong with a read that comes later must not cost the caller the batch in hand: the next call tries
        # again, and raises what is then wrong.
        with contextlib.suppress(HeadraceError):
            self._fill_ahead()
            self._hand_on()
        return made

    def _next(self, end_s: float) -> list[T]:
        if not self._flights:
            self._fill()
        while not self._flights and self._sought:
            self._take_located(end_s)
            self._fill()
        if not self._flights:
            if self._batches_error is not None:
                raise self._batches_error
            raise StopIteration
        return self._arrive(self._flights[0], end_s)

    @property
    def counted(self) -> tuple[int, int]:
        """Batches and bytes that were handed out."""
        return self._batch_count, self._payload_bytes

    def metrics(self) -> AheadMetrics:
        """Of now; other threads may ask, too."""
        # They change while somebody else asks.
        flights = list(self._flights)
        return AheadMetrics(
            batches=self._batch_count,
            records=self._record_count,
            payload_bytes=self._payload_bytes,
            wait_s=self._wait_s,
            last_wait_s=self._last_wait_s,
            longest_wait_s=self._longest_wait_s,
            ready=sum(flight.batch.done() for flight in flights),
            in_flight=len(flights),
            ahead_bytes=sum(flight.places.total_bytes for flight in flights),
            kept_bytes=self._memory.free_bytes(),
            made_bytes=self._memory.made_bytes,
        )

    def batches_ahead(self) -> list[bool]:
        # They change while somebody else asks.
        return [flight.batch.done() for flight in list(self._flights)]

    def close(self) -> None:
        """Forget what is in flight, and end the threads: a record that is being decoded is decoded to its end. Safe to
        call again."""
        self._closed = True
        hunger.leave(self)
        for flight in self._flights:
            for each in flight.decoding:
                each.cancel()
        if self._own is not None:
            self._own.close()
        self._flights.clear()
        self._located.clear()
        self._sought, self._lookup = [], None
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _usable(self) -> None:
        if self._closed:
            raise UsageError("the reader of records is closed", where=self.records.name)
        if os.getpid() != self._process:
            # Connections and the engine's threads do not survive a fork; a read would wait for ever.
            raise UsageError(
                "the reader of records was made in another process",
                where=self.records.name,
                next_step="open volume and records in the process that uses them",
            )

    def _begin(self) -> None:
        """What is wrong is told by the batch that it is wrong with."""
        self._begun = True
        with contextlib.suppress(HeadraceError):
            self._fill_ahead()

    def _ahead_bytes(self) -> int:
        return sum(flight.places.total_bytes for flight in self._flights)

    def _fill_ahead(self) -> None:
        patience.by(time.monotonic() + _AHEAD_S, self._fill)

    def _fill(self) -> None:
        """Begin what there is room for. Waits for nothing that was asked for."""
        ahead = self._ahead_bytes()
        while len(self._flights) < self.options.prefetch:
            self._seek()
            if not self._located:
                return
            numbers, places = self._located[0]
            if self._flights and ahead + places.total_bytes > self.options.ahead_bytes:
                break
            batch = self._read(places)
            self._located.popleft()
            self._flights.append(_Flight(numbers=numbers, places=places, batch=batch))
            ahead += places.total_bytes
        self._seek()

    def _read(self, places: Any) -> Any:
        return self.records.submit_places(places, verify=self.options.verify, memory=self._memory)

    def _seek(self) -> None:
        """Look up the next batches, as many at a time as are read ahead, while others are on their way."""
        try:
            self._seek_now()
        except HeadraceError:
            # It is told when all that was found is handed out.
            if not self._located and not self._flights:
                raise

    def _seek_now(self) -> None:
        if self._lookup is not None:
            if not self._lookup.done():
                return
            self._take_located(None)
        if len(self._located) >= self.options.prefetch:
            return
        if not self._sought and self._batches_error is None:
            try:
                for numbers in itertools.islice(self._batches, self.options.prefetch):
                    self._sought.append(np.atleast_1d(np.asarray(numbers)))
            except BaseException as error:
                self._batches_error = error
                if not isinstance(error, Exception):
                    raise
        if self._sought and self._lookup is None:
            self._look_up()

    def _look_up(self) -> None:
        if not self._indexed:
            self.records.hold_index(self.options.index_bytes)
            self._indexed = True
        batches = self._sought[:1] if self._singly else self._sought
        try:
            self._lookup = self.records.submit_locate(batches, self._kinds)
        except HeadraceError:
            if not self._apart():
                raise
            self._lookup = self.records.submit_locate(self._sought[:1], self._kinds)

    def _apart(self) -> bool:
        """What is wrong with a look-up of several batches may be wrong with one of them: from now on each has its
        own. False: it was of one."""
        if self._singly or len(self._sought) == 1:
            return False
        self._singly = len(self._sought)
        return True

    def _take_located(self, end_s: float | None) -> None:
        """What was looked up, when it is there."""
        if self._lookup is None:
            self._look_up()
        lookup, started = self._lookup, time.monotonic()
        try:
            places = lookup.wait(None if end_s is None else max(0.0, end_s - started))
        except HeadraceError as error:
            if isinstance(error, DeviceTimeout) and not lookup.done():
                raise self._stalled("was not found", lookup.waiting()) from error
            self._lookup = None
            if self._apart():
                return
            raise
        finally:
            if end_s is not None:
                self.fetch_wait_s += time.monotonic() - started
        self._located.extend(zip(self._sought[: len(places)], places, strict=True))
        del self._sought[: len(places)]
        self._singly, self._lookup = max(0, self._singly - 1), None

    def _arrive(self, flight: _Flight[T], end_s: float) -> list[T]:
        """The records of the first batch, when their bytes are here and decoded."""
        if flight.failed:
            flight.batch = self._read(flight.places)
            flight.failed = False
        if flight.found is None:
            started = time.monotonic()
            try:
                flight.found = flight.batch.wait(max(0.0, end_s - started))
            except HeadraceError as error:
                if isinstance(error, DeviceTimeout) and not flight.batch.done():
                    raise self._stalled("did not come", flight.batch.waiting()) from error
                flight.failed = True
                raise
            finally:
                self.fetch_wait_s += time.monotonic() - started
        self._hand_on()
        if self._decoder is None:
            return list(map(self._one, flight.numbers.tolist(), flight.found))
        try:
            made: list[T] = []
            for each in flight.decoding:
                made += each.result(max(0.0, end_s - time.monotonic()))
            return made
        except BaseException as error:
            late = isinstance(error, FutureTimeout) and not any(
                each.done() and each.exception() is error for each in flight.decoding
            )
            if late:
                raise self._stalled("was not decoded", advice="`decode` takes too long") from error
            # The next call decodes the batch again; its bytes are here.
            for each in flight.decoding:
                each.cancel()
            flight.decoding = []
            raise

    def _hand_on(self) -> None:
        """Batches whose bytes are here go to who decodes them, the oldest first."""
        for flight in self._flights if self._decoder is not None else ():
            if flight.found is None:
                if flight.failed or not flight.batch.done():
                    return
                try:
                    # A look at what is wrong with it is not to hold up the batch in hand.
                    flight.found = patience.by(time.monotonic() + _AHEAD_S, flight.batch.wait, 0)
                except HeadraceError:
                    # Raised when it is this batch's turn.
                    return
            if not flight.decoding and self._decoder is not None:
                names = [self.records.called(number) for number in flight.numbers.tolist()]
                flight.decoding = self._decoder.begin(names, flight.found)

    def _one(self, number: int, record: Record) -> T:
        if self._decode is None:
            return cast(T, record)
        return decode_one(self._decode, self.records.called(number), record)

    def _stalled(
        self, what: str, waiting: str | None = None, advice: str = "look at the target and the path to it"
    ) -> DeviceTimeout:
        ready = sum(flight.batch.done() for flight in self._flights)
        return DeviceTimeout(
            f"a batch of records {what} in time",
            where=waiting or self.records.name,
            expected=f"within {self.options.stall_timeout_s:g} s",
            found=f"{len(self._flights)} batches of {format_bytes(self._ahead_bytes())} in flight, {ready} arrived",
            next_step=f"{advice}; the next call waits for the same batch again",
        )
