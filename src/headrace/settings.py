"""Every environment variable that headrace reads, on one page.

| variable | meaning | default |
|---|---|---|
| `HEADRACE_HOSTNQN` | the name of this host in NVMe's eyes (`hostnqn`) | `/etc/nvme/hostnqn`, else made from `hostid` |
| `HEADRACE_HOSTID` | the identifier of this host, a UUID (`hostid`) | `/etc/nvme/hostid`, else made for this process |
| `HEADRACE_VOLUME` | members of the volume, commas between, for commands and `headrace://` paths given none | none |
| `XDG_CONFIG_HOME` | where a user's `headrace/providers/*.toml` are (`headrace plan`, `providers`) | `~/.config` |
| `HEADRACE_EVENTS` | events that each open device keeps for the black box, 32 bytes each; 0: none | 65536 |
| `HEADRACE_INFLIGHT` | reads under way on this node, of all targets together: `auto`, at most a size, `off` | `auto` |

One device may be opened as another host: `headrace.device.open_device(..., hostnqn=..., hostid=...)`.
In the table, "made for this process" means a random UUID that lives as long as the process.
"""

from __future__ import annotations

import functools
import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UsageError
from headrace.units import parse_bytes

HOSTNQN = "HEADRACE_HOSTNQN"
HOSTID = "HEADRACE_HOSTID"
EVENTS = "HEADRACE_EVENTS"
INFLIGHT = "HEADRACE_INFLIGHT"
VOLUME = "HEADRACE_VOLUME"

#: Where nvme-cli and the kernel's tools keep the identity of a machine.
ETC_NVME = Path("/etc/nvme")

#: NVMe Base Specification 2.0, section 4.5: an NQN is at most 223 bytes of UTF-8.
NQN_MAX_BYTES = 223


@dataclass(frozen=True, kw_only=True)
class HostIdentity:
    """Who this host is for a target. Targets that admit hosts by name compare `hostnqn`."""

    #: NVMe qualified name.
    hostnqn: str
    #: 128 bits; NVMe forbids all zeros over fabrics.
    hostid: uuid.UUID

    def __post_init__(self) -> None:
        check_nqn("hostnqn", self.hostnqn)
        if self.hostid.int == 0:
            raise UsageError("hostid is all zeros, which NVMe over Fabrics forbids", next_step=f"unset {HOSTID}")


def check_text(field: str, text: str) -> None:
    """Raise `UsageError` where `text` has no UTF-8 form: bytes of the shell that are none come as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{field} is not UTF-8", found=repr(text[:80])) from None


def check_nqn(field: str, nqn: str) -> None:
    """Raise `UsageError` where `nqn` cannot be an NVMe qualified name.

    The form `nqn.YYYY-MM.DOMAIN:NAME` is not insisted on: Linux serves under any name, and it is the target's choice.
    """
    check_text(field, nqn)
    if not 0 < len(nqn.encode()) <= NQN_MAX_BYTES or re.search(r"[\x00-\x20\x7f]", nqn):
        raise UsageError(
            f"{field} is not an NVMe qualified name",
            expected=f"nqn.YYYY-MM.DOMAIN:NAME, at most {NQN_MAX_BYTES} printable bytes",
            found=repr(nqn),
        )


@functools.cache
def _generated(process: int) -> uuid.UUID:
    # One for each process: two processes that share a hostid would share reservations.
    return uuid.uuid4()


def _etc(name: str) -> str | None:
    try:
        text = (ETC_NVME / name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        # Unreadable for this user is as good as absent: the files are optional.
        return None
    return text or None


def host_identity() -> HostIdentity:
    """Environment, else `/etc/nvme`, else a random identifier that this process keeps for its life.

    Each of the two is looked up by itself; a name that has to be made has the UUID form
    `nqn.2014-08.org.nvmexpress:uuid:HOSTID`.
    """
    text = os.environ.get(HOSTID) or _etc("hostid")
    if text is None:
        hostid = _generated(os.getpid())
    else:
        try:
            hostid = uuid.UUID(text)
        except ValueError:
            raise UsageError("hostid is not a UUID", where=HOSTID, found=repr(text)) from None
    hostnqn = os.environ.get(HOSTNQN) or _etc("hostnqn") or f"nqn.2014-08.org.nvmexpress:uuid:{hostid}"
    return HostIdentity(hostnqn=hostnqn, hostid=hostid)


def inflight_bytes() -> int | None:
    """Most bytes of reads under way on this node; None: as many as round trips allow, 0: no cap at all."""
    text = os.environ.get(INFLIGHT) or "auto"
    if text == "auto":
        return None
    if text == "off":
        return 0
    try:
        size = parse_bytes(text)
    except ValueError:
        size = 0
    if not size:
        raise UsageError("not a cap", where=INFLIGHT, expected="auto, off, or a size like 64MiB", found=repr(text))
    return size


def kept_events() -> int | None:
    """Events in the ring of each device, 0: no ring; None: what the native engine has by itself."""
    text = os.environ.get(EVENTS) or None
    if text is None:
        return None
    if not text.isdecimal() or int(text) > 1 << 24:
        raise UsageError("not a number of events", where=EVENTS, expected="0 to 16777216", found=repr(text))
    return int(text)


def volume_addresses() -> str | None:
    """The members of the volume that commands mean when they are given none; None where nothing is said."""
    return os.environ.get(VOLUME) or None
