"""A process that reads slices: `python -m headrace.dataset.ingestion.worker DESCRIPTOR`, started by `hire`.

It knows no session. For each part of a slice it asks the process that has one for space, writes straight to the volume
as the host that the session is, and answers with the receipt; what it wrote is part of nothing until the whole slice
is. It ends when the other end of its socket does, whatever it is at.

    -> (what opens the volume, or None, job, bytes of a part, on another machine?)    once, pickled for itself
    -> task                         <- ("counts", counts, tokens)      now and then
                                    <- ("alive",)                      now and then, whatever it is at
                                    <- ("space", part, bytes)
    -> grant                        <- ("receipt", receipt)
    -> None (it has no volume)      <- ("bytes", the part)
                                    <- ("done", done, side) or ("failed", error) or ("defect", traceback)
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from headrace.dataset.ingestion.channel import Gone, Line
from headrace.dataset.ingestion.corpus import CorpusCounts
from headrace.dataset.ingestion.output import U8, Job, Output
from headrace.dataset.ingestion.pool import ALIVE_EVERY_S
from headrace.dataset.ingestion.readers import check_sources
from headrace.dataset.ingestion.slices import Task
from headrace.errors import DatasetError, DeviceError, HeadraceError

if TYPE_CHECKING:
    from headrace.volume import Volume

#: Between two words on how far a slice is: of a worker of this machine, and of one of many.
_TELL_EVERY_S = 0.25, 2.0
#: Between tries to open the volume.
_PAUSES_S = 0.2, 0.5, 1.0, 2.0


class _Worker:
    def __init__(self, line: Line) -> None:
        self._line = line
        self._volume: Volume | None = None
        self._told = 0.0
        self._far = False

    def serve(self) -> None:
        """Read what comes until the other end is closed."""
        job, part_bytes = self._begin()
        while True:
            task: Task = self._line.receive()
            self._told = time.monotonic()
            output = Output(self._store, self._tell, part_bytes, task.most_parts)
            self._answer(lambda task=task, output=output: self._read(job, task, output))

    def _read(self, job: Job, task: Task, output: Output) -> tuple[Any, ...]:
        if self._far:
            check_sources(task.portions)
        return "done", job.run(task, output), output.side

    def _begin(self) -> tuple[Job, int]:
        packed = self._line.receive()
        found: list[Any] = []

        def opened() -> None:
            found.extend(_opened(packed))

        self._answer(opened)
        if not found:
            # Said what it was; nothing more is to be done here.
            self._line.receive()
            raise Gone
        self._volume, job, part_bytes, self._far = found
        return job, part_bytes

    def _answer(self, work: Any) -> None:
        try:
            said = work()
        except HeadraceError as error:
            said = ("failed", error)
        except MemoryError:
            said = ("failed", DatasetError("out of memory", next_step="use fewer workers: --workers"))
        except Gone:
            raise
        except Exception:
            said = ("defect", traceback.format_exc())
        if said is not None:
            self._line.send(said)

    def _tell(self, counts: CorpusCounts, tokens: int) -> None:
        if time.monotonic() - self._told >= _TELL_EVERY_S[self._far]:
            self._told = time.monotonic()
            self._line.send(("counts", counts, tokens))

    def _store(self, part: int, data: U8) -> None:
        self._line.send(("space", part, len(data)))
        grant = self._line.receive()
        if grant is None or self._volume is None:
            self._line.send(("bytes", data.tobytes()))
        else:
            self._line.send(("receipt", self._volume.write_grant(grant, data)))


def _opened(packed: bytes) -> Any:
    """The volume is opened on the way: a network that fails for a moment ends no work of hours. DeviceError."""
    for pause_s in _PAUSES_S:
        try:
            return _open(packed)
        except DeviceError:
            time.sleep(pause_s)
    return _open(packed)


def _open(packed: bytes) -> Any:
    volume, *others = pickle.loads(packed)
    return [None if volume is None else volume(), *others]


def main(descriptor: int) -> None:
    """Serve the other end of this socket until it is closed."""
    # Who started this hears Ctrl-C, and ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = Line(socket.socket(fileno=descriptor))
    threading.Thread(target=_end_with, args=(descriptor, line), name="headrace-ingest-watch", daemon=True).start()
    try:
        _Worker(line).serve()
    except Gone:
        return


def _end_with(descriptor: int, line: Line) -> None:
    """Say now and then that this process lives, and end it when the other end is closed: a native call in the middle of
    a document hears nothing else."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    ends = select.POLLRDHUP | select.POLLHUP | select.POLLERR
    try:
        while not any(event & ends for _, event in poll.poll(ALIVE_EVERY_S * 1000)):
            line.send(("alive",))
    except Gone:
        pass
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
