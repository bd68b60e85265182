"""A recorded machine: the files that were read, and nothing else, as a folder for a bug report or a test.

What names somebody is replaced, everywhere the same way, so that what belonged together still does: serial numbers and
identifiers by counted ones, names of hosts and of users and NQNs by examples, addresses by others that share as many
leading bits as the real ones did (routes still fit). Secrets are never read. Mount points, and names of volumes of
device-mapper, stay.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Collection
from pathlib import Path

from headrace.doctor.facts.host import provider_of
from headrace.doctor.facts.mounts import NETWORK, pair
from headrace.doctor.machine import FILE_MAX_BYTES, LINKS_MAX, Machine
from headrace.errors import UsageError

#: Words of the kernel's command line that are kept.
_BOOT_WORDS = re.compile(r"[\w.]*(iommu|nvme|hugepages|mitigations)[\w.]*(=[\w.,:-]*)?")
#: Lines that are kept of files that say more than is looked at.
_LINES = {
    "/proc/meminfo": ("MemTotal:", "HugePages_Total:", "HugePages_Free:", "Hugepagesize:"),
    "/proc/self/status": ("Uid:", "Seccomp:"),
}


class Recorder(Machine):
    """A machine that keeps what is read of it."""

    def __init__(self, folder: Path, root: Path | str = "/") -> None:
        super().__init__(root)
        self._folder = folder
        #: By real path: what is in a file; and folders that are there. By path: where links lead.
        self._files: dict[str, str] = {}
        self._folders: set[str] = set()
        self._links: dict[str, str] = {}
        self._names = [name for name in {socket.gethostname(), socket.gethostname().partition(".")[0]} if len(name) > 2]

    @classmethod
    def into(cls, folder: Path) -> Recorder:
        """UsageError where the folder holds something already."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError("the record would be mixed with what is there", where=str(folder), expected="a new folder")
        return cls(folder)

    # ---- reading ----

    def text(self, path: str, *, most: int = FILE_MAX_BYTES, errors: str = "strict") -> str | None:
        found = super().text(path, most=most, errors=errors)
        real = self._walk(path)
        if real is not None and found is not None:
            kept = found
            if path == "/proc/cmdline":
                kept = " ".join(word for word in found.split() if _BOOT_WORDS.fullmatch(word))
            elif path in _LINES:
                kept = "\n".join(line for line in found.splitlines() if line.startswith(_LINES[path]))
            self._files[real] = kept + "\n"
        return found

    def is_set(self, path: str) -> bool | None:
        found = super().is_set(path)
        real = self._walk(path)
        if real is not None and found is not None:
            self._files[real] = "set\n" if found else "none\n"
        return found

    def finds(self, path: str, needle: str) -> bool | None:
        found = super().finds(path, needle)
        real = self._walk(path)
        if real is not None and found is not None:
            self._files[real] = self._files.get(real, "") + (f"{needle}\n" if found else "")
        return found

    def names(self, path: str) -> list[str]:
        found = super().names(path)
        real = self._walk(path)
        if real is not None and self._is_folder(real):
            self._folders.add(real)
            for name in found:
                self._entry(f"{real.rstrip('/')}/{name}")
        return found

    def exists(self, path: str) -> bool:
        found = super().exists(path)
        self._note(path, found)
        return found

    def real(self, path: str) -> str | None:
        found = super().real(path)
        self._note(path, found is not None)
        return found

    def command(self, name: str, *words: str) -> str | None:
        found = super().command(name, *words)
        if found is not None:
            self._files[f"/commands/{name}"] = found + "\n"
        return found

    def asked(self, name: str, ask: Callable[[], str | None]) -> str | None:
        found = super().asked(name, ask)
        if found is not None:
            self._files[f"/commands/{name}"] = found + "\n"
        return found

    def _note(self, path: str, there: bool) -> None:
        real = self._walk(path)
        if not there or real is None:
            return
        if self._is_folder(real):
            self._folders.add(real)
        else:
            self._files.setdefault(real, "")

    def _entry(self, path: str) -> None:
        """Of a folder that was listed: links and folders are names that count; files do once they are read."""
        here = self.root / path.lstrip("/")
        try:
            mode = os.lstat(here).st_mode
            if stat.S_ISLNK(mode):
                self._links[path] = str(here.readlink())
            elif stat.S_ISDIR(mode):
                self._folders.add(path)
        except (OSError, ValueError):
            pass

    def _is_folder(self, path: str) -> bool:
        return (self.root / path.lstrip("/")).is_dir()

    def _walk(self, path: str) -> str | None:
        """The path with its links followed, each of them kept; `None`: it is not there."""
        done, todo, links = "/", list(reversed(Path(path).parts[1:])), 0
        while todo:
            part = todo.pop()
            if part == "..":
                done = str(Path(done).parent)
                continue
            here = f"{done.rstrip('/')}/{part}"
            try:
                there = self.root / here.lstrip("/")
                target = str(there.readlink()) if stat.S_ISLNK(os.lstat(there).st_mode) else None
            except (OSError, ValueError):
                return None
            if target is None:
                done = here
                continue
            links += 1
            # Links of /proc/self name processes; nothing below them is read by way of another link.
            if links > LINKS_MAX:
                return None
            self._links[here] = target
            if target.startswith("/"):
                done = "/"
            todo += reversed(Path(target).parts[1 if target.startswith("/") else 0 :])
        return done

    # ---- writing ----

    def write(self) -> None:
        """The folder, with everything replaced. OSError."""
        clean = Cleaner(self._known_names(), keep=self._words())
        self._folder.mkdir(parents=True, exist_ok=True)
        # /proc/self is another process's each time.
        process = self._links.pop("/proc/self", None)

        def place(path: str) -> Path:
            if process is not None and (path == f"/proc/{process}" or path.startswith(f"/proc/{process}/")):
                path = "/proc/self" + path.removeprefix(f"/proc/{process}")
            return self._folder / clean.text(path).lstrip("/")

        for folder in sorted(self._folders):
            place(folder).mkdir(parents=True, exist_ok=True)
        for path, text in self._files.items():
            where = place(path)
            where.parent.mkdir(parents=True, exist_ok=True)
            if not where.is_dir():
                where.write_text(clean.file(path, text), encoding="utf-8")
        for path, target in self._links.items():
            where = place(path)
            where.parent.mkdir(parents=True, exist_ok=True)
            if not where.exists() and not where.is_symlink():
                where.symlink_to(clean.text(target))

    def _mounts(self) -> list[list[str]]:
        """Of each mount its kind, source and options."""
        texts = [text for path, text in self._files.items() if path.endswith("/mountinfo")]
        tails = (line.partition(" - ")[2].split(" ") for text in texts for line in text.splitlines())
        return [tail for tail in tails if len(tail) >= 3]

    def _words(self) -> set[str]:
        """Words of the kernel, which a host may have for its name: `net`, `nfs`, `node`, `data`."""
        paths = {*self._files, *self._folders, *self._links}
        words = {part for path in paths if not path.startswith("/sys/fs/cgroup/") for part in Path(path).parts}
        for kind, _, options in (tail[:3] for tail in self._mounts()):
            words |= {kind, *(word for option in options.split(",") for word in pair(option))}
        return words

    def _known_names(self) -> list[str]:
        """This host, and servers of mounted file systems."""
        names = list(self._names)
        for kind, source in (tail[:2] for tail in self._mounts()):
            if kind in NETWORK:
                names += re.findall(r"[A-Za-z0-9_.-]{2,}(?=[:@])|(?<=^//)[^/]+", source)
        return sorted({name for name in names if name not in ("localhost", "tcp", "o2ib")}, key=len, reverse=True)


