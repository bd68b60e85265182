"""What is read later is written first: by some threads, each with a writer of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from headrace.bench.places.protocol import Tell, Writer
from headrace.bench.threads import all_ended
from headrace.units import format_bytes

_THREADS = 4
#: Threads that were told to end do so with the chunk that they are at.
_END_S = 10.0


class Stopped(Exception):
    """Raised in a writer whose work is not wanted any more."""


def write_all(open_writer: Callable[[], Writer], lengths: Sequence[int], tell: Tell) -> list[str]:
    """Write shards 0 to n whole; their proofs, in order. The first error, when all have ended; also on Ctrl-C."""
    total, done = max(1, sum(lengths)), 0
    proofs: list[list[str]] = [[] for _ in lengths]
    left = iter(range(len(lengths)))
    lock = threading.Lock()
    ended = threading.Event()
    errors: list[BaseException] = []

    def seen(count: int) -> None:
        nonlocal done
        if ended.is_set():
            raise Stopped
        with lock:
            done += count

    def work() -> None:
        try:
            writer = open_writer()
            try:
                while not ended.is_set():
                    with lock:
                        index = next(left, None)
                    if index is None:
                        return
                    proofs[index] = writer.save([index], seen)
            finally:
                writer.close()
        except BaseException as error:
            errors.append(error)
            ended.set()

    # Daemons: one that the kernel holds in a write must not keep the process.
    threads = [
        threading.Thread(target=work, name="bench-fill", daemon=True) for _ in range(min(_THREADS, len(lengths)))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
                tell(done / total, f"writing what is read: {format_bytes(done)} of {format_bytes(total)}")
    except BaseException:
        ended.set()
        all_ended(threads, _END_S)
        raise
    if errors:
        raise next((error for error in errors if not isinstance(error, Stopped)), errors[0])
    return [proof for one in proofs for proof in one]
