"""The block that says who holds a volume for writing."""

from __future__ import annotations

import struct
from typing import NamedTuple

from headrace.device import crc32c
from headrace.volume.layout.base import ALIGN, END_OF_COUNTS, END_OF_SESSIONS, VERSION, clip_utf8, place_seed

# ---- heartbeat -------------------------------------------------------------------------------------------------------
#
#    0  magic "HRHEART\0"  8 | 40  beat            8 |  72  run id, UTF-8   184
#    8  version            4 | 48  interval (ns)   8 | 256  host, UTF-8     128
#   12  state              4 | 56  started (ns)    8 | 384  key               8
#   16  session            8 | 64  pid             4 | 392  flags             8
#   24  nonce             16 | 68  run/host bytes 2+2 | 400  due (ns)          8
#                                                  | 408  reserved        100
#                                                  | 508  crc, from place_seed(id, 0, 2^32)
#                                                  | 512  zeros
# nonce: the host identifier of the session. key: what it is registered with on every member, 0 where none keeps
# reservations.
#
# Within 512 bytes, the smallest logical block, so that a write of it is never torn.

_HEARTBEAT = struct.Struct("<8sIIQ16sQQQIHH184s128sQQQ")
assert _HEARTBEAT.size == 408
_HEARTBEAT_MAGIC = b"HRHEART\0"
_HEARTBEAT_BYTES = 512
_HEARTBEAT_PLACE = 1 << 32

ACTIVE = 1
#: Closed, and every command of the session has ended.
CLOSED = 2
#: Closed, but grants were out whose writers never answered: their space stays quarantined.
CLOSED_OUTSTANDING = 3

#: A flag: the session was another host before, and a command of that may still land, which has no registration any more
#: that could be preempted.
UNDRAINED = 1
#: A flag: when the session began nothing of any session before it could land any more.
SETTLED = 2


class Heartbeat(NamedTuple):
    """Who holds the volume for writing. Times in ns; the wall clock is for people only."""

    state: int
    session: int
    nonce: bytes
    beat: int
    interval_ns: int
    started_ns: int
    pid: int
    run_id: str
    host: str
    key: int = 0
    flags: int = 0
    #: When this beat was meant to be written: they are made beforehand. 0: nobody said.
    due_ns: int = 0

    def encode(self, volume_id: bytes) -> bytes:
        run_id, host = clip_utf8(self.run_id, 184), clip_utf8(self.host, 128)
        body = _HEARTBEAT.pack(
            _HEARTBEAT_MAGIC, VERSION, self.state, self.session, self.nonce, self.beat, self.interval_ns,
            self.started_ns, self.pid, len(run_id), len(host), run_id, host, self.key, self.flags, self.due_ns,
        ).ljust(_HEARTBEAT_BYTES - 4, b"\0")  # fmt: skip
        crc = crc32c(body, place_seed(volume_id, 0, _HEARTBEAT_PLACE))
        return (body + struct.pack("<I", crc)).ljust(ALIGN, b"\0")

    @classmethod
    def decode(cls, data: bytes, volume_id: bytes) -> Heartbeat | None:
        """None where there is no valid one."""
        body = data[: _HEARTBEAT_BYTES - 4]
        crc = struct.unpack_from("<I", data, _HEARTBEAT_BYTES - 4)[0]
        if data[:8] != _HEARTBEAT_MAGIC or crc != crc32c(body, place_seed(volume_id, 0, _HEARTBEAT_PLACE)):
            return None
        (
            _, _, state, session, nonce, beat, interval, started, pid, run_n, host_n, run_id, host, key, flags, due,
        ) = _HEARTBEAT.unpack_from(data)  # fmt: skip
        if session >= END_OF_SESSIONS or beat >= END_OF_COUNTS:
            return None
        return cls(
            state, session, nonce, beat, interval, started, pid,
            run_id[:run_n].decode(errors="replace"), host[:host_n].decode(errors="replace"), key, flags, due,
        )  # fmt: skip
