"""`HOST:PORT` as people write it."""

from __future__ import annotations

import ipaddress
import re
import socket

from headrace.errors import UsageError
from headrace.settings import check_text


def parse_endpoint(text: str, *, default_port: int | None = None) -> tuple[str, int]:
    """`"10.0.0.1:4420"`, `"[::1]:4420"`, `"name:4420"` -> (host, port); without a port `default_port`, if given.

    Port 0 is let through: it means a free one where somebody listens.
    """
    check_text("the address", text)
    match = re.fullmatch(
        r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<name>[^\[\]/:@\s]+))(?::(?P<port>\d{1,5}))?", text
    )
    port = int(match["port"]) if match and match["port"] else default_port
    if match is None or port is None or port > 65535:
        raise UsageError(
            "not an address to connect to or listen at",
            expected="HOST:PORT",
            found=repr(text),
            next_step="an IPv6 address stands in brackets, as [::1]:4420" if text.count(":") > 1 else None,
        )
    return match["v6"] or match["name"], port


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener there: of a name, every address that it resolves to counts.

    A name that does not resolve is no way in: whoever listens there is told so.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    return all(ipaddress.ip_address(str(info[4][0]).split("%")[0]).is_loopback for info in found)
