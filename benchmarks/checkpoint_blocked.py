"""Suite `checkpoint-blocked`: how long an asynchronous save holds up training, beside one memcpy of the state.

The state is that of a small decoder with AdamW, in host memory. What is timed is `async_save` until training may go on
(`wait_for_staging`); the save is waited for before the next one, untimed. The peer copies as many bytes, in one piece,
into memory that is there already, with the same threads of torch. So the peer is the bandwidth of memory.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from benchmarks.figures import Figure
from benchmarks.pairs import interleaved
from headrace.testing.serve import serving
from headrace.torch import VolumeWriter, WriterOptions
from headrace.units import MIB
from headrace.volume import Volume

SUITE = "checkpoint-blocked"
NQN = "nqn.2026-01.io.headrace:benchmark-blocked"
#: Figure -> `WriterOptions.integrity`, and the most that training may be held up, in copies of the state.
FIGURES = {"blocked": ("behind", 1.4), "blocked_checksummed": ("copy", None)}


@dataclass(frozen=True, kw_only=True)
class Scale:
    rounds: int
    layers: int
    width: int


FULL = Scale(rounds=7, layers=4, width=1024)
QUICK = Scale(rounds=3, layers=1, width=512)


def state_of(scale: Scale) -> dict[str, dict[str, torch.Tensor]]:
    """Weights, and two moments of each: per layer four square matrices, three of 4 by 1, and two norms."""
    width = scale.width
    shapes = [(width, width)] * 4 + [(4 * width, width)] * 3 + [(width,)] * 2
    names = [f"layers.{layer}.{number}" for layer in range(scale.layers) for number in range(len(shapes))]
    return {
        part: {name: torch.ones(shapes[number % len(shapes)]) for number, name in enumerate(names)}
        for part in ("model", "moment_1", "moment_2")
    }


def measure(figure: str, scale: Scale) -> Figure:
    integrity, at_most = FIGURES[figure]
    state = state_of(scale)
    size = sum(tensor.nbytes for part in state.values() for tensor in part.values())
    flat, kept = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    steps = itertools.count()
    with ExitStack() as stack:
        target = stack.enter_context(serving(NQN, f"mem:{4 * size + 64 * MIB}"))
        Volume.create([target.uri()]).close()
        options = WriterOptions(keep_last=1, integrity=integrity)  # type: ignore[arg-type]
        writer = stack.enter_context(VolumeWriter([target.uri()], "run", options=options))
        writer.prepare(state)

        def ours() -> float:
            step = next(steps)
            began = time.perf_counter()
            future = writer.async_save(state, f"run/step-{step}")
            writer.wait_for_staging()
            blocked = time.perf_counter() - began
            future.result()
            return size / blocked / 1e9

        def peer() -> float:
            began = time.perf_counter()
            kept.copy_(flat)
            return size / (time.perf_counter() - began) / 1e9

        pairs = interleaved(ours, peer, scale.rounds)
    slower = [1 / ratio for ratio in pairs.ratios]
    return Figure(
        suite=SUITE,
        figure=figure,
        value=sorted(slower)[len(slower) // 2],
        unit="copies of the state",
        at_most=at_most,
        samples=slower,
        noise=pairs.noise,
        ours=sorted(pairs.ours)[len(pairs.ours) // 2],
        peer=sorted(pairs.peer)[len(pairs.peer) // 2],
        measured_in="GB/s",
    )


def run(quick: bool, only: Sequence[str] = ()) -> Iterator[Figure]:
    scale = QUICK if quick else FULL
    for figure in FIGURES:
        if not only or figure in only:
            yield measure(figure, scale)
