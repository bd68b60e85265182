"""Each flow writes files one after another, each durable before the next: data that are brought in."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from headrace.bench.figures import Outcome, rate
from headrace.bench.meter import Meter, series_of
from headrace.bench.patterns.options import Options
from headrace.bench.places import open_writer
from headrace.bench.places.filling import Stopped
from headrace.bench.places.protocol import Place, Shard, Tell, Writer
from headrace.bench.threads import all_ended
from headrace.errors import DeviceTimeout
from headrace.units import MIB, format_bytes, format_rate

#: Bytes of a file, and files of a round where there are no more flows.
_MOST_FILE, _LEAST_FILE = 64 * MIB, 1 * MIB
_FILES = 16
#: A file that takes longer to be written hangs.
_PATIENCE_S = 300.0
#: Flows that were told to end do so with the chunk that they are at.
_END_S = 10.0


def files_of(options: Options) -> tuple[int, int]:
    """Bytes of a file, and files of a round at most: at least one for each flow, whatever the budget."""
    each = max(_LEAST_FILE, min(_MOST_FILE, options.budget_bytes // max(_FILES, options.flows))) // MIB * MIB
    return each, max(options.flows, options.budget_bytes // each)


def run(place: Place, options: Options, tell: Tell) -> Outcome:
    """One round: until `budget_bytes` are written, or the time is up and each flow has finished the file it was at."""
    each, count = files_of(options)
    shards = [Shard(f"ingest-{number:05}", each) for number in range(count)]
    with place.room(shards, options.cache) as room:
        spec = room.for_writer()
        writers: list[Writer] = []
        try:
            for _ in range(options.flows):
                writers.append(open_writer(spec))
            writing = Writing(writers, iter(range(count)), options)
            writing.run(tell, place.name, "sequential ingest")
            # From the first byte until the last file was durable; then what it takes that readers see them.
            begun = time.perf_counter()
            room.commit(writing.proofs)
            seconds = writing.ended - writing.begun + time.perf_counter() - begun
        finally:
            for writer in writers:
                writer.close()
    written = writing.files * each
    return Outcome(
        pattern="ingest", path=place.name, work=f"files of {format_bytes(each)}", flows=options.flows, bytes=written,
        seconds=seconds, series=series_of(writing.meters, writing.started_s), durable=place.durable,
        figures=(rate("write", written, seconds),),
    )  # fmt: skip


class Writing:
    """A thread for each writer; files, by number, go to whoever is free."""

    def __init__(self, writers: list[Writer], numbers: Iterator[int], options: Options) -> None:
        self._writers, self._options = writers, options
        self._left = numbers
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._given_up = threading.Event()
        self._errors: list[BaseException] = []
        self.files = 0
        self.proofs: list[str] = []
        self.begun, self.started_s = time.perf_counter(), time.time()
        self.ended = self.begun
        self.meters = [Meter(self.begun) for _ in writers]

    def run(self, tell: Tell, where: str, text: str) -> None:
        """Until there are no more numbers, the time is up or the budget is written."""
        threads = [
            threading.Thread(target=self._work, args=(writer, meter), name="bench-ingest", daemon=True)
            for writer, meter in zip(self._writers, self.meters, strict=True)
        ]
        end = self.begun + self._options.seconds
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                now = time.perf_counter()
                moved = sum(meter.bytes for meter in self.meters)
                if now >= end or moved >= self._options.budget_bytes:
                    self._stop.set()
                if now >= end + _PATIENCE_S:
                    raise DeviceTimeout("a file is not written", where=where, found=f"{_PATIENCE_S:.0f} s and no end")
                fraction = max((now - self.begun) / self._options.seconds, moved / self._options.budget_bytes)
                tell(min(1.0, fraction), f"{text}: {format_rate(moved / max(now - self.begun, 1e-3))}")
                time.sleep(0.02)
        except BaseException:
            self._stop.set()
            self._given_up.set()
            all_ended(threads, _END_S)
            raise
        if self._errors:
            raise self._errors[0]

    def _work(self, writer: Writer, meter: Meter) -> None:
        def seen(count: int) -> None:
            if self._given_up.is_set():
                raise Stopped
            meter.count(count)

        try:
            while not self._stop.is_set():
                with self._lock:
                    index = next(self._left, None)
                if index is None:
                    return
                proofs = writer.save([index], seen)
                with self._lock:
                    self.ended = time.perf_counter()
                    self.files += 1
                    self.proofs += proofs
        except BaseException as error:
            self._errors.append(error)
            self._stop.set()
