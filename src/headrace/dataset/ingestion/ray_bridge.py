"""Between an ingest and its workers on a Ray cluster: `python -m headrace.dataset.ingestion.ray_bridge DESCRIPTOR`.

A process of its own, for Ray ends the process that it was started in when the cluster's head is away for a minute, and
takes its time where an address is wrong. The ingest has the session and the only word on what is done; here bytes are
carried to and fro, and what they mean nobody here knows.

For each worker there is an actor, which holds one CPU of the cluster. Where it runs it starts the same process that an
ingest starts on its own machine (`hire.Process`); the actor is the cable between that process's socket and one here,
whose other end the ingest has.

    -> ("begin", address, most workers or None, slices, folder)      once
                                    <- ("up", workers, nodes)
                                    <- ("ready", key, node), with the socket of a worker
                                    <- ("gone", key, why), before that socket is closed
                                    <- ("failed", error): the ingest is not possible so
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

from headrace.dataset.ingestion.channel import Gone, Line, encode
from headrace.errors import DatasetError, HeadraceError

#: Carried at once.
_BYTES = 1 << 20
#: An address that nobody answers at is wrong.
_CONNECT_S = 10.0
#: Workers in one place that end before they are ready, one after another, while none is at work anywhere: a node that
#: is lost takes as many at a time as it has CPUs, and they come again elsewhere.
_MOST_STILLBORN = 5
#: Between two tries to have one; longer where they end before they are ready.
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 16.0
#: What a process gets to end when its actor is told so.
_END_S = 5.0


def actor_class() -> type:
    """What runs on the nodes. Made here, so that it travels as code: a node that has no headrace, or another one, is to
    say so, and nothing of ours can be relied upon there before it has."""

    class Worker:
        def facts(self) -> dict[str, str]:
            """Of the node: what the bytes of a dataset depend on."""
            import hashlib
            import platform
            from importlib import metadata, util
            from pathlib import Path

            found = {"node": platform.node()}
            spec = util.find_spec("headrace")
            if spec is None or spec.origin is None:
                return {**found, "headrace": "none"}
            digest = hashlib.sha256()
            folder = Path(spec.origin).parent
            for path in sorted(folder.rglob("*.py")):
                digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
            for name in ("headrace", "tokenizers"):
                try:
                    found[name] = metadata.version(name)
                except metadata.PackageNotFoundError:
                    found[name] = "none"
            return {**found, "sources of headrace": digest.hexdigest()[:16]}

        def start(self, folder: str) -> None:
            from headrace.dataset.ingestion.hire import Process

            self.process = Process(folder)

        def put(self, data: bytes) -> None:
            """To the process. Where that has ended, `get` tells."""
            with suppress(OSError):
                self.process.socket.sendall(data)

        def get(self) -> bytes | None:
            """What it has said; nothing where that took too long, None where it has ended."""
            import select

            if not select.select([self.process.socket], [], [], 10.0)[0]:
                return b""
            try:
                return self.process.socket.recv(1 << 20) or None
            except OSError:
                return None

        def end(self) -> str:
            import time

            self.process.socket.close()
            return self.process.end(time.monotonic() + 5.0)

    return Worker


class _Bridge:
    """One ingest's."""

    def __init__(self, ray: Any, control: socket.socket, count: int, folder: str) -> None:
        self._ray, self._control, self._count, self._folder = ray, control, count, folder
        self._sending = threading.Lock()
        #: A CPU each; a thread for what is read, one for what is written, one to end it.
        self._actor = ray.remote(num_cpus=1, max_restarts=0, max_concurrency=3)(actor_class())
        self._ours = actor_class()().facts()
        self._at_work = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._serve(place) for place in range(self._count)))

    def tell(self, *message: Any, descriptor: int | None = None) -> None:
        data = encode(message)
        with self._sending:
            sent = 0 if descriptor is None else socket.send_fds(self._control, [data], [descriptor])
            self._control.sendall(data[sent:])

    async def _serve(self, place: int) -> None:
        """One worker, and another one when it has ended, and so on."""
        number = stillborn = 0
        while True:
            number += 1
            actor = self._actor.remote()
            try:
                why = await self._carry(actor, f"{place}.{number}")
                stillborn = 0 if why is None else stillborn + 1
                if why is not None and stillborn >= _MOST_STILLBORN and not self._at_work:
                    raise DatasetError(
                        "workers end before they begin", found=why, next_step="look at the logs of Ray on that node"
                    )
            except HeadraceError as error:
                self.tell("failed", error)
                return
            finally:
                with suppress(Exception):
                    self._ray.kill(actor)
            await asyncio.sleep(min(_PAUSE_S * 2 ** min(stillborn, 8), _LONGEST_PAUSE_S))

    async def _carry(self, actor: Any, key: str) -> str | None:
        """One worker from its begin to its end. Returns why it did not come that far."""
        try:
            facts = await actor.facts.remote()
            self._compare(facts)
            await actor.start.remote(self._folder)
        except self._ray.exceptions.RayError as error:
            return _words(error)
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                self.tell("ready", key, facts["node"], descriptor=theirs.fileno())
            self._at_work += 1
            try:
                why = await self._pump(actor, ours)
            finally:
                self._at_work -= 1
            self.tell("gone", key, why)
        return None

    def _compare(self, theirs: dict[str, str]) -> None:
        differ = [name for name in self._ours if name != "node" and self._ours[name] != theirs.get(name)]
        if not differ:
            return
        name = differ[0]
        raise DatasetError(
            "a node of the cluster has no headrace" if theirs["headrace"] == "none" else "a node has another headrace",
            where=theirs["node"], expected=f"{name} {self._ours[name]}", found=theirs.get(name, "none"),
            next_step="install the same headrace[ray,dataset] on all nodes",
        )  # fmt: skip

    async def _pump(self, actor: Any, ours: socket.socket) -> str:
        """Carry bytes until one end is closed; returns why the worker ended."""
        loop = asyncio.get_running_loop()

        async def here() -> None:
            while data := await loop.sock_recv(ours, _BYTES):
                await actor.put.remote(data)

        async def there() -> None:
            while (data := await actor.get.remote()) is not None:
                await loop.sock_sendall(ours, data)

        both = [asyncio.ensure_future(here()), asyncio.ensure_future(there())]
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
            return str(await asyncio.wait_for(_awaited(actor.end.remote()), 2 * _END_S))
        except (OSError, asyncio.TimeoutError):
            return "ended"
        except self._ray.exceptions.RayError as error:
            return _words(error)
        finally:
            for each in both:
                each.cancel()


