"""What a machine shows of itself: files of sysfs, procfs and /etc below a root folder, and what a few commands print.

A recorded machine (`headrace.doctor.record`) is a folder of the same files, read by the same code; what a command
printed stands there in `commands/`. Nothing here is trusted: every read has a bound, nothing but plain files is opened,
links are followed inside of the root only, and what is not there, unreadable or no text is `None`.

A path of a network file system is never touched: its server may be away, and then whoever asks waits with it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from headrace.accidents.apart import printed_by

#: Of one file. Files of sysfs have at most a page; routes and socket tables of large machines have more.
FILE_MAX_BYTES = 256 << 10
#: Of one folder.
NAMES_MAX = 4096
#: Of a file that is searched for a word (`/proc/kallsyms` has 10 to 20 MiB).
SEARCH_MAX_BYTES = 64 << 20
#: For one command.
COMMAND_TIMEOUT_S = 10.0
_PRINTED_MAX_BYTES = 4 << 20
#: Where commands are that a user's PATH may lack.
_SBIN = "/usr/sbin:/sbin:/usr/bin:/bin"
LINKS_MAX = 40


class Machine:
    """This machine, or a recorded one. Paths are absolute ones of that machine, as `/sys/class/nvme/nvme0/state`.

    What could not be read for want of a right is in `denied`: with root there would be more to say. Commands that did
    not end in time are in `endless`: they are not asked again, for the next interface or device.
    """

    def __init__(self, root: Path | str = "/") -> None:
        self.root = Path(root)
        #: This very machine: what it does not show may be measured.
        self.live = str(self.root) == "/"
        self._base = self.root.resolve()
        self.denied: set[str] = set()
        self.endless: set[str] = set()

    # ---- files ----

    def text(self, path: str, *, most: int = FILE_MAX_BYTES, errors: str = "strict") -> str | None:
        """What the file says, white space at its ends cut off; `None`: not there, not readable, longer than `most`
        bytes, or no text (`errors`: as `bytes.decode` has it)."""
        found = self._read(path, most)
        if found is None or len(found) > most:
            return None
        try:
            return found.decode(errors=errors).strip("\0 \t\r\n")
        except UnicodeDecodeError:
            return None

    def word(self, path: str, *, most: int = 1024) -> str | None:
        """One line of printable text, not empty; else `None`. What the kernel writes for "nothing" is nothing."""
        text = self.text(path, most=most)
        if not text or not text.isprintable() or text in ("(null)", "(none)"):
            return None
        return text

    def number(self, path: str) -> int | None:
        """A whole number, decimal or with 0x, of at most 64 bits."""
        return number_of(self.text(path, most=64))

    def is_set(self, path: str) -> bool | None:
        """Whether a file that holds a secret holds one; the secret is not kept. `None`: nothing says so."""
        found = self._read(path, 8)
        return None if found is None else found.strip(b"\0 \t\r\n") not in (b"", b"none", b"(none)", b"(null)")

    def finds(self, path: str, needle: str) -> bool | None:
        """Whether a file, however long, has this word; `None`: it cannot be read."""
        descriptor = self._open(path)
        if descriptor is None:
            return None
        word, rest, read = needle.encode(), b"", 0
        with os.fdopen(descriptor, "rb") as file:
            try:
                while read < SEARCH_MAX_BYTES and (piece := file.read(1 << 20)):
                    if word in rest + piece:
                        return True
                    rest, read = piece[-len(word) :], read + len(piece)
            except OSError:
                return None
        return False

    def names(self, path: str) -> list[str]:
        """What is in a folder, in order, at most `NAMES_MAX`; nothing where there is none."""
        where = self._inside(path)
        found: list[str] = []
        if where is None:
            return found
        try:
            with os.scandir(where) as entries:
                for entry in entries:
                    if len(found) == NAMES_MAX:
                        break
                    if entry.name.isprintable():
                        found.append(entry.name)
        except PermissionError:
            self.denied.add(path)
        except OSError:
            pass
        return sorted(found, key=_in_order)

    def exists(self, path: str) -> bool:
        where = self._inside(path)
        return where is not None and os.path.exists(where)  # noqa: PTH110 (never raises)

    def real(self, path: str) -> str | None:
        """The path with every link followed; `None`: it is not there."""
        where = self._inside(path)
        if where is None or not os.path.exists(where):  # noqa: PTH110
            return None
        if self.live:
            return os.path.realpath(where)
        return "/" + str(where.relative_to(self._base)).removeprefix(".")

    def command(self, name: str, *words: str) -> str | None:
        """What a command prints; `None`: it is not there, failed, printed too much, or did not end in time. None of
        them changes anything, and none needs root. `name`: of the file that a recorded machine has for it."""
        if not self.live:
            return self.text(f"/commands/{name}", most=_PRINTED_MAX_BYTES)
        environment = {**os.environ, "LC_ALL": "C", "PATH": f"{os.environ.get('PATH', '')}:{_SBIN}"}
        if words[0] in self.endless:
            return None
        try:
            said = printed_by(words, environment, timeout_s=COMMAND_TIMEOUT_S, most_bytes=_PRINTED_MAX_BYTES)
        except TimeoutError:
            self.endless.add(words[0])
            return None
        return None if said is None else said.decode(errors="replace").strip()

    def asked(self, name: str, ask: Callable[[], str | None]) -> str | None:
        """What the kernel answers to a question that no file and no command puts; of a recorded machine what it
        answered then."""
        if self.live:
            return ask()
        return self.text(f"/commands/{name}", most=1024)

    # ---- below ----

    def _read(self, path: str, most: int) -> bytes | None:
        """At most `most` bytes and one more."""
        descriptor = self._open(path)
        if descriptor is None:
            return None
        parts: list[bytes] = []
        left = most + 1
        try:
            while left > 0 and (piece := os.read(descriptor, left)):
                parts.append(piece)
                left -= len(piece)
        except PermissionError:
            self.denied.add(path)
            return None
        except OSError:
            # A device that is gone, an attribute that has nothing to say.
            return None
        finally:
            os.close(descriptor)
        return b"".join(parts)

    def _open(self, path: str) -> int | None:
        where = self._inside(path)
        if where is None:
            return None
        try:
            # Not waiting: a pipe in a recorded tree would have nobody at its other end.
            descriptor = os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except PermissionError:
            self.denied.add(path)
            return None
        except (OSError, ValueError):
            return None
        with suppress(OSError):
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
        os.close(descriptor)
        return None

    def _inside(self, path: str) -> Path | None:
        """Where it lies on this machine, links followed; `None`: it cannot be, or leads out of the root."""
        if self.live:
            return Path(path)
        try:
            root = self._base
            done, todo, links = root, list(reversed(Path(path).parts[1:])), 0
            while todo:
                part = todo.pop()
                if part == "..":
                    done = done.parent if done != root else root
                    continue
                here = done / part
                if not here.is_symlink():
                    done = here
                    continue
                links += 1
                if links > LINKS_MAX:
                    return None
                target = here.readlink()
                if target.is_absolute():
                    done = root
                todo += [part for part in reversed(target.parts) if part != "/"]
            return done
        except (OSError, RuntimeError, ValueError):
            return None


def number_of(text: str | None) -> int | None:
    """A whole number, decimal or with 0x, of at most 64 bits; else `None`."""
    if not text or len(text) > 24 or not text.isascii():
        return None
    try:
        value = int(text, 16 if text.lower().startswith(("0x", "-0x")) else 10)
    except ValueError:
        return None
    return value if -(1 << 63) <= value < 1 << 64 else None


def _in_order(name: str) -> list[tuple[int, int, str]]:
    """nvme2 before nvme10."""
    parts: list[tuple[int, int, str]] = []
    digits = ""
    for character in name + "\0":
        if character.isascii() and character.isdigit() and len(digits) < 18:
            digits += character
            continue
        if digits:
            parts.append((0, int(digits), ""))
            digits = ""
        parts.append((1, 0, character))
    return parts
