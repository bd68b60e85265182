"""How a writer or reader holds its volume: given open, or opened by address where and when it is needed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from multiprocessing import util as multiprocessing_util
from typing import Any, TypeAlias

from headrace.device import BlockDevice
from headrace.errors import HeadraceError, SessionLost, UsageError
from headrace.volume import Session, Volume

#: An open volume, or where to find one: one URI, or one for each member.
VolumeLike: TypeAlias = Volume | str | Sequence[str]


class Attachment:
    """An open `Volume` that stays its owner's, or one of our own, opened lazily and closed by `close`.

    Pickles by address. A copy that was unpickled shares one volume and one session with all other copies in its process
    (DCP sends a fresh copy of a writer to its checkpoint process for each save); both are closed when it ends.
    """

    def __init__(
        self,
        volume: VolumeLike,
        *,
        run_id: str | None = None,
        takeover: str = "refuse",
        unfenced: bool = False,
        session: Session | None = None,
    ) -> None:
        self._given = volume if isinstance(volume, Volume) else None
        self._uris: tuple[str, ...] | None = None
        if self._given is None:
            assert not isinstance(volume, Volume)
            self._uris = (volume,) if isinstance(volume, str) else tuple(str(uri) for uri in volume)
            if not self._uris or not all(self._uris):
                raise UsageError("a volume has at least one member", found=repr(volume))
        self._run_id = run_id
        self._takeover = takeover
        self._unfenced = unfenced
        self._given_session = session
        self._held = _Held()
        self._closed = False
        if session is not None:
            self._given = self._given or session.volume

    def open(self, *, writable: bool = False) -> Volume:
        """The volume, opened now if it was not yet. `UsageError` after `close`: a session would never end."""
        if self._closed:
            raise UsageError("this writer or reader was closed", next_step="make a new one")
        if self._given is not None:
            return self._given
        assert self._uris is not None
        return self._held.open(self._uris, writable)

    def session(self) -> Session:
        """The one writing session, begun now if it was not yet. WriterActive where another job holds the volume."""
        if self._given_session is not None and not self._closed:
            return self._given_session
        return self._held.begin(self.open(writable=True), self._run_id, self._takeover, self._unfenced)

    @property
    def devices(self) -> Sequence[BlockDevice]:
        """Of the volume, as far as it is open; asked beside whatever is done with it."""
        volume = self._given or self._held.volume
        return () if volume is None else volume.devices

    def renew(self) -> None:
        """After a failure of the device or the session: close what is our own, so that the next use opens it afresh.

        Whoever opens a device again learns at once whether its target is back; what became of a commit that failed is
        for the next session to find out. What was given from outside is left as it is.
        """
        with contextlib.suppress(HeadraceError):
            # Closing what failed may fail in the same way; the failure that matters was told already.
            self._held.close()

    def close(self) -> None:
        """End what is our own. Harmless when called again."""
        self._closed = True
        self._held.close()

    def __getstate__(self) -> dict[str, Any]:
        if self._given_session is not None:
            raise UsageError(
                "a writer that was given a session cannot go to another process",
                next_step="construct it with the address of the volume",
            )
        uris = self._uris if self._given is None else tuple(self._given.uris)
        if not uris:
            raise UsageError(
                "this volume was opened from devices and has no address to be opened again by",
                next_step="construct the writer with the address of the volume",
            )
        return {"uris": uris, "run_id": self._run_id, "takeover": self._takeover, "unfenced": self._unfenced}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._given = None
        self._given_session = None
        self._closed = False
        self._uris = state["uris"]
        self._run_id = state["run_id"]
        self._takeover = state["takeover"]
        self._unfenced = state["unfenced"]
        self._held = _held_by_process((os.getpid(), self._uris, self._run_id))


class _Held:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.volume: Volume | None = None
        self._writable = False
        self._session: Session | None = None

    def open(self, uris: Sequence[str], writable: bool) -> Volume:
        with self._lock:
            if self.volume is not None and writable and not self._writable:
                self.volume.close()
                self.volume = None
            if self.volume is None:
                self.volume = Volume.open(list(uris), write=writable)
                self._writable = writable
            return self.volume

    def begin(self, volume: Volume, run_id: str | None, takeover: str, unfenced: bool) -> Session:
        with self._lock:
            if self._session is not None:
                try:
                    self._session.check()
                except SessionLost:
                    # Another may hold the volume now; then the next line says who.
                    lost, self._session = self._session, None
                    lost.close()
            if self._session is None:
                self._session = volume.session(run_id=run_id or "", takeover=takeover, unfenced=unfenced)
            return self._session

    def close(self) -> None:
        with self._lock:
            session, self._session = self._session, None
            volume, self.volume = self.volume, None
        try:
            if session is not None:
                session.close()
        finally:
            if volume is not None:
                volume.close()


_shared: dict[tuple[object, ...], _Held] = {}
_shared_lock = threading.Lock()


def _held_by_process(key: tuple[object, ...]) -> _Held:
    with _shared_lock:
        held = _shared.get(key)
        if held is None:
            held = _shared[key] = _Held()
            # Runs at the end of a multiprocessing child too, where atexit does not.
            multiprocessing_util.Finalize(None, held.close, exitpriority=10)
        return held
