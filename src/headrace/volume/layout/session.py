"""What the log says of a session."""

from __future__ import annotations

import struct
from typing import NamedTuple

from headrace.errors import VolumeDamaged
from headrace.volume.layout.base import END_OF_SESSIONS, clip_utf8

# ---- session records -------------------------------------------------------------------------------------------------
#
#    0  number   8 |  8  flags  8 | 16  nonce  16 | 32  started (ns)  8
#   40  run id bytes 2, host bytes 2, reserved 4 | 48  run id, host

_SESSION = struct.Struct("<QQ16sQHH4x")
assert _SESSION.size == 48
#: Flags: commands of the last session may still land;
UNCLEAN_PREDECESSOR = 1
#: ... none of the last one, but of those before it.
EARLIER_UNSETTLED = 2
#: Nothing was in flight when it began: what it found, every copy of the log has that counted.
BEGAN_WITH_FACTS = 4


class SessionEntry(NamedTuple):
    number: int
    flags: int
    nonce: bytes
    started_ns: int
    run_id: str
    host: str

    def encode(self) -> bytes:
        run_id, host = clip_utf8(self.run_id, 184), clip_utf8(self.host, 128)
        head = _SESSION.pack(self.number, self.flags, self.nonce, self.started_ns, len(run_id), len(host))
        return head + run_id + host

    @classmethod
    def decode(cls, payload: bytes, where: str) -> SessionEntry:
        try:
            number, flags, nonce, started, run_n, host_n = _SESSION.unpack_from(payload)
            run_id = payload[48 : 48 + run_n].decode()
            host = payload[48 + run_n : 48 + run_n + host_n].decode()
        except (struct.error, ValueError) as error:
            raise VolumeDamaged("a session record makes no sense", where=where, found=str(error)) from error
        if number >= END_OF_SESSIONS:
            raise VolumeDamaged("a session has a number that none comes to", where=where, found=str(number))
        return cls(number, flags, nonce, started, run_id, host)
