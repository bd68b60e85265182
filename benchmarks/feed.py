"""Suite `feed`: token samples to a training loop, beside the loaders of PyPI (`benchmarks/peers.txt`).

The same tokens, the same batch (torch int64 [8, 8193]), each loader in a process of its own, on the same cores. The
peers read local files in the page cache, their best case; ours reads over NVMe/TCP from a target in memory, and
verifies every block. Loaders take turns of a second or two (`benchmarks.turns`); each figure is the median of what the
rounds say. `benchmarks.feed_records` does the same with records.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import feed_records, peers
from benchmarks.cores import layout
from benchmarks.feed_loaders import BATCH, LOADERS, ONLY_RESUME, SEED, SEQUENCE, memmap
from benchmarks.feed_plot import PANELS
from benchmarks.feed_record_loaders import LOADERS as RECORD_LOADERS
from benchmarks.figures import Figure
from benchmarks.pairs import interleaved
from benchmarks.programs import ROOT, Program
from benchmarks.turns import SUITE, Turns, cpu_per_gb
from headrace.dataset import (
    Feed,
    FeedOptions,
    GlobalOrder,
    PackOptions,
    TokenStream,
    open_samples,
    pack_stream,
)
from headrace.dataset.order.state import current_state
from headrace.dataset.tokens.idx import encode_idx
from headrace.dataset.tokens.stream import CHECKSUM_BLOCK_BYTES
from headrace.device import Batch, open_device, submit_read
from headrace.testing.serve import ServeProcess, serving
from headrace.units import MIB
from headrace.volume import Volume

NQN = "nqn.2026-01.io.headrace:benchmark-feed"
MEMBERS = 2
#: Those whose worker processes are asked for by a number.
WORKERS = ("streaming", "litdata", "webdataset", "grain")
#: What a step of training is emulated to take.
STEPS_S = (0.005, 0.02, 0.1)
#: Steps of one loader, before the other has its turn.
_WAIT_TURN = 10
#: Batches that each end keeps under way where reads are compared.
AHEAD = 8


@dataclass(frozen=True)
class Scale:
    samples: int
    rounds: int
    turn_s: float
    steps: int
    #: Of the stream that is never read but at its end, in copies of the real one.
    copies: int
    #: Of 0.1 to 15 MB.
    records: int


FULL = Scale(samples=16_384, rounds=9, turn_s=1.5, steps=400, copies=7_500, records=160)
QUICK = Scale(samples=1_024, rounds=3, turn_s=0.5, steps=40, copies=100, records=32)
_OPTIONS: dict[str, Any] = {"sequence_length": SEQUENCE, "global_batch": BATCH, "seed": SEED, "prefetch": 8}


class Rig:
    """Tokens in a folder, and the same in a volume behind a target."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-benchmark-")))
        self.tokens: npt.NDArray[np.int32] = np.random.default_rng(1).integers(
            1, 128_000, scale.samples * SEQUENCE + 1, np.int32
        )
        self.tokens.tofile(self.folder / "tokens.bin")
        half = self.tokens.nbytes // MEMBERS
        size = _up(half + half // 8) + 96 * MIB
        raw = _up(self.tokens.nbytes)
        self.target: ServeProcess = self.stack.enter_context(serving(NQN, *[f"mem:{size}"] * MEMBERS, f"mem:{raw}"))
        self.uris = [self.target.uri(nsid) for nsid in range(1, MEMBERS + 1)]
        lengths = np.full(scale.samples, SEQUENCE, np.int32)
        lengths[-1] += 1
        with Volume.create(self.uris) as volume, volume.session() as session, session.transaction() as transaction:
            transaction.put("tokens.bin", self.tokens, checksum_block_bytes=CHECKSUM_BLOCK_BYTES)
            transaction.put("tokens.idx", b"".join(encode_idx(np.dtype("<i4"), lengths)))

    @cached_property
    def turns(self) -> Turns:
        where = [str(self.folder), " ".join(self.uris)]
        return Turns(
            "benchmarks.feed_loaders", list(LOADERS), WORKERS, where, self.stack,
            rounds=self.scale.rounds, turn_s=self.scale.turn_s,
        )  # fmt: skip

    def close(self) -> None:
        self.stack.close()


def _up(size: int) -> int:
    """To whole MiB."""
    return -(-size // MIB) * MIB


def _rate(row: dict[str, Any]) -> float:
    return float(row["samples"] / row["seconds"])


# ---- figures --------------------------------------------------------------------------------------------------------


def samples(rig: Rig) -> Iterator[Figure]:
    """Samples a second, beside the fastest peer; and each loader's own."""
    yield rig.turns.beside("samples", _rate, "samples/s", max, at_least=1.5)
    yield from rig.turns.figures("samples", _rate, "samples/s")


def cpu(rig: Rig) -> Iterator[Figure]:
    """CPU of the process that gets the batches, and its workers, beside the thriftiest peer; and each loader's own."""
    yield rig.turns.beside("cpu", cpu_per_gb, "s/GB", min, at_most=1.0)
    yield from rig.turns.figures("cpu", cpu_per_gb, "s/GB")


def memory(rig: Rig) -> Iterator[Figure]:
    yield from rig.turns.memory()


def first(rig: Rig) -> Iterator[Figure]:
    yield from rig.turns.first()


def resume(rig: Rig) -> Iterator[Figure]:
    yield from rig.turns.resume(list(ONLY_RESUME))


def packed(rig: Rig) -> Iterator[Figure]:
    """Packed documents beside windows of the same tokens, in samples of the same length."""
    import torch

    from headrace.torch import DocumentLoader, TokenLoader

    chance = np.random.default_rng(3)
    lengths = np.maximum(1, chance.lognormal(np.log(SEQUENCE / 8), 1.0, rig.scale.samples * 8)).astype(np.int32)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), rig.tokens.size, "right"))]
    with Volume.open(rig.uris, write=True) as volume, ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        # As in the loaders' own processes.
        torch.set_num_threads(1)
        with volume.session() as session:
            with session.transaction() as transaction:
                transaction.compose("documents.bin", [("tokens.bin", 0, int(lengths.sum()) * 4)])
                transaction.put("documents.idx", b"".join(encode_idx(np.dtype("<i4"), lengths)))
            pack_stream(session, "documents", PackOptions(sequence_length=SEQUENCE))
        documents = iter(stack.enter_context(DocumentLoader(volume, "documents", **_OPTIONS)))
        windows = iter(stack.enter_context(TokenLoader(volume, "documents", **_OPTIONS)))

        def rate(batches: Iterator[Any]) -> float:
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < rig.scale.turn_s:
                next(batches)
                count += BATCH
            return count / (time.perf_counter() - began)

        pairs = interleaved(lambda: rate(documents), lambda: rate(windows), rig.scale.rounds)
    yield Figure(
        suite=SUITE, figure="packed", value=pairs.median_ratio, unit="of windows", samples=pairs.ratios,
        noise=pairs.noise, ours=statistics.median(pairs.ours), peer=statistics.median(pairs.peer),
        measured_in="samples/s",
    )  # fmt: skip