class Cleaner:
    """Replaces what names somebody; the same by the same, as long as it lives."""

    def __init__(self, names: list[str], *, keep: Collection[str] = ()) -> None:
        """`names`: of hosts; those of `keep` are replaced only where a host must stand, as in the source of a mount."""
        self._key = secrets.token_bytes(32)
        self._seen: dict[tuple[str, str], str] = {}
        words = {word.lower() for word in keep}
        self._all = _pattern([name for name in names if name.lower() not in words])
        self._source = _pattern(names)
        self._replace: dict[str, Callable[[str], str]] = {
            "nqn": self._nqn,
            "uuid": self._uuid,
            "mac": self._mac,
            "v6": self._v6,
            "v4": self._v4,
            "name": lambda name: self._counted("host", name.lower(), "host-{}.example"),
            "digits": self._digits,
        }

    def file(self, path: str, text: str) -> str:
        if path == "/proc/interrupts":
            # Counts, and names of drivers: nobody's, and a megabyte where there are many processors.
            return text
        if path == "/proc/net/route" or path.endswith("/net/route"):
            return self._routes4(text)
        if path.endswith("/net/ipv6_route"):
            return re.sub(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])", lambda one: self._hex6(one[0]), text)
        if path.endswith("/mountinfo"):
            return "".join(f"{self._mount(line)}\n" for line in text.splitlines())
        if path.endswith("/chassis_asset_tag"):
            # On hardware the owner's own number.
            return text if provider_of(text) else "replaced\n"
        if path.endswith("/dm/uuid"):
            text = re.sub(r"(?<=^LVM-)[A-Za-z0-9]{32,}", lambda one: self._digits(one[0]), text)
        if path.endswith("/wwid") and not re.search(_UUID, text):
            # `nvme.VENDOR-SERIAL-MODEL-NUMBER`, the middle ones as hexadecimal, however short; `eui.`, `naa.`.
            text = re.sub(r"(?<=^nvme\.....-)[0-9a-f]+", lambda one: self._digits(one[0]), text)
            return re.sub(r"[0-9A-Fa-f]{12,}", lambda one: self._digits(one[0]), text)
        return self.text(text)

    def text(self, text: str) -> str:
        return self._cleaned(self._all, text)

    def _cleaned(self, pattern: re.Pattern[str], text: str) -> str:
        return pattern.sub(lambda found: self._replace[found.lastgroup or ""](found[0]), text)

    def _mount(self, line: str) -> str:
        """Of mountinfo: who mounted it, as SMB has it among its options, is somebody's name, too."""
        head, dash, tail = line.partition(" - ")
        kind, _, rest = tail.partition(" ")
        source, _, options = rest.partition(" ")
        if kind not in NETWORK:
            return self.text(line)
        options = re.sub(
            r"((?:^|,)(?:user|username|domain|workgroup)=)([^,]+)",
            lambda one: one[1] + self._counted("user", one[2].lower(), "user-{}"),
            options,
        )
        return f"{self.text(head)}{dash}{kind} {self._cleaned(self._source, source)} {self.text(options)}"

    def _counted(self, kind: str, value: str, form: str) -> str:
        count = sum(one == kind for one, _ in self._seen)
        return self._seen.setdefault((kind, value), form.format(count + 1))

    def _nqn(self, nqn: str) -> str:
        match = re.fullmatch(r"(nqn\.2014-08\.org\.nvmexpress(?:\.|:uuid:))(.*)", nqn)
        if match and (match[2] == "discovery" or re.fullmatch(_UUID, match[2])):
            return nqn if match[2] == "discovery" else match[1] + self._uuid(match[2])
        return self._counted("nqn", nqn, "nqn.2014-08.org.example:{}")

    def _uuid(self, uuid: str) -> str:
        # One that says nothing stays what it is.
        if not uuid.strip("0-") or not uuid.lower().strip("f-"):
            return uuid
        found = self._counted("uuid", uuid.lower().replace("_", "-"), "00000000-0000-4000-8000-{:012x}")
        return found.replace("-", "_") if "_" in uuid else found

    def _mac(self, mac: str) -> str:
        return self._counted("mac", mac.lower(), "02:00:00:00:00:{:02x}")

    def _digits(self, digits: str) -> str:
        if digits.startswith("0x"):
            return "0x" + self._digits(digits[2:])
        return (
            hmac.new(self._key, digits.lower().encode(), hashlib.sha512)
            .hexdigest()
            .ljust(len(digits), "0")[: len(digits)]
        )

    # ---- addresses ----

    def _v4(self, text: str) -> str:
        try:
            address = ipaddress.IPv4Address(text)
        except ValueError:
            return text
        if address.is_loopback or address.is_unspecified or address.is_multicast or int(address) >> 24 == 255:
            return text
        return str(ipaddress.IPv4Address(self._v4_number(int(address))))

    def _v4_number(self, number: int) -> int:
        address = ipaddress.IPv4Address(number)
        kept = next((net.prefixlen for net in _PRIVATE4 if address in net), None)
        if kept is not None:
            return self._scramble(number, 32, kept)
        # Public ones go where nobody is: 240.0.0.0/4 is reserved.
        return (self._scramble(number, 32, 8) & 0xFFFFFF) | (240 + (number >> 24) % 15) << 24

    def _v6(self, text: str) -> str:
        try:
            address = ipaddress.IPv6Address(text)
        except ValueError:
            return text
        # `0::/` begins a line of /proc/self/cgroup.
        if address.is_loopback or address.is_unspecified or len([part for part in text.split(":") if part]) < 2:
            return text
        return str(ipaddress.IPv6Address(self._v6_number(int(address))))

    def _v6_number(self, number: int) -> int:
        if number < 2 or number >> 120 == 0xFF:
            return number
        if number >> 118 == 0xFE80 >> 6:
            return self._scramble(number, 128, 64)
        return (self._scramble(number, 128, 32) & (1 << 96) - 1) | 0x20010DB8 << 96

    def _hex6(self, text: str) -> str:
        return f"{self._v6_number(int(text, 16)):032x}"

    def _routes4(self, text: str) -> str:
        def replaced(match: re.Match[str]) -> str:
            number = int.from_bytes(bytes.fromhex(match[0]), "little")
            address = ipaddress.IPv4Address(number)
            if not number or address.is_loopback or address.is_multicast or number >> 24 == 255:
                return match[0]
            return self._v4_number(number).to_bytes(4, "little").hex().upper()

        lines = []
        for line in text.splitlines():
            words = line.split("\t")
            words[1:3] = [re.sub(r"^[0-9A-F]{8}$", replaced, word) for word in words[1:3]]
            lines.append("\t".join(words))
        return "\n".join(lines) + "\n"

    def _scramble(self, number: int, bits: int, kept: int) -> int:
        """Each bit after the first `kept` is turned or not, by a keyed hash of those before it: two numbers share as
        many leading bits afterwards as before (Crypto-PAn)."""
        result = number >> (bits - kept)
        for at in range(kept, bits):
            before = number >> (bits - at)
            turn = hmac.new(self._key, f"{bits}/{at}/{before}".encode(), hashlib.sha256).digest()[0] & 1
            result = result << 1 | ((number >> (bits - at - 1) & 1) ^ turn)
        return result


