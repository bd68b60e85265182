"""The threads between two ends: each takes the next pack of small files, or the next piece of a large one, into its own
buffer, and hands it on. Nothing is queued, so memory is what the threads have.

The thread that called waits; Ctrl-C reaches it there. Then no thread begins anything new, what is under way ends (the
devices have their deadlines), and what is not whole is taken away.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.device.reference import U8
from headrace.errors import CopyFailed, UsageError, VolumeFull
from headrace.units import format_bytes
from headrace.volume.copy.compare import CompareSink
from headrace.volume.copy.files import FileSink, FileSource, ItemError
from headrace.volume.copy.objects import ObjectSink, ObjectSource, share
from headrace.volume.copy.plan import (
    CopyOptions,
    CopyReport,
    Item,
    Plan,
    Problem,
    comes_last,
    in_order,
    is_prefix,
    plan_files,
    plan_objects,
)
from headrace.volume.workers import Workers

if TYPE_CHECKING:
    from headrace.volume.volume import Volume
    from headrace.volume.writing.session import Session

#: Files up to this travel in packs; longer ones in pieces.
PACKED_BYTES = 1 << 20
#: A pack, and a piece.
PIECE_BYTES = 16 << 20
PACK_FILES = 2048
_PAGE = 4096
#: Seconds between two looks at how far it is.
_TICK_S = 0.1


@dataclass(frozen=True)
class Progress:
    """How far a copy is. `verifying`: everything is written, and read back."""

    done_bytes: int
    total_bytes: int
    done_files: int
    total_files: int
    verifying: bool = False


#: What becomes of the rest, where a problem ends a copy into a volume.
_NOTHING = "nothing was written"

Shown = Callable[[Progress], None]
Told = Callable[[Problem], None]


def plan_in(
    volume: Volume,
    sources: Sequence[str | os.PathLike[str]],
    destination: str,
    options: CopyOptions | None = None,
    *,
    problem: Told | None = None,
) -> Plan:
    """What `copy_in` would do, with everything that is in its way found out: for `copy_in(plan=...)`, so that nobody
    holds the volume for writing while a large folder is looked at. Raises as `copy_in`.
    """
    plan = Plan(options or CopyOptions(), problem or _nothing, _NOTHING)
    plan_files(plan, [os.fspath(source) for source in sources], destination, is_folder=is_prefix(volume, destination))
    _settle_in(plan, volume, FileSource())
    _check_space(volume, _most_free(volume), plan.items)
    return plan


def copy_in(
    session: Session,
    sources: Sequence[str | os.PathLike[str]],
    destination: str,
    options: CopyOptions | None = None,
    *,
    progress: Shown | None = None,
    problem: Told | None = None,
    plan: Plan | None = None,
) -> CopyReport:
    """Files and folders become objects of the session's volume. Raises CopyFailed where something was not copied and
    `keep_going` is off: then nothing was. `problem` is told of each at once. `plan`: what `plan_in` made of the same.
    """
    volume = session.volume
    if plan is None:
        plan = plan_in(volume, sources, destination, options, problem=problem)
    elif plan.sequence != volume.sequence:
        # Somebody committed something since.
        _settle_in(plan, volume, FileSource())
    options, replaced = plan.options, plan.replaced
    _check_space(volume, session.free_bytes, plan.items)
    report = _run(plan, FileSource(), lambda: ObjectSink(session, options, replaced), progress)
    if options.verify:
        _read_back(plan, volume, report, progress)
    return report


def copy_out(
    volume: Volume,
    names: Sequence[str],
    destination: str | os.PathLike[str],
    options: CopyOptions | None = None,
    *,
    progress: Shown | None = None,
    problem: Told | None = None,
) -> CopyReport:
    """Objects, or with `recursive` all whose names begin with NAME/, become files. Raises as `copy_in`."""
    options = options or CopyOptions()
    target = os.fspath(destination)
    is_folder = os.path.isdir(target)  # noqa: PTH112
    plan = Plan(options, problem or _nothing, "what was whole by then has its name")
    if (len(names) > 1 or target.endswith("/")) and not is_folder and not (options.recursive and len(names) == 1):
        raise UsageError("the destination is not a folder", where=target, next_step="make it first")
    plan_objects(plan, volume, names, target, is_folder=is_folder, to_files=True)
    _refuse_files_in_the_way(plan)
    alike = plan.settle_existing(_length_of_file)
    _stop_at_problems(plan, _NOTHING)
    _compare_alike(plan, alike, ObjectSource(volume), FileSource(), lambda item: item._replace(what=item.target))
    report = _run(plan, ObjectSource(volume), lambda: FileSink(plan.replaced), progress)
    if options.verify:
        _compare(plan, volume, report, progress, lambda item: item._replace(what=item.target))
    return report


def plan_between(
    volume: Volume,
    other: Volume,
    names: Sequence[str],
    destination: str,
    options: CopyOptions | None = None,
    *,
    problem: Told | None = None,
) -> Plan:
    """What `copy_between` would do, as `plan_in`. `other`: the volume of the destination."""
    plan = Plan(options or CopyOptions(), problem or _nothing, _NOTHING)
    plan_objects(plan, volume, names, destination, is_folder=is_prefix(other, destination), to_files=False)
    _settle_in(plan, other, ObjectSource(volume))
    if volume.id != other.id:
        _check_space(other, _most_free(other), plan.items)
    return plan


def copy_between(
    volume: Volume,
    session: Session,
    names: Sequence[str],
    destination: str,
    options: CopyOptions | None = None,
    *,
    progress: Shown | None = None,
    problem: Told | None = None,
    plan: Plan | None = None,
) -> CopyReport:
    """Objects of `volume` become objects of the session's volume. Raises as `copy_in`. Where that is the same one, no
    byte is moved: the new objects share those of the old ones, in one commit (`CopyReport.shared`).
    """
    other = session.volume
    if plan is None:
        plan = plan_between(volume, other, names, destination, options, problem=problem)
    elif plan.sequence != other.sequence:
        _settle_in(plan, other, ObjectSource(volume))
    options, replaced = plan.options, plan.replaced
    if volume.id == other.id:
        report = share(session, plan)
    else:
        _check_space(other, session.free_bytes, plan.items)
        report = _run(plan, ObjectSource(volume), lambda: ObjectSink(session, options, replaced), progress)
    if options.verify:
        # Read through the checksums of their new place; that they are those of the old one was seen on the way.
        done = [item._replace(what=other.stat(item.target)) for item in _copied(plan, report)]
        _second_run(plan, done, ObjectSource(other), _Nowhere(), report, progress)
    return report


def _settle_in(plan: Plan, volume: Volume, source: Any) -> None:
    """Against what is committed in the volume of the destination. CopyFailed."""
    plan.sequence = volume.sequence

    def length_of(name: str) -> int | None:
        return volume.stat(name).length_bytes if name in volume else None

    alike = plan.settle_existing(length_of)
    _stop_at_problems(plan, _NOTHING)
    _compare_alike(plan, alike, source, ObjectSource(volume), lambda item: item._replace(what=volume.stat(item.target)))


def _length_of_file(path: str) -> int | None:
    """-1: something is there, and no file."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def _compare_alike(plan: Plan, alike: Sequence[Item], source: Any, there: Any, theirs: Callable[[Item], Item]) -> None:
    """With "update": what is there with the same bytes stays."""
    if not alike:
        return
    again = Plan(replace(plan.options, keep_going=True), _nothing, _NOTHING)
    again.items = list(alike)
    _run(again, source, lambda: CompareSink(there, {item.source: theirs(item) for item in alike}), None)
    plan.settle_compared(alike, {problem.source for problem in again.report.problems})


