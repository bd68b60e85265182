"""Suite `dlio`: the DLIO benchmark of PyPI, unmodified, trains its 3D U-Net from a volume over a shaped link.

Two nodes (`headrace.testing.nodes`): a target in memory, and a client whose link carries 2 Gbit/s. DLIO makes the
files, `headrace ingest --records` keeps them in a volume, and DLIO trains from it through `headrace.torch.dlio`: two
emulated accelerators, which together want 90 % of what a bare socket carries over that link, just before each run. The
files that DLIO finds in its folder then are empty. Beside it, DLIO with its own PyTorch reader on the files in the page
cache.

The figures are DLIO's own (`summary.json`), but that bytes are those of the files and not their nominal length. They
are none of MLPerf: a data loader of one's own is not allowed there.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.programs import ROOT
from benchmarks.shaped import Client, serve, serve_bare
from headrace.settings import VOLUME
from headrace.testing.nodes import Link, Node, Nodes, NodesUnavailable
from headrace.units import KIB, MIB
from scripts.environments import DLIO, CannotMake

SUITE = "dlio"
FIGURES = {
    "au": "accelerator utilisation, from a volume over the link",
    "au_local": "the same with DLIO's own reader on local files in the page cache",
    "link": "bytes of files a second of that run, over a bare socket's",
}
LINK = Link(rate_bits=2e9, buffer_bytes=256 * KIB)
NQN = "nqn.2026-01.io.headrace:benchmark-dlio"
#: Of what a bare socket carries.
DEMAND = 0.9
RANKS = 2
#: Of `unet3d_h100`; its records are 147 MB, those here a twentieth, spread as widely.
BATCH = 7
SPREAD = 68_341_808 / 146_600_628


@dataclass(frozen=True)
class Scale:
    #: One step for each fourteen. AU leaves out a rank's own first step, and not that it waits then for the other's:
    #: some twenty steps make that small.
    files: int
    record_bytes: int
    epochs: int
    rounds: int


FULL = Scale(files=336, record_bytes=7_330_031, epochs=1, rounds=3)
QUICK = Scale(files=112, record_bytes=1_000_000, epochs=1, rounds=1)


@dataclass(frozen=True)
class Run:
    """What DLIO says of one."""

    au_percent: float
    samples_per_s: float


class Bench:
    def __init__(self, scale: Scale, folder: Path, python: Path) -> None:
        self.scale, self.folder = scale, folder
        self._programs = python.parent
        self._number = 0

    def command(self, data: Path, *, options: Sequence[str]) -> list[str]:
        """DLIO on the files of `data`."""
        self._number += 1
        settings = {
            "dataset.data_folder": data,
            "dataset.num_files_train": self.scale.files,
            "dataset.record_length": self.scale.record_bytes,
            "dataset.record_length_stdev": int(SPREAD * self.scale.record_bytes),
            "reader.batch_size": BATCH,
            "train.epochs": self.scale.epochs,
            "workflow.checkpoint": False,
        }
        command = [str(self._programs / "mpiexec"), "-n", str(RANKS), str(self._programs / "dlio_benchmark")]
        command += ["workload=unet3d_h100", f"hydra.run.dir={self.output}"]
        return [*command, *(f"++workload.{key}={value}" for key, value in settings.items()), *options]

    @property
    def output(self) -> Path:
        """Where the last run wrote."""
        return self.folder / f"run-{self._number}"

    def run(self, node: Node, command: list[str], volume: str = "") -> None:
        path = f"{ROOT / 'src'}:{ROOT / 'benchmarks' / 'stand_ins'}"
        environment = {"PYTHONPATH": path, VOLUME: volume, "OMP_NUM_THREADS": "1"}
        node.run(command, env=environment, cwd=self.folder, timeout_s=600)

    def train(self, node: Node, data: Path, compute_s: float, volume: str = "") -> Run:
        options = [f"++workload.train.computation_time={compute_s:.4f}"]
        if volume:
            options += ["++workload.reader.data_loader_classname=headrace.torch.dlio.VolumeDataLoader"]
            options += ["++workload.reader.data_loader_sampler=index"]
        self.run(node, self.command(data, options=options), volume)
        metric = json.loads((self.output / "summary.json").read_text())["metric"]
        return Run(metric["train_au_mean_percentage"], metric["train_throughput_mean_samples_per_second"])


def run(quick: bool, only: Sequence[str] = ()) -> Iterator[Figure]:
    scale = QUICK if quick else FULL
    try:
        python = DLIO.make()
    except CannotMake as error:
        raise SystemExit(f"benchmarks: cannot make {DLIO.folder.name}: {error}") from None
    local: list[Run] = []
    ours: list[Run] = []
    bare: list[float] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-benchmark-")))
        bench = Bench(scale, folder, python)
        data, stubs = folder / "data" / "unet3d", folder / "stubs" / "unet3d"
        size = scale.files * scale.record_bytes
        try:
            target, client = stack.enter_context(Nodes(2, shared=[folder]))
            generate = ["++workload.workflow.generate_data=True", "++workload.workflow.train=False"]
            bench.run(client, bench.command(data, options=generate))
            for part in ("train", "valid"):
                (stubs / part).mkdir(parents=True)
            files = sorted((data / "train").iterdir())
            for file in files:
                (stubs / "train" / file.name).touch()
            mean_bytes = sum(file.stat().st_size for file in files) / len(files)
            (uri,) = serve(target, [client], stack, NQN, f"mem:{-(-size * 3 // MIB // 2) + 96}MiB")
            cli = [sys.executable, "-m", "headrace.cli"]
            client.run([*cli, "volume", "create", uri])
            client.run(
                [*cli, "ingest", str(data / "train"), "unet3d/train", "--records", "--volume", uri], timeout_s=300
            )
            client.shape(down=LINK)
        except NodesUnavailable as error:
            print(f"suite {SUITE} is skipped: {error}", file=sys.stderr)
            return
        socket = Client(client, "benchmarks.records_client", serve_bare(target, stack), stack)
        for _ in range(scale.rounds):
            bare.append(float(socket.ask(bare=2.0 if quick else 5.0)["bytes_per_s"]))
            compute_s = RANKS * BATCH * mean_bytes / (DEMAND * bare[-1])
            ours.append(bench.train(client, stubs, compute_s, uri))
            local.append(bench.train(client, data, compute_s))
    au = [each.au_percent for each in ours]
    au_local = [each.au_percent for each in local]
    rates = [each.samples_per_s * mean_bytes for each in ours]
    shares = [rate / carried for rate, carried in zip(rates, bare, strict=True)]
    figures = [
        Figure(suite=SUITE, figure="au", value=statistics.median(au), unit="%", at_least=90, samples=au),
        Figure(suite=SUITE, figure="au_local", value=statistics.median(au_local), unit="%", samples=au_local),
        Figure(
            suite=SUITE, figure="link", value=statistics.median(shares), unit="of a bare socket", samples=shares,
            ours=statistics.median(rates) / 1e6, peer=statistics.median(bare) / 1e6, measured_in="MB/s",
        ),
    ]  # fmt: skip
    yield from (figure for figure in figures if not only or figure.figure in only)
