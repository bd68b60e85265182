"""What the processes of a job write into one volume as files: each writes its own, and groups of them are published in
one commit by the one that has the session."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Sequence
from multiprocessing import util as multiprocessing_util
from typing import Any

import numpy as np

from headrace.device.protocol import Buffer
from headrace.errors import HeadraceError, ObjectExists, ObjectNotFound, UsageError
from headrace.torch.ranks.attachment import Attachment
from headrace.torch.ranks.desk import Desk, Inquirer, Job
from headrace.volume import Grant, Parts, Receipt, Session, Volume
from headrace.volume.writing.gathering import Gathering


class Scribe:
    """Writes objects from any process of a job. Thread-safe.

    One for each volume of a process: `of`. The session begins with the first write of rank 0, in the process that
    writes, and ends with that process or `close`.
    """

    def __init__(self, addresses: Sequence[str], run_id: str, job: Job, deadline_s: float) -> None:
        self._job = job
        self._attachment = Attachment(addresses, run_id=run_id)
        self._deadline_s = deadline_s
        self._lock = threading.RLock()
        self._gathering: Gathering | None = None
        self._desk: Desk | None = None
        self._inquirer: Inquirer | None = None
        self._prefix = ",".join(sorted(addresses))

    @staticmethod
    def of(addresses: Sequence[str], run_id: str, job: Job, deadline_s: float) -> Scribe:
        """The one of this process."""
        key = (os.getpid(), tuple(addresses), run_id, job)
        with _scribes_lock:
            found = _scribes.get(key)
            if found is None:
                found = _scribes[key] = Scribe(addresses, run_id, job, deadline_s)
                # Runs at the end of a multiprocessing child too, where atexit does not.
                multiprocessing_util.Finalize(None, found.close, exitpriority=20)
            return found

    @property
    def volume(self) -> Volume | None:
        """That of the session, which sees its own commits at once; None where this process has none."""
        return self._attachment.open(writable=True) if self._gathering is not None else None

    def session(self) -> Session:
        """For what else is written, by rank 0 alone. UsageError on others."""
        if self._job.rank:
            raise UsageError(
                "only rank 0 of a job may do this: it has the session of the volume",
                found=f"rank {self._job.rank}",
                next_step="other ranks write files of DCP",
            )
        self._begun()
        return self._attachment.session()

    def write(self, name: str, data: Buffer | Parts, *, group: str | None = None, vacant: bool = False) -> None:
        """One object, durable when this returns, and visible with its group; at once where it has none. `vacant`: the
        group is a folder that must not be there: ObjectExists."""
        alone = group is None
        # A group that no other is beside.
        within = group if group is not None else f"one {os.urandom(8).hex()}/"
        length = data.nbytes if isinstance(data, (Parts, np.ndarray)) else memoryview(data).nbytes
        asked = {"do": "allocate", "group": within, "name": name, "length": length, "vacant": vacant}
        grant = Grant.from_json(self._ask(asked))
        try:
            receipt = self._attachment.open(writable=True).write_grant(grant, data)
        except BaseException:
            if alone:
                # Nobody else knows of it: its space would be held until the session ends.
                with contextlib.suppress(HeadraceError):
                    self.give_up(within)
            raise
        self._ask({"do": "accept", "group": within, "receipt": receipt.to_json(), "publish": alone})

    def pending(self, group: str) -> dict[str, int]:
        """Length in bytes of each object of the group that any process has written. Begins no session, and waits for
        none."""
        if self._gathering is None:
            inquirer = self._elsewhere()
            if inquirer is None or not inquirer.is_there():
                return {}
        found: dict[str, int] = self._ask({"do": "pending", "group": group})
        return found

    def publish(self, group: str, *, delete: Iterable[str] = (), vacant: bool = False) -> None:
        """All of the group becomes visible, in one commit."""
        self._ask({"do": "publish", "group": group, "delete": list(delete), "vacant": vacant})

    def give_up(self, group: str) -> None:
        self._ask({"do": "give_up", "group": group})

    def change(self, *, delete: Iterable[str] = (), rename: Iterable[tuple[str, str]] = ()) -> None:
        """Objects end, or have other names, in one commit. What has the new name gives way."""
        self._ask({"do": "change", "delete": list(delete), "rename": [list(pair) for pair in rename]})

    def close(self) -> None:
        """End the session of this process. What was not published is given up."""
        with self._lock:
            desk, self._desk = self._desk, None
            gathering, self._gathering = self._gathering, None
            self._inquirer = None
        if desk is not None:
            desk.close()
        if gathering is not None:
            gathering.close()
        self._attachment.renew()

    # ---- where it is done ----

    def _ask(self, what: dict[str, Any]) -> Any:
        inquirer = None if self._gathering is not None else self._elsewhere()
        return self._answer(what) if inquirer is None else inquirer.ask(what)

    def _elsewhere(self) -> Inquirer | None:
        """Asks who has the session, or will have it; None: that is for this process."""
        if self._job.world == 1:
            return None
        with self._lock:
            if self._inquirer is None:
                self._inquirer = Inquirer(self._job, self._prefix, self._deadline_s)
            inquirer = self._inquirer
        # A rank may have several processes: the trainer, and one that saves.
        return None if self._job.rank == 0 and not inquirer.is_beside() else inquirer

    def _begun(self) -> Gathering:
        with self._lock:
            if self._gathering is None:
                self._attachment.session()
                self._gathering = Gathering(self._attachment.session)
                if self._job.world > 1:
                    self._desk = Desk(self._job, self._prefix, self._answer)
            return self._gathering

    def _answer(self, what: dict[str, Any]) -> Any:
        gathering, do = self._begun(), what["do"]
        group = what.get("group", "")
        if what.get("vacant"):
            self._check_vacant(group)
        if do == "allocate":
            return gathering.allocate(group, what["name"], what["length"]).to_json()
        if do == "accept":
            gathering.accept(group, Receipt.from_json(what["receipt"]))
            if what["publish"]:
                gathering.publish(group)
        elif do == "pending":
            return gathering.pending(group)
        elif do == "publish":
            gathering.publish(group, delete=what["delete"])
        elif do == "give_up":
            gathering.give_up(group)
        else:
            self._change(what["delete"], what["rename"])
        return None

    def _check_vacant(self, folder: str) -> None:
        volume = self._attachment.open(writable=True)
        if folder in volume or volume.any(f"{folder}/"):
            raise ObjectExists(
                f"{folder!r} is there already",
                next_step="save under another name, or delete what is there first",
            )

    def _change(self, delete: list[str], rename: list[list[str]]) -> None:
        volume = self._attachment.open(writable=True)
        with self._attachment.session().transaction() as transaction:
            for name in delete:
                transaction.delete(name)
            for old, new in rename:
                if old not in volume:
                    raise ObjectNotFound(f"there is no object {old!r} to rename")
                if new in volume and new not in delete:
                    transaction.delete(new)
                transaction.rename(old, new)


_scribes: dict[tuple[object, ...], Scribe] = {}
_scribes_lock = threading.Lock()
