"""What goes where, decided before a byte is moved, by the rules of `cp -r`.

    source               destination                        becomes
    file F               a folder D                         D/F
    file F               anything else T                    T
    folder F             a folder D that is there           D/F/...
    folder F             T that is not there                T/...
    F/. (or . or ..)     as a folder, without its name      D/...
    several sources      a folder D                         D/F, D/G/...

A volume has no folders: "a folder that is there" is a name that objects begin with, followed by "/"; the empty name is
the root, which is always there. A destination that ends in "/" is meant as a folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from headrace.errors import ObjectNotFound, UsageError
from headrace.volume.data.names import check_name

if TYPE_CHECKING:
    from headrace.volume.volume import Volume

Existing = Literal["refuse", "skip", "replace", "update"]
#: Deeper folders are refused; a path this deep cannot be opened by its name anyway.
_MAX_DEPTH = 500


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    """How to copy. Each has its default for a careful copy of a folder."""

    #: Folders, too, with all that is in them; else a folder is a problem.
    recursive: bool = False
    #: What is there under the name of a destination: a problem, left as it is, replaced (in a volume: in the same
    #: commit), or compared, and replaced where it differs: so a copy that was interrupted goes on.
    existing: Existing = "refuse"
    #: Copy what symbolic links in folders point to; else each is a problem. Links named as a source are followed.
    follow_links: bool = False
    #: Copy what can be copied, and name the rest; else the first problem ends it.
    keep_going: bool = False
    #: With `keep_going`: targets of which this is true are committed behind all else, in the order in which their
    #: sources were: what says what is in others, and is of use only with them. None: there is nothing of that kind.
    last: Callable[[str], bool] | None = None
    #: Read back what was written, and compare it with its source.
    verify: bool = False
    #: Of new objects: bytes with one checksum. Small files packed together have 4 KiB.
    checksum_block_bytes: int = 64 << 10
    #: Threads; each has a buffer of 16 MiB.
    workers: int = 4

    def __post_init__(self) -> None:
        if self.existing not in get_args(Existing):
            raise UsageError("existing", expected=", ".join(get_args(Existing)), found=repr(self.existing))
        if not 1 <= self.workers <= 64:
            raise UsageError("workers", expected="1 to 64", found=str(self.workers))


@dataclass(frozen=True)
class Problem:
    """Something that is not copied, and why."""

    source: str
    why: str

    def __str__(self) -> str:
        return f"{self.source}: {self.why}"


@dataclass
class CopyReport:
    """What a copy did."""

    #: Files and objects that were asked for.
    planned: int = 0
    files: int = 0
    bytes: int = 0
    #: There already, and left as they were.
    skipped: int = 0
    #: Folders without a file: a volume has no place for them.
    empty_folders: int = 0
    problems: list[Problem] = field(default_factory=list)
    #: Of the commits, where the destination is a volume.
    sequences: list[int] = field(default_factory=list)
    seconds: float = 0.0
    #: Within one volume: the new objects share the bytes of the old ones, and none were moved.
    shared: bool = False


class Item(NamedTuple):
    """One file or object to copy. `what`: a path, or an `ObjectInfo`."""

    source: str
    target: str
    length: int
    what: Any


def comes_last(item: Item, options: CopyOptions) -> bool:
    return options.keep_going and options.last is not None and options.last(item.target)


def in_order(items: Sequence[Item], options: CopyOptions) -> list[Item]:
    """As they are copied. What comes last is in the order in which it was committed, where it is of a volume."""
    last = [item for item in items if comes_last(item, options)]
    return [item for item in items if not comes_last(item, options)] + sorted(last, key=place_of)


def place_of(item: Item) -> tuple[int, str]:
    """Among those that come last."""
    return getattr(item.what, "sequence", 0), item.target


class Plan:
    """Collects items and problems. `tell` hears of each problem at once; `otherwise`: what then becomes of the rest."""

    def __init__(self, options: CopyOptions, tell: Callable[[Problem], None], otherwise: str) -> None:
        self.options = options
        self.tell = tell
        self.otherwise = otherwise
        self.items: list[Item] = []
        self.report = CopyReport()
        #: Targets that are there, and will be replaced.
        self.replaced: set[str] = set()
        #: Of the volume of the destination, when what is there was looked at.
        self.sequence = 0
        self._targets: set[str] = set()

    def refuse(self, source: str, why: str) -> None:
        found = Problem(source, why)
        self.report.problems.append(found)
        self.tell(found)

    def add(self, source: str, target: str, length: int, what: Any) -> None:
        if target in self._targets:
            self.refuse(source, f"another source goes to {target!r}, too")
            return
        self._targets.add(target)
        self.items.append(Item(source, target, length, what))

    def settle_existing(self, length_of: Callable[[str], int | None]) -> list[Item]:
        """Apply `existing` to what is there now. Again, where that has changed. `length_of`: a target; None: not there.
        With "update", gives those that may be the same: `settle_compared` comes next.
        """
        self.report.planned = self.report.planned or len(self.items) + len(self.report.problems)
        self.replaced = set()
        kept, alike = [], []
        for item in self.items:
            length = length_of(item.target)
            if length is None:
                kept.append(item)
            elif self.options.existing == "skip":
                self.report.skipped += 1
            elif self.options.existing == "update" and length == item.length:
                alike.append(item)
                kept.append(item)
            elif self.options.existing in ("replace", "update"):
                self.replaced.add(item.target)
                kept.append(item)
            else:
                self.refuse(item.source, f"{item.target!r} is there already, and is not replaced unless asked for")
        self.items = kept
        return alike

    def settle_compared(self, alike: Sequence[Item], different: Container[str]) -> None:
        """Of what `settle_existing` gave: those whose source is `different` are replaced, the others stay."""
        self.replaced.update(item.target for item in alike if item.source in different)
        same = {item.target for item in alike if item.source not in different}
        self.report.skipped += len(same)
        self.items = [item for item in self.items if item.target not in same]


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if folder else name


def own_name(path: str) -> str:
    """What a folder or file is called at its destination; "" for one that stands for its contents."""
    last = path.rstrip("/").rpartition("/")[2]
    return "" if last in (".", "..", "") else last


def destinations(sources: Sequence[str], destination: str, *, is_folder: bool) -> Iterator[tuple[str, str, str]]:
    """(source, target if it is a file, target if it is a folder). `is_folder`: the destination is one that is there."""
    several = len(sources) > 1
    meant = is_folder or several or destination.endswith("/")
    folder = destination.rstrip("/") or ("/" if destination.startswith("/") else "")
    for source in sources:
        name = own_name(source)
        as_file = join(folder, name or Path(source).resolve().name) if meant else destination
        as_folder = join(folder, name) if (is_folder or several) and name else folder
        yield source, as_file, as_folder


# ---- from a file system ----------------------------------------------------------------------------------------------


def kind_of(mode: int) -> str:
    """What is neither a file nor a folder, in words."""
    for test, word in (
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    ):
        if test(mode):
            return word
    return "no file"


def printable(path: str) -> str:
    """A path for people: bytes that are not UTF-8 as `\\xNN`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def plan_files(plan: Plan, sources: Sequence[str], destination: str, *, is_folder: bool) -> None:
    """Files and folders that become objects."""
    for source, as_file, as_folder in destinations(sources, destination, is_folder=is_folder):
        try:
            found = os.stat(source)  # noqa: PTH116
        except OSError as error:
            plan.refuse(printable(source), error.strerror or str(error))
            continue
        if stat.S_ISDIR(found.st_mode):
            if plan.options.recursive:
                _walk(plan, source, as_folder, ((found.st_dev, found.st_ino),))
            else:
                plan.refuse(printable(source), "is a folder, and those are copied when asked for (-r, recursive)")
        elif stat.S_ISREG(found.st_mode):
            _file(plan, source, as_file, found.st_size)
        else:
            plan.refuse(printable(source), f"is {kind_of(found.st_mode)}")


