"""Who ends before it is ready, and when that is the end: without a cluster, whose failures cannot be had at will."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.dataset.ingestion import ray_bridge
from headrace.dataset.ingestion.channel import Inbox, encode
from headrace.errors import DatasetError


class Lost(Exception):
    pass


def cluster(lost: Callable[[], bool], facts: dict[str, str]) -> Any:
    """What the bridge asks of Ray. Workers of which `lost` says so end before they are ready; others live on."""

    class Actor:
        def __init__(self) -> None:
            for name in ("facts", "start", "put", "get", "end"):
                setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

        async def _facts(self) -> dict[str, str]:
            if lost():
                raise Lost("the node died")
            return facts

        async def _start(self, folder: str) -> None:
            pass

        async def _put(self, data: bytes) -> None:
            pass

        async def _get(self) -> bytes:
            await asyncio.Event().wait()
            return b""

        async def _end(self) -> str:
            return "ended"

    return SimpleNamespace(
        exceptions=SimpleNamespace(RayError=Lost), kill=lambda actor: None,
        remote=lambda **options: lambda kind: SimpleNamespace(remote=Actor),
    )  # fmt: skip


def said(lost: Callable[[], bool], places: int, enough: Callable[[list[str]], bool]) -> list[str]:
    """What the bridge says to its ingest, until that is enough."""
    ours, theirs = socket.socketpair()
    words: list[str] = []
    inbox, descriptors = Inbox(), []
    bridge = ray_bridge._Bridge(cluster(lost, ray_bridge.actor_class()().facts()), theirs, places, "/")

    async def hear() -> None:
        under_way = asyncio.ensure_future(bridge.run())
        while not enough(words):
            await asyncio.sleep(0.001)
            try:
                data, found, _, _ = socket.recv_fds(ours, 1 << 16, 64)
            except BlockingIOError:
                continue
            descriptors.extend(found)
            words.extend(message[0] for message in inbox.add(data))
        under_way.cancel()
        await asyncio.gather(under_way, return_exceptions=True)

    with ours, theirs:
        ours.setblocking(False)
        asyncio.run(asyncio.wait_for(hear(), 60))
    for descriptor in descriptors:
        os.close(descriptor)
    return words


def test_a_node_that_is_lost_with_many_workers_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_bridge, "_PAUSE_S", 0.001)
    left = iter(range(12))
    words = said(lambda: next(left, None) is not None, 12, lambda words: len(words) >= 12)
    assert words == ["ready"] * 12


def test_workers_that_never_come_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_bridge, "_PAUSE_S", 0.001)
    assert set(said(lambda: True, 3, lambda words: "failed" in words)) == {"failed"}


#: A bridge whose cluster breaks a connection.
BREAKS = """
import sys
from headrace.dataset.ingestion import ray_bridge

class Ray:
    def cluster_resources(self):
        raise ConnectionResetError(104, "Connection reset by peer")

ray_bridge.connect = lambda address: Ray()
ray_bridge.main(int(sys.argv[1]))
"""


def test_a_connection_that_breaks_is_told_to_the_ingest_and_the_bridge_waits_for_its_end() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            bridge = subprocess.Popen(
                [sys.executable, "-c", BREAKS, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
            )  # fmt: skip
        with bridge:
            ours.settimeout(60)
            ours.sendall(encode(("begin", "10.0.0.1:6379", None, 3, "/")))
            inbox, messages = Inbox(), []
            while not messages:
                data = ours.recv(1 << 16)
                assert data, bridge.communicate()[1]
                messages += inbox.add(data)
            ((what, error),) = messages
            assert what == "failed" and isinstance(error, DatasetError)
            assert str(error).startswith("the work on a cluster ended at 10.0.0.1:6379: found ")
            assert "Connection reset by peer" in str(error)
            # It goes when the ingest does.
            ours.close()
            assert bridge.communicate(timeout=60)[1] == "" and bridge.returncode == 0
