"""The coordinator's side of one save. Call in this order:

    save = Save(session, CheckpointId(run, step))   nothing happens in the volume yet
    grants = save.allocate(lengths)                 one transaction opens; space for each rank, of *this* save only
        ... every rank writes through its grant and flushes on its own association ...
    save.accept(receipts)
    sequence = save.commit(manifest)                everything becomes visible, in one commit record, or nothing
    save.abort()                                    instead, at any point: nothing was ever visible

A crash anywhere before `commit` returns leaves the checkpoints before it as they were.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from headrace.checkpoint.manifest import Manifest, ObjectEntry, encode
from headrace.checkpoint.names import CheckpointId
from headrace.checkpoint.order import find
from headrace.checkpoint.requests import asked, done, there
from headrace.checkpoint.retention import Retention, deciding, objects_of, put_pin, refuse_pinned, reserve
from headrace.errors import CheckpointFailed, ObjectExists
from headrace.volume import Grant, Receipt, Session, Transaction

CHECKSUM_BLOCK_BYTES = 65536


class Save:
    """See the module text.

    Args:
        overwrite: replace a committed checkpoint of this id, in the same commit; otherwise ObjectExists.
        retention: with the commit, delete what is to go of the run then; this step is one of its last.
        pin_requests: folder in which people ask for pins, which come with the commit (`headrace.checkpoint.requests`).
    """

    def __init__(
        self,
        session: Session,
        id: CheckpointId,
        *,
        overwrite: bool = False,
        retention: Retention | None = None,
        pin_requests: str | None = None,
    ) -> None:
        self.id = id
        self.created_unix = time.time()
        self._session = session
        self._overwrite = overwrite
        self._retention = retention
        self._pin_requests = pin_requests
        self._tx: Transaction | None = None
        self._pending: set[str] = set()
        self.objects: list[ObjectEntry] = []

    def allocate(self, lengths: Sequence[int]) -> list[Grant | None]:
        """Space for `lengths[rank]` bytes of each rank; None for a rank that has nothing to write.

        VolumeFull is raised before a byte is written, and with a retention also where one checkpoint more than those
        that remain would not fit: their space is reserved, for as long as the session lasts. ObjectExists where this
        step is committed already, CheckpointFailed where it is pinned.
        """
        if self._tx is not None:
            raise CheckpointFailed("this save has its space already")
        committed = objects_of(self._session.volume, self.id)
        if committed and not self._overwrite:
            raise ObjectExists(
                f"checkpoint {self.id} is committed already",
                next_step="a job that went back replaces what it left behind with WriterOptions(overwrite=True), in "
                "one commit; else save another step, or as another run",
            )
        refuse_pinned(self.id, committed)
        if self._retention is not None:
            # While one is written the others are still there. Too little is found out by the first save of the job.
            reserve(self._session, self.id.run, sum(lengths), self._retention, self.id)
        tx = self._session.transaction()
        self._tx = tx
        for name in committed:
            tx.delete(name)
        grants: list[Grant | None] = []
        try:
            for rank, length in enumerate(lengths):
                if not length:
                    grants.append(None)
                    continue
                entry = ObjectEntry(name=self.id.data(rank), length_bytes=length)
                grants.append(tx.allocate(entry.name, length, checksum_block_bytes=CHECKSUM_BLOCK_BYTES))
                self.objects.append(entry)
                self._pending.add(entry.name)
        except BaseException:
            # No rank ever hears of these, so nobody writes there: their space must not wait for late writes.
            for grant in grants:
                if grant is not None:
                    tx.withdraw(grant)
            raise
        return grants

    def accept(self, receipts: Sequence[Receipt | None]) -> None:
        """What the ranks answered, None for those without a grant."""
        tx = self._open()
        for receipt in receipts:
            if receipt is not None:
                tx.accept(receipt)
                self._pending.discard(receipt.name)
        if self._pending:
            raise CheckpointFailed("a rank did not confirm its write", found=sorted(self._pending)[0])

    def settle(self, receipts: Sequence[Receipt | None]) -> None:
        """Before `abort`: these ranks have ended their writes, so that their space is free at once."""
        tx = self._open()
        for receipt in receipts:
            if receipt is not None:
                tx.accept(receipt)

    def commit(self, manifest: Manifest) -> int:
        """Make the save visible and durable; the sequence number of its commit record."""
        tx = self._open()
        if self._pending:
            raise CheckpointFailed("a rank did not confirm its write", found=sorted(self._pending)[0])
        tx.put(self.id.manifest, encode(manifest), checksum_block_bytes=4096)
        with deciding:
            # Somebody may have pinned it while the ranks wrote what is to replace it.
            refuse_pinned(self.id, objects_of(self._session.volume, self.id))
            requests = asked(self._pin_requests, self.id.run)
            if self._retention is not None or requests:
                found = find(self._session.volume, self.id.run)
                wanted = there(requests, found, self.id)
                for one in wanted:
                    put_pin(tx, one.id, one.note)
                if self._retention is not None:
                    for old in self._retention.going(found, self.id, {one.id for one in wanted}):
                        for name in objects_of(self._session.volume, old):
                            tx.delete(name)
            sequence = tx.commit()
        self._tx = None
        if requests:
            done(requests, found, self.id)
        return sequence

    def abort(self) -> None:
        """Forget the save; harmless when it is committed or was never begun."""
        tx, self._tx = self._tx, None
        if tx is not None:
            tx.abort()

    def _open(self) -> Transaction:
        if self._tx is None:
            raise CheckpointFailed("this save is not under way", next_step="allocate comes first, commit or abort last")
        return self._tx