def _nothing(problem: Problem) -> None:
    pass


def _stop_at_problems(plan: Plan, so: str) -> None:
    found = plan.report.problems
    if found and not plan.options.keep_going:
        raise CopyFailed(
            f"{len(found):,} of {max(plan.report.planned, len(found)):,} cannot be copied, the first: {found[0]}; {so}",
            next_step="leave them out, or choose otherwise: see `headrace volume cp --help`",
            problems=found,
        )


def _refuse_files_in_the_way(plan: Plan) -> None:
    """An object "a" beside "a/b" would have to be a file and a folder."""
    folders: set[str] = set()
    for item in plan.items:
        folder = item.target.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    for item in [item for item in plan.items if item.target in folders]:
        plan.items.remove(item)
        plan.refuse(item.source, "is an object and the folder of others, which a file cannot be")


def _most_free(volume: Volume) -> int:
    """What is in quarantine may be free for the next session; what is missing that one knows exactly."""
    info = volume.info()
    return info.capacity_bytes - info.used_bytes


def _check_space(volume: Volume, free_bytes: int, items: Sequence[Item]) -> None:
    """The data alone; a commit finds out about the rest."""
    need = sum(item.length for item in items)
    if need > free_bytes:
        raise VolumeFull(
            "the volume has no room for this",
            where=repr(volume),
            expected=f"{format_bytes(need)} of free space",
            found=format_bytes(free_bytes),
            next_step="delete objects that are not needed (`headrace volume rm`)",
        )


