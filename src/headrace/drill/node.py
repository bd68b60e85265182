"""A process of the job that the drill stops, cuts off and kills: rank 0, which has the session, or another one.

`python -m headrace.drill.node SETUP`. It carries out one request after another, a line of JSON each, and answers each
with one, soon: what takes as long as the storage does, overwriting its grant again and again (`flood`), which is a save
that does not end, and writing it as it is to be (`write`), goes on behind the answer, and `state` tells how far it is.
"""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np

from headrace.device import BlockDevice
from headrace.drill.content import content
from headrace.errors import HeadraceError
from headrace.volume import Grant, Receipt, Session, Ticket, Transaction, Volume


class Flood:
    """Writes to a grant, other bytes each time, until it is told to end, or refused."""

    def __init__(self, volume: Volume, grant: Grant) -> None:
        self.writes = 0
        self.error: HeadraceError | None = None
        self.receipt: Receipt | None = None
        self._volume = volume
        self._grant = grant
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flood", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        buffer = np.zeros(self._grant.length_bytes, np.uint8)
        words = buffer[: buffer.size // 8 * 8].view("<u8")
        while not self._end.is_set():
            # A number, not a byte: what was written before is never written again, however long this goes on.
            words.fill(1 + self.writes)
            try:
                self.receipt = self._volume.write_grant(self._grant, buffer)
            except HeadraceError as error:
                self.error = error
                return
            self.writes += 1

    @property
    def lives(self) -> bool:
        """Its last write has no answer yet."""
        return self._thread.is_alive()

    def end(self) -> None:
        """With the write that is under way; `lives` tells when that has its answer."""
        self._end.set()


class Save:
    """Writes the shard as it is to be, once."""

    def __init__(self, volume: Volume, grant: Grant) -> None:
        self._done: Future[Receipt] = Future()
        self._thread = threading.Thread(target=self._run, args=(volume, grant), name="save", daemon=True)
        self._thread.start()

    def _run(self, volume: Volume, grant: Grant) -> None:
        try:
            self._done.set_result(volume.write_grant(grant, content(grant.name, grant.length_bytes)))
        except BaseException as error:
            self._done.set_exception(error)

    @property
    def lives(self) -> bool:
        return not self._done.done()

    def receipt(self) -> Receipt:
        """Raises what the write did."""
        return self._done.result()


class Node:
    def __init__(self, setup: dict[str, Any]) -> None:
        ticket = None if setup["ticket"] is None else Ticket.from_json(setup["ticket"])
        self.volume = Volume.open(setup["uris"], write=True, ticket=ticket)
        self.session: Session | None = None
        if setup["coordinator"]:
            self.session = self.volume.session(
                setup["run"], heartbeat_s=setup["heartbeat_s"], takeover="if-dead", unfenced=True
            )
        self.grant: Grant | None = None
        self.transaction: Transaction | None = None
        self.flooding: Flood | None = None
        self.saving: Save | None = None

    def hello(self) -> dict[str, Any]:
        session = self.session
        if session is None:
            return {}
        ticket = session.ticket
        return {"fence": session.fence, "ticket": None if ticket is None else ticket.to_json()}

    # ---- of the coordinator ----

    def begin(self, names: list[str], length_bytes: int, delete: list[str]) -> list[str]:
        """A transaction, with a grant for each shard."""
        assert self.session is not None
        self.transaction = self.session.transaction()
        for name in delete:
            self.transaction.delete(name)
        return [self.transaction.allocate(name, length_bytes).to_json() for name in names]

    def commit(self, receipts: list[str]) -> int:
        assert self.transaction is not None
        for receipt in receipts:
            self.transaction.accept(Receipt.from_json(receipt))
        return self.transaction.commit()

    def losses(self) -> int | None:
        assert self.session is not None
        devices = self.session.devices
        if not all(device.describe().get("transport") == "nvme+tcp" for device in devices):
            return None
        return sum(device.loss_count() for device in devices)

    # ---- of every rank ----

    def take(self, grant: str) -> None:
        self.grant = Grant.from_json(grant)

    def flood(self) -> None:
        assert self.grant is not None
        self.flooding = Flood(self.volume, self.grant)

    def halt(self) -> None:
        if self.flooding is not None:
            self.flooding.end()

    def write(self) -> None:
        assert self.grant is not None
        self.saving = Save(self.volume, self.grant)

    def receipt(self) -> str:
        """Of what was written; when it is there."""
        assert self.saving is not None
        return self.saving.receipt().to_json()

    def state(self) -> dict[str, Any]:
        flooding = self.flooding
        devices = self.volume.writers() if self.session is None else self.session.devices
        error = None if flooding is None else flooding.error
        receipt = None if flooding is None else flooding.receipt
        return {
            "writes": 0 if flooding is None else flooding.writes,
            "error": None if error is None else type(error).__name__,
            # Of a session that is lost, what the target said.
            "said": None if error is None else error.found or str(error),
            "receipt": None if receipt is None else receipt.to_json(),
            "busy": any(work is not None and work.lives for work in (flooding, self.saving)),
            **_counted(devices),
        }


def _counted(devices: list[BlockDevice]) -> dict[str, int]:
    """`written_bytes`: that were answered. `conflicts`: commands that targets answered with Reservation Conflict, or
    aborted for a preemption. `fenced`: members that showed another holder when they were asked, so that nothing more
    was sent there."""
    said = [device.describe() for device in devices]
    return {
        "written_bytes": sum(int(one.get("counters", {}).get("written_bytes", 0)) for one in said),
        "conflicts": sum(int(one.get("counters", {}).get("conflicts", 0)) for one in said),
        "fenced": sum(one.get("guard", {}).get("state") == "fenced" for one in said),
    }


def main() -> None:
    # What is printed by accident must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr

    def answer(said: dict[str, Any]) -> None:
        print(json.dumps(said), file=answers, flush=True)

    try:
        node = Node(json.loads(sys.argv[1]))
        answer({"ok": node.hello()})
    except HeadraceError as error:
        answer({"error": type(error).__name__, "said": str(error)})
        return
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer({"ok": getattr(node, request.pop("do"))(**request)})
        except HeadraceError as error:
            answer({"error": type(error).__name__, "said": str(error)})


if __name__ == "__main__":
    main()
