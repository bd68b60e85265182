"""`headrace://` for the ranks of a job: what DCP saves through it is one commit.

    share_paths()                                             # on every rank, once, after init_process_group
    dcp.save(state, storage_writer=FsspecWriter("headrace://pretrain/step-100", sync_files=False))
    dcp.load(state, storage_reader=FsspecReader("headrace://pretrain/step-100"))

For who can give a path and nothing else. `VolumeWriter` and `VolumeReader` are the better way in where they can be
given: they copy nothing, check what is written against what was staged, and read a slice where a slice is wanted.

A volume has one writing session. So ranks get their space from rank 0, as in `ranks/scribe`. DCP writes `*.distcp` on
all ranks, then `.metadata.tmp`, and renames that to `.metadata`: until then none of it is visible, and the rename is
one commit. A folder that is saved into again changes with it, all at once; a job that dies before leaves what was.
"""

from __future__ import annotations

from typing import Any, ClassVar

import fsspec

from headrace.errors import UsageError
from headrace.filesystem import HeadraceFileSystem
from headrace.filesystem.paths import PROTOCOL, as_os_errors, object_name
from headrace.filesystem.writing import Writing
from headrace.torch.ranks.desk import Job
from headrace.torch.ranks.gathered import GatheredStream
from headrace.torch.ranks.scribe import Scribe
from headrace.volume import Session, Volume
from headrace.volume.media.members import addresses as list_addresses

#: What DCP calls its files.
_DATA, _METADATA, _UNFINISHED = ".distcp", ".metadata", ".metadata.tmp"


def share_paths(*, deadline_s: float = 600.0) -> None:
    """On every rank, after `init_process_group`: in this process `headrace://` writes as one job with the other ranks.

    `deadline_s`: the longest that a rank waits for rank 0, which has the session from its first write on.
    """
    JobFileSystem.job, JobFileSystem.deadline_s = Job.here(), deadline_s
    JobFileSystem.clear_instance_cache()
    fsspec.register_implementation(PROTOCOL, JobFileSystem, clobber=True)


class JobFileSystem(HeadraceFileSystem):
    """See the module text. All other writing is rank 0's, as in `HeadraceFileSystem`."""

    job: ClassVar[Job] = Job()
    deadline_s: ClassVar[float] = 600.0

    def __init__(self, volume: Any = None, **options: Any) -> None:
        super().__init__(volume, **options)
        if self._addresses is None:
            raise UsageError("a session was given", next_step="give the addresses of the volume: rank 0 opens one")
        session = options.get("session_options") or {}
        self._scribe = Scribe.of(
            tuple(list_addresses(self._addresses)), session.get("run_id", "headrace"), self.job, self.deadline_s
        )
        self.writing = _JobWriting(self._scribe)

    def close(self) -> None:
        super().close()
        self._scribe.close()

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        name = object_name(path)
        folder, _, last = name.rpartition("/")
        if mode != "wb" or not last.endswith((_DATA, _UNFINISHED)):
            return super()._open(path, mode, *args, **kwargs)
        if last.endswith(_UNFINISHED) and last != _UNFINISHED:
            raise UsageError(
                "use_collectives=False is not supported: a checkpoint has one commit", where=f"headrace://{name}"
            )
        final = f"{folder}/{_METADATA}" if last == _UNFINISHED else name
        return GatheredStream(lambda parts: self._scribe.write(final, parts, group=folder))

    def rm(self, path: Any, *args: Any, **kwargs: Any) -> None:
        name = object_name(path) if isinstance(path, str) else ""
        folder, _, last = name.rpartition("/")
        if last == _METADATA and name in self._pending(folder):
            # It makes room for that of the save under way: which takes its place, with all else.
            return
        super().rm(path, *args, **kwargs)

    def mv(self, path1: str, path2: str, *args: Any, **kwargs: Any) -> None:
        old, new = object_name(path1), object_name(path2)
        folder = old.rpartition("/")[0]
        if new == f"{folder}/{_METADATA}" and old == f"{folder}/{_UNFINISHED}" and new in self._pending(folder):
            with as_os_errors():
                self._scribe.publish(folder)
            return
        super().mv(path1, path2, *args, **kwargs)

    def _pending(self, folder: str) -> dict[str, int]:
        with as_os_errors():
            return self._scribe.pending(folder)


class _JobWriting(Writing):
    """Writes with the session of the job."""

    def __init__(self, scribe: Scribe) -> None:
        super().__init__(None, None, {})
        self._scribe = scribe

    @property
    def volume(self) -> Volume | None:
        return self._scribe.volume

    def session(self) -> Session:
        return self._scribe.session()