def _read_back(plan: Plan, volume: Volume, report: CopyReport, progress: Shown | None) -> None:
    _compare(plan, volume, report, progress, lambda item: item)


def _compare(
    plan: Plan, volume: Volume, report: CopyReport, progress: Shown | None, file_of: Callable[[Item], Item]
) -> None:
    """The objects once more, against the files."""
    files = {item.source: file_of(item) for item in plan.items}
    done = [
        item if not isinstance(item.what, str) else item._replace(what=volume.stat(item.target))
        for item in _copied(plan, report)
    ]
    _second_run(plan, done, ObjectSource(volume), CompareSink(FileSource(), files), report, progress)


def _copied(plan: Plan, report: CopyReport) -> list[Item]:
    """What is there now; with `keep_going` not all that was planned."""
    failed = {problem.source for problem in report.problems}
    return [item for item in plan.items if item.source not in failed]


def _second_run(
    plan: Plan, items: list[Item], source: Any, sink: Any, report: CopyReport, progress: Shown | None
) -> None:
    again = Plan(plan.options, plan.tell, "the others may be good")
    again.items = items
    told = None if progress is None else lambda now: progress(replace(now, verifying=True))
    try:
        found = _run(again, source, lambda: sink, told)
    except CopyFailed as error:
        raise CopyFailed(
            f"everything was copied, but {error.what}", next_step="copy it again", problems=error.problems
        ) from error
    report.problems += found.problems


class _Nowhere:
    """Where bytes go that were only to be read."""

    def open(self, item: Item) -> _Nowhere:
        return self

    def write_pack(self, items: Sequence[Item], offsets: Sequence[int], buffer: U8) -> list[ItemError | None]:
        return [None] * len(items)

    def write(self, offset: int, data: U8) -> None:
        pass

    def finish(self, reader: Any) -> None:
        pass

    def abandon(self) -> None:
        pass

    def commit(self) -> list[int]:
        return []

    def abort(self) -> None:
        pass


# ---- the threads -----------------------------------------------------------------------------------------------------


class _Large:
    """A large file under way: its pieces may be anywhere."""

    def __init__(self, item: Item, pieces: int) -> None:
        self.item = item
        self.left = pieces
        self.reader: Any = None
        self.writer: Any = None
        self.failed = False
        self.lock = threading.Lock()


class _Piece(NamedTuple):
    large: _Large
    offset: int


class _Pack(NamedTuple):
    items: list[Item]
    offsets: list[int]