_PRIVATE4 = tuple(
    ipaddress.IPv4Network(net) for net in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16")
)
# Also as groups of Kubernetes have it: `pod12345678_...`.
_UUID = (
    r"(?:(?<![0-9A-Fa-f-])|(?<=pod))[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![0-9A-Fa-f-])"
    r"|(?<=pod)[0-9A-Fa-f]{8}(?:_[0-9A-Fa-f]{4}){3}_[0-9A-Fa-f]{12}(?![0-9A-Fa-f])"
)
_PATTERNS = (
    ("nqn", r"\bnqn\.\d{4}[.-]\d{2}\.[^\s,;\"]+"),
    ("uuid", _UUID),
    ("mac", r"(?<![0-9A-Fa-f:])(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}(?![0-9A-Fa-f:])"),
    ("v6", r"(?<![\w:.])(?=[0-9A-Fa-f]*:)[0-9A-Fa-f:]{3,39}(?![\w.])"),
    ("v4", r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])"),
    # Identifiers of containers and disks, and names of Fibre Channel; a number has no letters, and 20 digits at most.
    (
        "digits",
        r"(?<![0-9A-Za-z])(?:0x[0-9a-f]{16}|(?=[0-9]*[a-f])[0-9a-f]{16,}|[0-9]{21,})(?![0-9A-Za-z])",
    ),
)


def _pattern(names: list[str]) -> re.Pattern[str]:
    """One pass: what was put in is not looked at again."""
    own = "|".join(rf"(?<![\w.-])(?i:{re.escape(name)})(?![\w-])" for name in names) or r"(?!)"
    patterns = (*_PATTERNS[:-1], ("name", own), _PATTERNS[-1])
    return re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in patterns))
