"""Steps that people ask a running job to keep. A volume has one writer, and that is the job: so whoever wants a pin
leaves a file in a folder that the job was told of, and the job pins with its next commit.

    headrace checkpoint pin RUN/step-N --ask FOLDER      anybody who may write there
    WriterOptions(pin_requests="FOLDER")                 the coordinator looks there at each commit

A request has a name that chance made, is there whole (renamed), and goes when the commit that has its pin is durable. A
file that is none is left alone. What is asked for a step that is not there (any more) goes, too, and the log says so.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.checkpoint.names import CheckpointId, parse_checkpoint_id
from headrace.checkpoint.order import Found
from headrace.checkpoint.retention import PIN_LIMIT, check_note
from headrace.errors import UsageError

_log = logging.getLogger("headrace")
#: So many are looked at in one commit.
_MOST = 1000
#: With the name of the checkpoint; written by hand, its note may be shorter in a pin.
_REQUEST_LIMIT = 2 * PIN_LIMIT
_NAME = re.compile(r"pin-[0-9a-f]{16}\.json")


@dataclass(frozen=True, kw_only=True)
class Request:
    id: CheckpointId
    note: str
    path: Path


def ask(folder: str | os.PathLike[str], id: CheckpointId, note: str = "") -> Path:
    """Leave a request; its file, which is gone when the job has pinned. OSError."""
    data = json.dumps({"checkpoint": str(id), "note": note}).encode()
    check_note(note)
    path = Path(folder) / f"pin-{secrets.token_hex(8)}.json"
    part = path.with_suffix(".part")
    try:
        part.write_bytes(data)
        part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return path


def asked(folder: str | os.PathLike[str] | None, run: str) -> list[Request]:
    """For steps of this run. A folder that cannot be read keeps no save from its commit: the log says so."""
    if folder is None:
        return []
    found = []
    try:
        paths = sorted(path for path in Path(folder).iterdir() if _NAME.fullmatch(path.name))
    except OSError as error:
        _log.warning("headrace: nobody can ask for pins: %s", error)
        return []
    # Others each time, so that what nobody takes away is in nobody's way for ever.
    for path in paths if len(paths) <= _MOST else random.sample(paths, _MOST):
        try:
            told = json.loads(_read(path))
            id, note = parse_checkpoint_id(str(told["checkpoint"])), str(told["note"])
            check_note(note)
        except (OSError, ValueError, TypeError, LookupError, RecursionError, UsageError) as error:
            _log.warning("headrace: %s asks for no pin that can be understood: %s", path, error)
            continue
        if id.run == run:
            found.append(Request(id=id, note=note, path=path))
    return found


def _read(path: Path) -> bytes:
    # Whoever may write to the folder may have made a pipe, of which an open waits for a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no file")
        return file.read(_REQUEST_LIMIT)


def there(requests: Iterable[Request], found: Found, newest: CheckpointId) -> list[Request]:
    """Those for steps that a commit can pin, each step once; `newest` comes with it."""
    ids = {*found.ids, newest}
    return list({one.id: one for one in requests if one.id in ids and one.id not in found.pinned}.values())


def done(requests: Iterable[Request], found: Found, newest: CheckpointId) -> None:
    """The commit is durable: nobody waits for these any more."""
    ids = {*found.ids, newest}
    for one in requests:
        if one.id not in ids:
            _log.warning("headrace: a pin was asked for, and %s is not there (any more)", one.id)
        try:
            one.path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("headrace: %s is done, and stays: %s", one.path, error)