def records(rig: Rig) -> Iterator[Figure]:
    yield from feed_records.measure(rig.scale.records, rig.scale.rounds, rig.scale.turn_s)


def verified(rig: Rig) -> Iterator[Figure]:
    """Bytes of verified batches in the order of training, over raw scatter reads of the same ranges."""
    raw_uri = rig.target.uri(MEMBERS + 1)
    padded = np.zeros(_up(rig.tokens.nbytes), np.uint8)
    padded[: rig.tokens.nbytes] = rig.tokens.view(np.uint8)
    count = min(rig.scale.samples, 4096) // BATCH
    with open_device(raw_uri) as device, Volume.open(rig.uris) as volume:
        for at in range(0, len(padded), 16 * MIB):
            device.write(at, padded[at : at + 16 * MIB])
        stream = TokenStream.open(volume, "tokens")
        made = {"tokens": open_samples(stream, "windows", SEQUENCE)}
        options = FeedOptions(sequence_length=SEQUENCE, global_batch=BATCH, seed=SEED, prefetch=AHEAD)
        order = np.random.default_rng(2).permutation(rig.scale.samples)[: count * BATCH]
        block = device.block_bytes
        window = SEQUENCE * 4 + block
        slots = np.arange(BATCH, dtype=np.uint64) * np.uint64(window)
        rings = [np.zeros(BATCH * window, np.uint8) for _ in range(AHEAD)]

        def ours() -> float:
            feed = Feed(made, options)
            feed.begin()
            began = time.perf_counter()
            for _ in range(count):
                batch = feed.acquire()
                assert batch is not None
                feed.release(batch)
            took = time.perf_counter() - began
            feed.close()
            return count * BATCH / took

        def raw() -> float:
            began = time.perf_counter()
            under_way: list[Any] = []
            for number in range(count):
                if len(under_way) == AHEAD:
                    under_way.pop(0).wait()
                at = order[number * BATCH : (number + 1) * BATCH].astype(np.uint64) * np.uint64(SEQUENCE * 4)
                batch = Batch(
                    member=np.zeros(BATCH, np.uint32),
                    offset=at // np.uint64(block) * np.uint64(block),
                    length=np.minimum(np.full(BATCH, window, np.uint64), np.uint64(len(padded)) - at),
                    buffer_offset=slots,
                )
                under_way.append(submit_read([device], batch, [rings[number % AHEAD]]))
            for transfer in under_way:
                transfer.wait()
            return count * BATCH / (time.perf_counter() - began)

        pairs = interleaved(ours, raw, rig.scale.rounds)
    yield Figure(
        suite=SUITE, figure="verified", value=pairs.median_ratio, unit="ratio", at_least=0.7, samples=pairs.ratios,
        noise=pairs.noise, ours=statistics.median(pairs.ours), peer=statistics.median(pairs.peer),
        measured_in="samples/s",
    )  # fmt: skip