def _file(plan: Plan, path: str, target: str, length: int) -> None:
    try:
        check_name(target)
    except UsageError as error:
        why = "is not UTF-8" if _is_bytes(target) else f"is not ({error.expected})"
        plan.refuse(printable(path), f"its name in the volume would be '{printable(target)}', which {why}")
        return
    plan.add(printable(path), target, length, path)


def _is_bytes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _walk(plan: Plan, folder: str, target: str, above: tuple[tuple[int, int], ...]) -> None:
    """`above`: the folders that this one is in, so that a link cannot lead round in a circle."""
    if len(above) > _MAX_DEPTH:
        plan.refuse(printable(folder), f"is deeper than {_MAX_DEPTH} folders")
        return
    try:
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except OSError as error:
        plan.refuse(printable(folder), error.strerror or str(error))
        return
    plan.report.empty_folders += not entries
    for entry in entries:
        try:
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                if not plan.options.follow_links:
                    plan.refuse(printable(entry.path), "is a symbolic link, and those are followed when asked for")
                    continue
                found = entry.stat(follow_symlinks=True)
        except OSError as error:
            plan.refuse(printable(entry.path), error.strerror or str(error))
            continue
        name = join(target, entry.name)
        if stat.S_ISREG(found.st_mode):
            _file(plan, entry.path, name, found.st_size)
        elif stat.S_ISDIR(found.st_mode):
            identity = (found.st_dev, found.st_ino)
            if identity in above:
                plan.refuse(printable(entry.path), "is a link to a folder that it is in")
            else:
                _walk(plan, entry.path, name, (*above, identity))
        else:
            plan.refuse(printable(entry.path), f"is {kind_of(found.st_mode)}")


