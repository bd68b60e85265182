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
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.checkpoint.names import CheckpointId, parse_checkpoint_id
from headrace.checkpoint.retention import PIN_LIMIT, Found
from headrace.errors import UsageError

_log = logging.getLogger("headrace")
#: So many are looked at in one commit.
_MOST = 1000
_NAME = re.compile(r"pin-[0-9a-f]{16}\.json")


@dataclass(frozen=True, kw_only=True)
class Request:
    id: CheckpointId
    note: str
    path: Path


def ask(folder: str | os.PathLike[str], id: CheckpointId, note: str = "") -> Path:
    """Leave a request; its file, which is gone when the job has pinned. OSError."""
    data = json.dumps({"checkpoint": str(id), "note": note}).encode()
    if len(data) > PIN_LIMIT:
        raise UsageError("the note of a pin is too long", expected=f"{PIN_LIMIT} bytes", found=f"{len(data)} bytes")
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
    for path in paths[:_MOST]:
        try:
            with path.open("rb") as file:
                told = json.loads(file.read(PIN_LIMIT + 1))
            id, note = parse_checkpoint_id(str(told["checkpoint"])), str(told["note"])
        except (OSError, ValueError, TypeError, LookupError, RecursionError, UsageError) as error:
            _log.warning("headrace: %s asks for no pin that can be understood: %s", path, error)
            continue
        if id.run == run:
            found.append(Request(id=id, note=note, path=path))
    return found


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