def wait(rig: Rig) -> Iterator[Figure]:
    """How long a step waits for its batch while steps take their time: the 99th percentile, of the worst length. And
    the same of the loop over a memory map, in turns of a few steps: what this machine gives to who does nothing but
    copy after a pause."""
    import torch

    from headrace.torch import TokenLoader

    def waits(batches: Iterator[Any], step_s: float, steps: int) -> list[float]:
        took = []
        for _ in range(steps):
            time.sleep(step_s)
            began = time.perf_counter()
            next(batches)
            took.append(time.perf_counter() - began)
        return took

    worst, floor = [], []
    with Volume.open(rig.uris) as volume, ExitStack() as stack:
        # As in the processes of the loaders: threads that have to be woken are no floor.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        for step_s in STEPS_S:
            turns = max(1, int(rig.scale.steps * min(1.0, 0.02 / step_s)) // _WAIT_TURN)
            with TokenLoader(volume, "tokens", sequence_length=SEQUENCE, global_batch=BATCH, seed=SEED) as loader:
                ours, plain = iter(loader), memmap(rig.folder, "", 0, None).batches
                next(ours), next(plain)
                took = [(waits(ours, step_s, _WAIT_TURN), waits(plain, step_s, _WAIT_TURN)) for _ in range(turns)]
            worst.append(float(np.quantile([each for mine, _ in took for each in mine], 0.99)))
            floor.append(float(np.quantile([each for _, theirs in took for each in theirs], 0.99)))
    yield Figure(suite=SUITE, figure="wait_p99", value=max(worst), unit="s", at_most=0.001, samples=worst)
    yield Figure(suite=SUITE, figure="wait_memmap", value=max(floor), unit="s", samples=floor)


def busy(rig: Rig) -> Iterator[Figure]:
    """Steps whose main thread computes in Python without a pause, over steps that sleep as long."""
    from headrace.torch import TokenLoader

    step_s = 0.004
    with Volume.open(rig.uris) as volume, ExitStack() as stack:
        loader = stack.enter_context(
            TokenLoader(volume, "tokens", sequence_length=SEQUENCE, global_batch=BATCH, seed=SEED, prefetch=AHEAD)
        )
        batches = iter(loader)

        def steps(pause: Callable[[], None]) -> float:
            began = time.perf_counter()
            for _ in range(rig.scale.steps):
                next(batches)
                pause()
            return rig.scale.steps / (time.perf_counter() - began)

        def compute() -> None:
            end = time.perf_counter() + step_s
            while time.perf_counter() < end:
                pass

        pairs = interleaved(lambda: steps(compute), lambda: steps(lambda: time.sleep(step_s)), rig.scale.rounds)
    yield Figure(
        suite=SUITE, figure="busy", value=pairs.median_ratio, unit="ratio", at_least=0.9, samples=pairs.ratios,
        noise=pairs.noise, ours=statistics.median(pairs.ours), peer=statistics.median(pairs.peer),
        measured_in="steps/s",
    )  # fmt: skip


#: What each of eight ranks does, all at once: from a state to the first batch.
_RANK = """
import json, sys, time
from headrace.torch import TokenLoader
from headrace.volume import Volume
uris, rank, options, state = json.loads(sys.argv[1])
with Volume.open(uris) as volume:
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        with TokenLoader(volume, "huge", rank=rank, world=8, **options) as loader:
            loader.load_state_dict(state)
            next(iter(loader))
            print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
"""


def state(rig: Rig) -> Iterator[Figure]:
    """From a state at 90 % of an epoch to the first batch, eight ranks at once, of a stream that is made of copies
    without copying: the slowest rank."""
    with Volume.open(rig.uris, write=True) as volume:
        with volume.session() as session, session.transaction() as transaction:
            part = ("tokens.bin", 0, rig.scale.samples * SEQUENCE * 4)
            transaction.compose("huge.bin", [part] * rig.scale.copies)
            lengths = np.full(rig.scale.copies, rig.scale.samples * SEQUENCE, np.int32)
            transaction.put("huge.idx", b"".join(encode_idx(np.dtype("<i4"), lengths)))
        made = {"huge": open_samples(TokenStream.open(volume, "huge"), "windows", SEQUENCE)}
        count = made["huge"].sample_count
        order = GlobalOrder({"huge": count}, [1], SEED)
        at = count * 9 // 10 // 64 * 64
        saved = current_state(made, order, global_batch=64, consumed=at).to_dict()
    options = {"sequence_length": SEQUENCE, "global_batch": 64, "seed": SEED}
    with ExitStack() as stack:
        ranks = []
        for rank in range(8):
            job = json.dumps([rig.uris, rank, options, saved])
            ranks.append(Program([sys.executable, "-c", _RANK, job], set(layout().usable)))
            stack.callback(ranks[-1].close)
        slowest = []
        for turn in range(rig.scale.rounds + 1):
            for program in ranks:
                program.send()
            # The first turn has loaded the modules.
            took = [float(program.answer()["seconds"]) for program in ranks]
            if turn:
                slowest.append(max(took))
    yield Figure(suite=SUITE, figure="state", value=statistics.median(slowest), unit="s", at_most=0.1, samples=slowest)


FIGURES: dict[str, Callable[[Rig], Iterator[Figure]]] = {
    "samples": samples, "cpu": cpu, "memory": memory, "first": first, "resume": resume, "packed": packed,
    "records": records, "verified": verified, "wait": wait, "busy": busy, "state": state,
}  # fmt: skip


def plot(figures: Sequence[Figure], path: str) -> None:
    """A picture of what each loader did. SystemExit where none can be made."""
    rows = []
    for title, prefix, names in (
        ("samples of 8,192 tokens", "", [*LOADERS, *ONLY_RESUME]),
        ("records of 0.1 to 15 MB", "records_", list(RECORD_LOADERS)),
    ):
        loaders: dict[str, dict[str, float | None]] = {}
        for name in names:
            of_one = {
                kind: figure for kind in PANELS for figure in figures if figure.figure == f"{prefix}{kind}_{name}"
            }
            # A way of the same package has a name of its own beside it.
            version = next((figure.version for figure in of_one.values() if figure.version), "")
            if of_one:
                told = version if name == "headrace" else f"{name} ({version})"
                loaders[told] = {kind: figure.value for kind, figure in of_one.items()}
        if loaders:
            rows.append((title, loaders))
    told = json.dumps(rows)
    command = [peers.python(), "-m", "benchmarks.feed_plot", str(Path(path).absolute())]
    done = subprocess.run(command, input=told, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"benchmarks: no picture: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")


def run(quick: bool, only: Sequence[str] = ()) -> Iterator[Figure]:
    rig = Rig(QUICK if quick else FULL)
    try:
        for name, measure in FIGURES.items():
            if not only or name in only:
                yield from measure(rig)
    finally:
        rig.close()
