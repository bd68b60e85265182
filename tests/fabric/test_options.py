"""Options of the target: what is refused in Python, and the JSON that the native side reads."""

from __future__ import annotations

import json
import socket

import pytest

from headrace.errors import UsageError
from headrace.fabric import (
    AnaGroupOptions,
    FileMedia,
    HostOptions,
    ListenOptions,
    MemoryMedia,
    NamespaceOptions,
    SubsystemOptions,
    TargetOptions,
    parse_endpoint,
)
from headrace.fabric.endpoint import is_loopback

NQN = "nqn.2026-01.io.example:disk"


def test_json_says_what_was_chosen_and_nothing_else() -> None:
    options = TargetOptions(
        listen=[ListenOptions(port=4420, name="a")],
        mdts_bytes=1 << 17,
        subsystems=[
            SubsystemOptions(
                nqn=NQN,
                allow_hosts=[HostOptions(nqn="nqn.host", access="read-only")],
                ana_groups=[AnaGroupOptions(id=1, states={"a": "change"})],
                mdts_bytes=1 << 16,
                namespaces=[
                    NamespaceOptions(media=MemoryMedia(size_bytes=1 << 20)),
                    NamespaceOptions(
                        nsid=2,
                        media=FileMedia(path="/x", size_bytes=4096, create=True),
                        block_bytes=512,
                        volatile_cache_bytes=5,
                    ),
                ],
            )
        ],
    )
    assert json.loads(options.to_json()) == {
        "listen": [{"host": "127.0.0.1", "port": 4420, "name": "a", "discovery": False}],
        "io_engine": "auto",
        "mdts_bytes": 131072,
        "subsystems": [
            {
                "nqn": NQN,
                "serial": "",
                "model": "headrace",
                "allow_hosts": [{"nqn": "nqn.host", "access": "read-only"}],
                "other_hosts": None,
                "ana_groups": [{"id": 1, "states": {"a": "change"}, "state": "optimized"}],
                "mdts_bytes": 65536,
                "namespaces": [
                    {
                        "nsid": 1,
                        "media": {"kind": "memory", "size_bytes": 1048576},
                        "block_bytes": 4096,
                        "volatile_cache_bytes": 0,
                        "read_only": False,
                        "uuid": None,
                        "nguid": None,
                        "ana_group": 1,
                        "reservations_path": None,
                        "no_reservations": False,
                    },
                    {
                        "nsid": 2,
                        "media": {"kind": "file", "path": "/x", "size_bytes": 4096, "create": True, "direct": "auto"},
                        "block_bytes": 512,
                        "volatile_cache_bytes": 5,
                        "read_only": False,
                        "uuid": None,
                        "nguid": None,
                        "ana_group": 1,
                        "reservations_path": None,
                        "no_reservations": False,
                    },
                ],
            }
        ],
    }


def test_mistakes_name_the_field() -> None:
    media = MemoryMedia(size_bytes=4096)
    for make, says in (
        (lambda: FileMedia(path="/x", create=True), "size_bytes"),
        (lambda: FileMedia(path="/x", direct="maybe"), "direct"),
        (lambda: NamespaceOptions(media=media, block_bytes=1000), "block_bytes"),
        (lambda: NamespaceOptions(media=media, read_only=True), "read_only"),
        (lambda: NamespaceOptions(media=media, volatile_cache_bytes=-1), "volatile_cache_bytes"),
        (lambda: SubsystemOptions(nqn="", namespaces=[NamespaceOptions(media=media)]), "SubsystemOptions.nqn"),
        (lambda: SubsystemOptions(nqn=NQN, namespaces=[], allow_hosts=["a b"]), "allow_hosts"),
        (lambda: SubsystemOptions(nqn=NQN, namespaces=[], other_hosts="all"), "other_hosts"),
        (lambda: HostOptions(nqn="nqn.a", access="write"), "access"),
        (lambda: AnaGroupOptions(id=1, states={"a": "fast"}), "states"),
        (lambda: ListenOptions(port=70000), "port"),
        (lambda: TargetOptions(subsystems=[], io_engine="magic"), "io_engine"),
        (lambda: TargetOptions(subsystems=[], listen=[]), "listen"),
    ):
        with pytest.raises(UsageError, match=says):
            make()


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]:0", ("::1", 0)),
        ("name", ("name", 7)),
        ("[fe80::1%eth0]", ("fe80::1%eth0", 7)),
    ],
)
def test_endpoints(text: str, endpoint: tuple[str, int]) -> None:
    assert parse_endpoint(text, default_port=7) == endpoint


@pytest.mark.parametrize("text", ["", ":1", "::1", "a:b", "a:70000", "a b:1", "[zz]:1", "a/b:1"])
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_endpoint(text, default_port=7)
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_endpoint("name")


def test_a_name_is_as_local_as_all_that_it_resolves_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_loopback("127.0.0.2") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("::") and not is_loopback("fe80::1%lo")

    def resolver(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        found = {"inside": ["127.0.0.1", "::1"], "half": ["127.0.0.1", "10.0.0.1"]}[host]
        return [(0, 0, 0, "", (address, 0)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    assert is_loopback("inside")
    assert not is_loopback("half")
