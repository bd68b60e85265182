"""A node's metrics for Prometheus: a collector, and an HTTP server on one address."""

from __future__ import annotations

import contextlib
import http.server
import json
import logging
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.metrics.answers import NODE, TARGETS
from headrace.metrics.names import METRICS, Metric
from headrace.metrics.report import QUANTILES

try:
    from prometheus_client import CollectorRegistry, MetricsHandler, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError:
    raise UsageError(
        "prometheus-client is missing, which serves metrics", next_step="pip install 'headrace[metrics]'"
    ) from None

#: A client must send its request, and take the answer, within this time.
CLIENT_TIMEOUT_S = 10.0

#: Clients that are served at once.
MOST_CLIENTS = 8

_log = logging.getLogger("headrace")

NodeReport = Callable[[], Mapping[str, Any]]


class NodeCollector(Collector):
    """Asks the node each time that it is asked."""

    def __init__(self, node: NodeReport) -> None:
        self._node = node

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        node = self._node()
        rows = {of: list(_rows(node, of)) for of in ("rank", "feed", "staging", "watch", "path", "node")}
        for metric in METRICS:
            family = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            name = f"headrace_{metric.name}".removesuffix("_total")
            found = family(name, metric.help, labels=metric.labels)
            for labels, values in rows[metric.of]:
                for more, value in _samples(metric, values):
                    found.add_metric([*labels, *more], value)
            yield found

    def describe(self) -> Iterable[Any]:
        """Nothing: registering must ask nobody."""
        return []


#: Where a rank's report has what is made by hand.
_SECTIONS = {"feed": "feeds", "staging": "stagings", "watch": "watches"}


def _rows(node: Mapping[str, Any], of: str) -> Iterator[tuple[list[str], Mapping[str, Any]]]:
    if of == "node":
        for path in node["paths"]:
            yield [path["device"], path["path"]], path
        return
    for rank in node["ranks"]:
        label = str(rank["rank"])
        if of == "rank":
            yield [label], rank
        elif of in _SECTIONS:
            for each in rank.get(_SECTIONS[of], ()):
                yield [label, each["name"]], each
        else:
            for device in rank["devices"]:
                for path in device["paths"]:
                    yield [label, device["device"], path["portal"]], path


def _samples(metric: Metric, values: Mapping[str, Any]) -> Iterator[tuple[list[str], float]]:
    if metric.key == "latency":
        for name, quantile in QUANTILES.items():
            yield [f"{quantile:g}"], float(values["latency"][name])
    elif metric.key == "spent":
        for cause, seconds in values["spent"].items():
            yield [cause], float(seconds)
    elif values.get(metric.key) is not None:
        yield [], float(values[metric.key])


def exposition(node: NodeReport) -> str:
    text: bytes = generate_latest(_registry(node))
    return text.decode()


def _registry(node: NodeReport) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NodeCollector(node))
    return registry


class _Http(http.server.ThreadingHTTPServer):
    """At most `MOST_CLIENTS` at once. Who comes then takes the place of the one that has been here longest: a client
    that asks is done in a second, and one that says nothing keeps nobody out."""

    # Above the clients that may come while a place becomes free.
    request_queue_size = 64
    # A port that another server listens on is taken; one that was used a moment ago is not.
    allow_reuse_address = True
    allow_reuse_port = False

    def __init__(self, *arguments: Any) -> None:
        self._lock = threading.Lock()
        #: Its thread, of each client; the oldest first.
        self._clients: dict[Any, threading.Thread] = {}
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            clients = list(self._clients.items())
        for client, thread in clients[: max(0, len(clients) + 1 - MOST_CLIENTS)]:
            _hang_up(client)
            # It may be asking the ranks, which ends, or hold its answer, which it cannot send any more.
            thread.join(CLIENT_TIMEOUT_S)
            if thread.is_alive():
                self.shutdown_request(request)
                return
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), name="headrace-metrics-client",
            daemon=True,
        )  # fmt: skip
        with self._lock:
            self._clients[request] = thread
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Nobody is served any more, and nobody is waited for that says nothing."""
        super().server_close()
        with self._lock:
            clients = list(self._clients.items())
        for client, _ in clients:
            _hang_up(client)
        for _, thread in clients:
            thread.join(CLIENT_TIMEOUT_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A training job's output is no place for a traceback, nor for one who has asked and gone."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            _log.warning("metrics could not be served to %s: %s: %s", client_address[0], type(error).__name__, error)


def _hang_up(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


_serving: weakref.WeakSet[Server] = weakref.WeakSet()


class Server:
    """`/metrics` on one address. `UsageError` where it cannot listen there."""

    def __init__(self, host: str, port: int, node: NodeReport, folder: Path) -> None:
        class Handler(MetricsHandler):
            timeout = CLIENT_TIMEOUT_S
            registry = _registry(node)

            def log_message(self, format: str, *args: Any) -> None:
                """A training job's output is no place for this."""

        class Http(_Http):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        try:
            self._http = Http((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise UsageError(
                "metrics cannot be served here",
                where=f"{host}:{port}",
                found=getattr(error, "strerror", None) or str(error),
                next_step="port=0 takes a free one; several jobs of a node need several ports",
            ) from None
        self._pid = os.getpid()
        self.address: tuple[str, int] = (host, self._http.server_address[1])
        self._targets = folder / TARGETS
        shown = f"[{host}]" if ":" in host else host
        labels = {"headrace_run": folder.name, NODE: socket.gethostname()}
        told = [{"targets": [f"{shown}:{self.address[1]}"], "labels": labels}]
        # Whoever finds it finds all of it.
        early = self._targets.with_suffix(".new")
        try:
            early.write_text(json.dumps(told) + "\n", encoding="utf-8")
            early.replace(self._targets)
        except OSError as error:
            self._http.server_close()
            with contextlib.suppress(OSError):
                early.unlink()
            raise UsageError(
                "it cannot be told where metrics are served", where=str(self._targets), found=error.strerror
            ) from None
        self._thread = threading.Thread(target=self._http.serve_forever, name="headrace-metrics-http", daemon=True)
        self._thread.start()
        _serving.add(self)

    def close(self) -> None:
        if self._pid != os.getpid():
            # The thread, which `shutdown` waits for, and the file are the parent's.
            return
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        with contextlib.suppress(OSError):
            self._targets.unlink()
        _serving.discard(self)

    def after_fork(self) -> None:
        """In the child: the port must be free when the parent has ended."""
        self._http.socket.close()


def _after_fork() -> None:
    for each in list(_serving):
        each.after_fork()


os.register_at_fork(after_in_child=_after_fork)
