"""Staging beside a loader that reads at the same time, over one link: what each of them has of it.

    python -m tests.dataset.beside [--bits 200e6] [--seconds 8]

Target and reader are nodes of the rig, with a shaped link between them; the loader draws as fast as it can in one
process, `headrace dataset stage` runs in another one, with another throttle each time. The loader's own ring keeps the
link busy, so whatever staging has is missing there. Then staging has had no more than its throttle says, and all that
the loader drew verified. (Nothing is read from the stage: that is another test.)
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.dataset import Feed, FeedOptions, TokenStream, open_samples, stages
from headrace.testing.nodes import Link, Node, Nodes
from headrace.volume import Volume
from tests.dataset.corpora import put_stream
from tests.torch.four_nodes.__main__ import inside

NQN = "nqn.2026-01.io.headrace:beside"
PORT = 4420
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
TOKENS = 100_000_000
LENGTH = 32767
#: Options of the staging, and the part of the link that it may have by them; None: by bytes a second.
CASES: dict[str, tuple[Sequence[str], float | None]] = {
    "alone": ((), None),
    "share 1": (("--share", "1"), 1.0),
    "share 0.3": (("--share", "0.3"), 0.3),
    "share 0.1": (("--share", "0.1"), 0.1),
    "limit 2MB": (("--limit", "2MB"), None),
}
LIMIT_BYTES_S = 2e6
#: Of what is under way when the time is up, and of what the throttle lends in advance.
SLACK_BYTES = 24 << 20


def read(uri: str) -> None:
    """Until the input ends: every so often, when and how many bytes came by then."""
    with Volume.open(uri) as volume:
        samples = open_samples(TokenStream.open(volume, "corpus"), "windows", LENGTH)
        feed = Feed({"corpus": samples}, FeedOptions(sequence_length=LENGTH, global_batch=16, seed=3, prefetch=8))
        came, told = 0, 0.0
        while True:
            batch = feed.acquire()
            assert batch is not None
            came += batch.tokens.nbytes
            feed.release(batch)
            if time.monotonic() - told > 0.2:
                told = time.monotonic()
                print(told, came, flush=True)


def prepare(uri: str) -> None:
    with Volume.create([uri]) as volume:
        put_stream(volume, "corpus", [TOKENS // 1000] * 1000)


def start(node: Node, stack: ExitStack, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
    process = node.popen(
        [sys.executable, *arguments], env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.PIPE, text=True, **options,
    )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def rate(lines: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Bytes a second, of the steps that lie whole within."""
    inside = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(lines) if begin <= a[0] and b[0] <= end]
    return sum(count for _, count in inside) / sum(took for took, _ in inside)


def run(bits: float, seconds: float) -> list[dict[str, Any]]:
    link, rows = bits / 8, []
    with ExitStack() as stack:
        nodes = stack.enter_context(Nodes(2))
        size = 2 * TOKENS + (64 << 20)
        start(
            nodes[0], stack, "-m", "headrace.cli", "serve", f"mem:{size // 4096 * 4096}", "--nqn", NQN, "--listen",
            f"{nodes[0].address}:{PORT}", "--allow-host", "any",
        )  # fmt: skip
        uri = f"nvme+tcp://{nodes[0].address}:{PORT}/{NQN}?nsid=1"
        made = nodes[1].run(
            [sys.executable, "-m", "tests.dataset.beside", "--prepare", uri], env=ENVIRONMENT, cwd=ROOT,
            timeout_s=300, check=False,
        )  # fmt: skip
        if made.returncode:
            raise SystemExit(f"the volume could not be made: {made.stdout}{made.stderr}")
        nodes[1].shape(down=Link(rate_bits=bits))
        for name, (options, part) in CASES.items():
            with ExitStack() as case:
                reader = start(nodes[1], case, "-m", "tests.dataset.beside", "--read", uri)
                assert reader.stdout is not None
                first = reader.stdout.readline()
                assert first, "the loader did not begin"
                # Memory of the node's own, seen from here by way of a process in it.
                place = f"/dev/shm/{name.replace(' ', '-')}"
                where = Path(f"/proc/{inside(reader, '--read')}/root{place}")
                if options:
                    stager = start(
                        nodes[1], case, "-m", "headrace.cli", "dataset", "stage", "corpus", "-V", uri, "--to",
                        place, *options,
                    )  # fmt: skip
                    end = time.monotonic() + 60
                    while not where.is_dir() or not any(each.wanted_bytes for each in stages(where)):
                        assert stager.poll() is None and time.monotonic() < end, "the staging did not begin"
                        time.sleep(0.05)
                begin = time.monotonic()
                time.sleep(seconds)
                staged = 0
                if options:
                    # What is there is marked at its end, also where that comes early.
                    os.kill(inside(stager, "headrace.cli"), signal.SIGINT)
                    stager.wait(60)
                    (status,) = stages(where)
                    staged = status.there_chunks * (4 << 20)
                took = time.monotonic() - begin
                reader.kill()
                lines = [tuple(map(float, line.split())) for line in reader.stdout if line[0].isdigit()]
                had = rate([(when, int(count)) for when, count in lines], begin, begin + seconds)
                may = LIMIT_BYTES_S if part is None else part * link
                if options:
                    assert staged <= may * took + SLACK_BYTES, f"{name}: {staged} bytes in {took:.1f} s"
                rows.append(
                    {
                        "staging": name,
                        "link_bytes_s": link,
                        "loader_of_the_link": round(had / link, 3),
                        "staging_of_the_link": round(staged / took / link, 3),
                        "staged_bytes": staged,
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=float, default=200e6, help="a second, of the link")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each case")
    parser.add_argument("--prepare", metavar="URI", help=argparse.SUPPRESS)
    parser.add_argument("--read", metavar="URI", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare:
        prepare(options.prepare)
    elif options.read:
        read(options.read)
    else:
        run(options.bits, options.seconds)


if __name__ == "__main__":
    main()
