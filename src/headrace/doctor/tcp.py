"""What the kernel knows about our own TCP connections, and how large a packet gets through to an address."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: How long one datagram is waited for, and how often it is sent.
_ANSWER_S = 0.4
_TRIES = 2
#: `struct tcp_info` of <linux/tcp.h>: offsets of what is read, and how long it is at least.
_SND_MSS, _RCV_MSS, _PMTU, _RTT, _RTTVAR, _CWND, _RETRANS, _MIN_RTT = 16, 20, 60, 68, 72, 80, 100, 148
_LEAST = 152
_SENT, _SENT_AGAIN = 200, 208
#: From <linux/in.h> and <linux/in6.h>, which Python's socket module does not have all of.
_IP_MTU_DISCOVER, _IP_MTU, _IPV6_MTU_DISCOVER, _IPV6_MTU, _PROBE = 10, 14, 23, 24, 3
#: Of the headers of IPv4 or IPv6, and UDP.
_HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}
_SMALL = {socket.AF_INET: 576, socket.AF_INET6: 1280}


@dataclass(frozen=True, kw_only=True)
class TcpState:
    """Of one connection of this process."""

    peer: str
    port: int
    rtt_s: float
    rtt_variance_s: float
    min_rtt_s: float
    cwnd: int
    #: Largest segment that is sent, and that was received.
    mss: int
    received_mss: int
    path_mtu: int
    retransmits: int
    bytes_sent: int | None
    bytes_retrans: int | None


@dataclass(frozen=True, kw_only=True)
class PathMtu:
    """What a datagram that must not be cut (DF) did on its way."""

    #: Of the route, headers included.
    mtu: int
    #: One of that size arrived; one of the smallest size did. `None`: nobody answered.
    full: bool | None
    small: bool | None

    @property
    def black_hole(self) -> bool:
        """Small ones are answered, large ones vanish without a word."""
        return self.small is True and self.full is None


def state_of(connection: socket.socket) -> TcpState | None:
    try:
        raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        peer = connection.getpeername()
    except OSError:
        return None
    if len(raw) < _LEAST:
        return None

    def at(offset: int) -> int:
        return int(struct.unpack_from("=I", raw, offset)[0])

    def long_at(offset: int) -> int | None:
        return int(struct.unpack_from("=Q", raw, offset)[0]) if len(raw) >= offset + 8 else None

    least = at(_MIN_RTT)
    return TcpState(
        peer=str(peer[0]).removeprefix("::ffff:"),
        port=int(peer[1]),
        rtt_s=at(_RTT) / 1e6,
        rtt_variance_s=at(_RTTVAR) / 1e6,
        # All ones: none was measured yet.
        min_rtt_s=(at(_RTT) if least == 0xFFFF_FFFF else least) / 1e6,
        cwnd=at(_CWND),
        mss=at(_SND_MSS),
        received_mss=at(_RCV_MSS),
        path_mtu=at(_PMTU),
        retransmits=at(_RETRANS),
        bytes_sent=long_at(_SENT),
        bytes_retrans=long_at(_SENT_AGAIN),
    )


def own_connections(peers: Iterable[tuple[str, int]]) -> list[TcpState]:
    """Of this process, to these addresses: the native host's among them, whose sockets are descriptors like all."""
    wanted = set(peers)
    found = []
    for entry in sorted(Path("/proc/self/fd").iterdir(), key=lambda one: int(one.name)):
        with suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(entry.name)))
            with connection:
                if connection.type == socket.SOCK_STREAM and connection.family in _HEADERS:
                    peer = connection.getpeername()
                    if (str(peer[0]).removeprefix("::ffff:"), int(peer[1])) in wanted:
                        state = state_of(connection)
                        found += [state] if state is not None else []
    return found


def path_mtu(address: str, port: int) -> PathMtu | None:
    """Sends datagrams that must not be cut to a port where nobody listens: who answers "nobody listens" received them.

    `None`: the address cannot be sent to. Takes a second or two at most."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))
            level, option = (
                (socket.IPPROTO_IPV6, _IPV6_MTU) if family == socket.AF_INET6 else (socket.IPPROTO_IP, _IP_MTU)
            )
            mtu = probe.getsockopt(level, option)
    except OSError:
        return None
    # The longest packet of IP, where the loopback has more.
    full = min(mtu, 65535)
    return PathMtu(
        mtu=mtu,
        full=_arrives(family, address, port, full),
        small=_arrives(family, address, port, _SMALL[family]),
    )


def _arrives(family: socket.AddressFamily, address: str, port: int, size: int) -> bool | None:
    v6 = family == socket.AF_INET6
    for _ in range(_TRIES):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                level, option = (
                    (socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER) if v6 else (socket.IPPROTO_IP, _IP_MTU_DISCOVER)
                )
                probe.setsockopt(level, option, _PROBE)
                probe.settimeout(_ANSWER_S)
                probe.connect((address, port))
                probe.send(bytes(size - _HEADERS[family]))
                probe.recv(1)
        except TimeoutError:
            continue
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                return True
            return False if error.errno == errno.EMSGSIZE else None
        # Something listens there, and answered.
        return True
    return None