async def _awaited(reference: Any) -> Any:
    return await reference


def _words(error: BaseException) -> str:
    """What Ray says fills pages; the first lines say it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] or type(error).__name__


def connect(address: str) -> Any:
    """Ray, connected to the cluster. DatasetError."""
    host, _, port = address.rpartition(":")
    if address != "auto":
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        except OSError as error:
            raise _unreachable(address, error.strerror or str(error)) from None
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        raise _unreachable(address, _words(error)) from None
    return ray


def _unreachable(address: str, found: str) -> DatasetError:
    return DatasetError(
        "the Ray cluster cannot be reached", where=address, found=found,
        next_step="`ray status` says where it is; without Ray: no --ray",
    )  # fmt: skip


def main(descriptor: int) -> None:
    """Serve the ingest until it closes its end."""
    # The ingest hears Ctrl-C, and ends this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    line = Line(control)
    try:
        _, address, most, slices, folder = line.receive()
    except Gone:
        return
    threading.Thread(target=_end_with, args=(line,), name="headrace-ray-watch", daemon=True).start()
    try:
        ray = connect(address)
        cpus = int(ray.cluster_resources().get("CPU", 0))
        count = max(1, min(most or cpus, slices))
        bridge = _Bridge(ray, control, count, folder)
        bridge.tell("up", count, len(ray.nodes()))
        asyncio.run(bridge.run())
    except HeadraceError as error:
        line.send(("failed", error))
    except OSError as error:
        # Where it is the ingest that has gone, nobody hears this.
        with suppress(Gone):
            line.send(("failed", DatasetError("the work on a cluster ended", where=address, found=str(error))))
    # Until the ingest has read it, and goes.
    threading.Event().wait()


def _end_with(line: Line) -> None:
    """Ray ends the workers of a driver that has gone."""
    with suppress(Gone):
        line.receive()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
