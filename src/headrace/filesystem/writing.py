"""Who may write: one session of this process for a volume, opened at the first write.

A volume has one writing job. So the first write makes this process that job, until `close` (or its end); any other
writer gets WriterActive meanwhile, which says who holds the volume. File system objects of one process (fsspec keeps
one for each set of options) write with one session, each in transactions of its own.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headrace.volume import Session, Transaction, Volume
from headrace.volume.media.members import addresses as list_addresses


class _Held:
    """The session of this process on one volume, shared by all its file system objects of that volume. Thread-safe."""

    def __init__(self, addresses: str, options: dict[str, Any]) -> None:
        self._addresses = addresses
        self._options = options
        self._lock = threading.Lock()
        self._users: weakref.WeakSet[Writing] = weakref.WeakSet()
        self._volume: Volume | None = None
        self._session: Session | None = None

    def session(self, user: Writing) -> Session:
        with self._lock:
            if self._session is None:
                volume = Volume.open(self._addresses, write=True)
                try:
                    self._session = volume.session(**self._options)
                except BaseException:
                    volume.close()
                    raise
                self._volume = volume
            self._users.add(user)
            return self._session

    def release(self, user: Writing) -> None:
        """It ends with its last user."""
        with self._lock:
            self._users.discard(user)
            if self._users:
                return
            volume, self._volume, self._session = self._volume, None, None
        if volume is not None:
            volume.close()


#: By process, volume and options of the session.
_held: weakref.WeakValueDictionary[tuple[int, tuple[str, ...], str], _Held] = weakref.WeakValueDictionary()
_held_lock = threading.Lock()


def _held_of(addresses: str, options: dict[str, Any]) -> _Held:
    key = (os.getpid(), tuple(sorted(list_addresses(addresses))), repr(sorted(options.items())))
    with _held_lock:
        held = _held.get(key)
        if held is None:
            held = _held[key] = _Held(addresses, options)
        return held


def _after_fork() -> None:
    global _held_lock
    _held_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class Writing:
    """Session and transactions of one file system object. Thread-safe."""

    def __init__(self, addresses: str | None, session: Session | None, options: dict[str, Any]) -> None:
        self._addresses = addresses
        self._options = options
        self._given = session
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._held: _Held | None = None
        self._session: Session | None = session
        #: Inside `with fs.transaction`: everything that is written belongs to it.
        self._common: Transaction | None = None
        #: The transaction of the verb that a thread is within; verbs call one another.
        self._verb = threading.local()

    @property
    def volume(self) -> Volume | None:
        """Sees what this process has committed; None while it has written nothing."""
        self._forget_parents()
        return None if self._session is None else self._session.volume

    def session(self) -> Session:
        """The session, opened where there is none. WriterActive."""
        with self._lock:
            self._forget_parents()
            if self._session is None:
                assert self._addresses is not None
                held = _held_of(self._addresses, self._options)
                self._session = held.session(self)
                self._held = held
            return self._session

    def _forget_parents(self) -> None:
        if self._pid != os.getpid():
            # Forked: the session, its devices and its lock are the parent's. It would refuse us by itself.
            self._pid, self._lock = os.getpid(), threading.RLock()
            self._session, self._held, self._common = self._given, None, None
            self._verb = threading.local()

    def begin(self) -> tuple[Transaction, bool]:
        """The transaction for a new file, and whether the file commits it by itself."""
        with self._lock:
            session = self.session()
            if self._common is not None:
                return self._common, False
            return session.transaction(), True

    @contextmanager
    def one_commit(self) -> Iterator[Transaction]:
        """Everything that this thread does in the block is one commit, or none of it is. Within another one, that
        decides.
        """
        around = self._common or getattr(self._verb, "transaction", None)
        if around is not None:
            yield around
            return
        with self.session().transaction() as transaction:
            self._verb.transaction = transaction
            try:
                yield transaction
            finally:
                self._verb.transaction = None

    def open_common(self) -> None:
        with self._lock:
            if self._common is None:
                self._common = self.session().transaction()

    def end_common(self, *, commit: bool) -> None:
        with self._lock:
            transaction, self._common = self._common, None
        if transaction is not None:
            if commit:
                transaction.commit()
            else:
                transaction.abort()

    def close(self) -> None:
        """Let others write. A session that was given stays open; so does one that another file system object of this
        process writes with.
        """
        with self._lock:
            self._forget_parents()
            common, self._common = self._common, None
            held, self._held = self._held, None
            self._session = self._given
        if common is not None:
            common.abort()
        if held is not None:
            held.release(self)


def replace(transaction: Transaction, name: str) -> None:
    """Make room for a new object of this name: the old one ends in the same commit."""
    if name in transaction.session.volume:
        transaction.delete(name)