def _tasks(items: Sequence[Item], options: CopyOptions) -> Iterator[_Pack | _Piece]:
    """Packs as they come; large files in between. What comes last is not in a pack with others."""
    pack: list[Item] = []
    offsets: list[int] = []
    end = 0
    for item in in_order(items, options):
        if item.length > PACKED_BYTES:
            large = _Large(item, -(-item.length // PIECE_BYTES))
            for offset in range(0, item.length, PIECE_BYTES):
                yield _Piece(large, offset)
            continue
        full = end + item.length > PIECE_BYTES or len(pack) == PACK_FILES
        if pack and (full or comes_last(item, options) != comes_last(pack[0], options)):
            yield _Pack(pack, offsets)
            pack, offsets, end = [], [], 0
        pack.append(item)
        offsets.append(end)
        end += item.length
    if pack:
        yield _Pack(pack, offsets)


class _Copy:
    def __init__(self, plan: Plan, source: Any, sink: Any) -> None:
        self._plan = plan
        self._source = source
        self._sink = sink
        self._tasks = _tasks(plan.items, plan.options)
        self._lock = threading.Lock()
        self._open: set[_Large] = set()
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self.bytes = 0
        self.files = 0

    def work(self) -> None:
        """The life of one thread."""
        buffer = _aligned(PIECE_BYTES)
        try:
            while not self.stopping.is_set():
                with self._lock:
                    task = next(self._tasks, None)
                if task is None:
                    return
                if isinstance(task, _Pack):
                    self._pack(task.items, task.offsets, buffer)
                else:
                    self._piece(task.large, task.offset, buffer)
        except BaseException as error:
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error
        self.stopping.set()

    def _refuse(self, error: ItemError) -> None:
        with self._lock:
            self._plan.refuse(error.item.source, error.why)
        if not self._plan.options.keep_going:
            self._stop(error)

    def _count(self, files: int, size: int) -> None:
        with self._lock:
            self.files += files
            self.bytes += size

    def _pack(self, items: list[Item], offsets: list[int], buffer: U8) -> None:
        end = offsets[-1] + items[-1].length
        found = self._source.read_pack(items, offsets, buffer[:end])
        for item, offset, error in zip(items, offsets, found, strict=True):
            if error is not None:
                # What is packed is written as it is, and this is not even of the file.
                buffer[offset : offset + item.length] = 0
        items, offsets = self._good(items, offsets, found)
        if not items or self.stopping.is_set():
            return
        items, _ = self._good(items, offsets, self._sink.write_pack(items, offsets, buffer[:end]))
        self._count(len(items), sum(item.length for item in items))

    def _good(
        self, items: list[Item], offsets: list[int], found: list[ItemError | None]
    ) -> tuple[list[Item], list[int]]:
        if not any(found):
            return items, offsets
        for error in found:
            if error is not None:
                self._refuse(error)
        kept = [(item, offset) for item, offset, error in zip(items, offsets, found, strict=True) if error is None]
        return [item for item, _ in kept], [offset for _, offset in kept]

    def _piece(self, large: _Large, offset: int, buffer: U8) -> None:
        piece = buffer[: min(PIECE_BYTES, large.item.length - offset)]
        try:
            with large.lock:
                if not large.failed and large.writer is None:
                    with self._lock:
                        self._open.add(large)
                    large.reader = self._source.open(large.item)
                    large.writer = self._sink.open(large.item)
            if not large.failed:
                large.reader.read_into(offset, piece)
                large.writer.write(offset, piece)
                self._count(0, len(piece))
        except ItemError as error:
            with large.lock:
                first, large.failed = not large.failed, True
            if first:
                self._refuse(error)
        with large.lock:
            large.left -= 1
            last = large.left == 0
        if last:
            self._end(large)

    def _end(self, large: _Large) -> None:
        try:
            if not large.failed:
                large.writer.finish(large.reader)
        except ItemError as error:
            large.failed = True
            self._refuse(error)
        self._close(large)
        if not large.failed:
            self._count(1, 0)

    def _close(self, large: _Large) -> None:
        with self._lock:
            self._open.discard(large)
        if large.failed and large.writer is not None:
            large.writer.abandon()
        if large.reader is not None:
            large.reader.close()

    def abandon(self) -> None:
        """After the threads have ended: take away what is not whole."""
        for large in list(self._open):
            large.failed = True
            self._close(large)


def _run(plan: Plan, source: Any, make_sink: Callable[[], Any], progress: Shown | None) -> CopyReport:
    started = time.monotonic()
    report = plan.report
    if not plan.items:
        return report
    sink = make_sink()
    copy = _Copy(plan, source, sink)
    total = sum(item.length for item in plan.items)
    count = min(plan.options.workers, max(1, len(plan.items), total // PIECE_BYTES))
    workers = Workers(copy.work, "headrace-copy", count)
    try:
        try:
            workers.start()
            ended = False
            while not ended:
                ended = workers.wait(_TICK_S)
                if progress is not None:
                    progress(Progress(copy.bytes, total, copy.files, len(plan.items)))
        finally:
            copy.stopping.set()
            workers.wait()
        if copy.error is not None and not isinstance(copy.error, ItemError):
            raise copy.error
        if copy.error is not None:
            _stop_at_problems(plan, plan.otherwise)
        report.sequences += sink.commit()
    except BaseException:
        copy.abandon()
        sink.abort()
        raise
    report.files += copy.files
    report.bytes += copy.bytes
    report.seconds = time.monotonic() - started
    return report


def _aligned(size: int) -> U8:
    """A buffer that devices opened with O_DIRECT take as it is."""
    raw = np.empty(size + _PAGE, np.uint8)
    start = -raw.ctypes.data % _PAGE
    return raw[start : start + size]
