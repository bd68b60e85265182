"""Suite `fabric-nodes`: many targets, one client, and a narrow link with a shallow buffer between them.

Seventeen nodes (`headrace.testing.nodes`) on one switch; the client's link carries 400 Mb/s and holds 128 KiB. Each of
the sixteen others serves 8 MiB of memory. TCP is the kernel's CUBIC; nothing else is shaped.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.figures import Figure
from benchmarks.node_client import SIZE_BYTES
from benchmarks.shaped import serve_each
from headrace.testing.nodes import Link, Node, Nodes, NodesUnavailable
from headrace.units import KIB

SUITE = "fabric-nodes"
FIGURES = {
    "sixteen_targets_shaped_link": "throughput over that of the link",
    "sixteen_targets_p99": "99th percentile of a read's time, over that of one target",
    "sixteen_targets_uncapped": "throughput without the cap on reads",
    "sixteen_targets_p99_uncapped": "99th percentile without it",
}
TARGETS = 16
#: Reads of 1 MiB under way of each target; the one target gets all of them.
DEPTH = 4
LINK = Link(rate_bits=400e6, buffer_bytes=128 * KIB)
#: Of an Ethernet frame of 1514 bytes, TCP with timestamps carries 1448; the bucket counts frames.
PAYLOAD_BYTES_PER_S = LINK.rate_bits / 8 * 1448 / 1514
NQN = "nqn.2024-01.headrace:node"


@dataclass
class _Measured:
    rates: list[float] = field(default_factory=list)
    p99s: list[float] = field(default_factory=list)


def _read(
    client: Node,
    uris: Sequence[str],
    depth: int,
    seconds: tuple[float, float],
    environment: Mapping[str, str],
    into: _Measured,
) -> None:
    """`seconds`: before it counts, and while it does."""
    command = [sys.executable, "-m", "benchmarks.node_client", str(depth), *map(str, seconds), *uris]
    before, _ = client.counters()
    answer = json.loads(client.run(command, env=environment, timeout_s=120 + 4 * sum(seconds)).stdout)
    after, _ = client.counters()
    into.rates.append(answer["bytes_per_s"] / PAYLOAD_BYTES_PER_S)
    into.p99s.append(answer["p99_s"])
    shown = f"{len(uris):2} x {depth:2}: {into.rates[-1]:.3f} of the link, p50 {answer['p50_s']:.2f} s"
    shown += f", p99 {answer['p99_s']:.2f} s, {after.dropped - before.dropped} of {after.packets - before.packets}"
    print(f"{shown} packets dropped, cap {answer['flow']['mode']}", file=sys.stderr)


def run(quick: bool, only: Sequence[str] = ()) -> Iterator[Figure]:
    rounds, seconds = (1, (1.0, 1.0)) if quick else (5, (2.0, 10.0))
    one, many, uncapped = _Measured(), _Measured(), _Measured()
    with ExitStack() as stack:
        try:
            nodes = stack.enter_context(Nodes(TARGETS + 1))
            client = nodes[TARGETS]
            client.shape(down=LINK)
        except NodesUnavailable as error:
            print(f"suite {SUITE} is skipped: {error}", file=sys.stderr)
            return
        uris = [uri for (uri,) in serve_each(nodes[:TARGETS], [client], stack, NQN, f"mem:{SIZE_BYTES}")]
        for _ in range(rounds):
            _read(client, uris[:1], DEPTH * TARGETS, seconds, {}, one)
            _read(client, uris, DEPTH, seconds, {}, many)
            _read(client, uris, DEPTH, seconds, {"HEADRACE_INFLIGHT": "off"}, uncapped)

    def rate(name: str, measured: _Measured, at_least: float | None = None) -> Figure:
        value = statistics.median(measured.rates)
        return Figure(
            suite=SUITE, figure=name, value=value, unit="of the link", at_least=at_least, samples=measured.rates
        )

    def p99(name: str, measured: _Measured, at_most: float | None = None) -> Figure:
        ratios = [ours / peer for ours, peer in zip(measured.p99s, one.p99s, strict=True)]
        return Figure(
            suite=SUITE,
            figure=name,
            value=statistics.median(ratios),
            unit="ratio",
            at_most=at_most,
            samples=ratios,
            ours=statistics.median(measured.p99s),
            peer=statistics.median(one.p99s),
            measured_in="s",
        )

    figures = [
        rate("sixteen_targets_shaped_link", many, at_least=0.85),
        p99("sixteen_targets_p99", many, at_most=3),
        rate("sixteen_targets_uncapped", uncapped),
        p99("sixteen_targets_p99_uncapped", uncapped),
    ]
    yield from (figure for figure in figures if not only or figure.figure in only)