# ---- from a volume ---------------------------------------------------------------------------------------------------


def is_prefix(volume: Volume, name: str) -> bool:
    """Is `name` a folder that is there, as far as a volume has any?"""
    stem = name.rstrip("/")
    return not stem or volume.any(stem + "/")


def plan_objects(
    plan: Plan, volume: Volume, sources: Sequence[str], destination: str, *, is_folder: bool, to_files: bool
) -> None:
    """Objects that become files, or other objects. A name may be an object and a folder at once."""
    for source, as_file, as_folder in destinations(sources, destination, is_folder=is_folder):
        stem = source.rstrip("/")
        stem = "" if stem == "." else stem.removesuffix("/.")
        exact = None
        if stem and source == stem:
            try:
                exact = volume.stat(stem)
            except ObjectNotFound:
                exact = None
        if exact is not None:
            _object(plan, exact.name, as_file, exact, to_files)
        inside: Iterable[Any] = volume.list(stem + "/" if stem else "")
        if not plan.options.recursive:
            if exact is None:
                there = next(iter(inside), None) is not None
                plan.refuse(
                    source or "the whole volume",
                    "is a folder, and those are copied when asked for (-r, recursive)" if there else "no such object",
                )
            continue
        count = 0
        for info in inside:
            count += 1
            rest = info.name[len(stem) + 1 :] if stem else info.name
            _object(plan, info.name, join(as_folder, rest), info, to_files)
        if not count and exact is None and stem:
            plan.refuse(source, "no such object")


def _object(plan: Plan, name: str, target: str, info: Any, to_files: bool) -> None:
    parts = name.split("/")
    if to_files and any(part in (".", "..") for part in parts):
        plan.refuse(repr(name), 'has "." or ".." in its name, which no file may have')
        return
    if not to_files:
        try:
            check_name(target)
        except UsageError as error:
            plan.refuse(repr(name), f"its new name would be {target!r}, which is not ({error.expected})")
            return
    plan.add(name, target, info.length_bytes, info)
