"""What runs in a process that decodes: `python -m headrace.dataset.decoding.worker SOCKET MEMORY PLACE...`

It ends when the loader's end of the socket is closed, whatever it is doing then: a thread waits for just that.
"""

from __future__ import annotations

import os
import pickle
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

from headrace.dataset.decoding import processes
from headrace.dataset.decoding.decoder import Record, decode_one
from headrace.dataset.decoding.memory import BEGIN, DONE, PLACE, RAISED, READY, Shared
from headrace.errors import DatasetError, HeadraceError, UsageError


def main(descriptor: int, memory: int, place: tuple[int, int, int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.INSIDE = True
    end = socket.socket(fileno=descriptor)
    threading.Thread(target=_watch, args=(end,), daemon=True).start()
    shared = Shared(memory)
    try:
        decode = _load(*shared.take(place, own=True))
    except BaseException as error:
        _tell(end, RAISED, shared.put(_told(error), BEGIN))
        return
    _tell(end, READY, (BEGIN, 0, 0))
    while request := end.recv(PLACE.size):
        _, *where = PLACE.unpack(request)
        asked = (where[0], where[1], where[2])
        names, records = shared.take(asked, own=False)
        room = shared.behind(asked)
        try:
            made = []
            for number, (name, record) in enumerate(zip(names, records, strict=True)):
                shared.at = number
                made.append(decode_one(decode, name, {kind: data.data for kind, data in record.items()}))
            answer = (DONE, shared.put(made, room))
        except BaseException as error:
            answer = (RAISED, shared.put(_told(error), room))
        # Nothing of them stays: the memory is the next one's.
        made = records = []
        _tell(end, *answer)


def _load(program: processes.Program, pickled: bytes) -> Callable[[Record], Any]:
    """The function, out of the module that it stands in; where that is the program itself, its file is run under
    another name, as `multiprocessing` does."""
    if program is not None:
        kind, where, sys.argv = program
        run = runpy.run_module if kind == "module" else runpy.run_path
        main = types.ModuleType("__mp_main__")
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        main.__dict__.update(run(where, run_name="__mp_main__"))
    try:
        found: Callable[[Record], Any] = pickle.loads(pickled)
    except HeadraceError:
        raise
    except Exception as error:
        raise UsageError(
            "decode cannot be loaded in a process of its own", found=f"{type(error).__name__}: {error}",
            next_step="put it into a module that every process can import, or decode in threads",
        ) from error  # fmt: skip
    return found


def _told(error: BaseException) -> tuple[Exception, str]:
    """An exception as it can travel, and where it came from."""
    text = "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, Exception):
        try:
            again = pickle.loads(pickle.dumps(error))
            if type(again) is type(error):
                # Notes travel with it.
                return error, text
        except Exception:
            pass
    notes = [str(each) for each in getattr(error, "__notes__", [])]
    return DatasetError("decode failed", where="; ".join(notes) or None, found=f"{type(error).__name__}: {error}"), text


def _tell(end: socket.socket, kind: int, place: tuple[int, int, int]) -> None:
    try:
        end.send(PLACE.pack(kind, *place), socket.MSG_NOSIGNAL)
    except OSError:
        os._exit(0)


def _watch(end: socket.socket) -> None:
    """Until the other end is closed; also while something is decoded that does not end."""
    poll = select.poll()
    poll.register(end, 0)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), (int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])))
