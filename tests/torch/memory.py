"""Does a loader's memory grow? Many samples over NVMe/TCP, and the resident memory of the process that draws them.

    python -m tests.torch.memory                                   # 1,000,000 samples in half an hour
    python -m tests.torch.memory --samples 200000 --for-s 0        # as fast as they come

The target is a process of its own, so what is measured is loader, volume and host. The slope is that of a straight line
through the samples behind the first third, in which allocators and pools fill up.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from headrace.testing.serve import serving
from headrace.torch import TokenLoader
from headrace.units import MIB
from headrace.volume import Volume
from tests.dataset.corpora import ingest_texts

NQN = "nqn.2026-01.io.headrace:memory"
BATCH = 64
#: Looks at the memory, evenly spread.
LOOKS = 300


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def draw(loader: TokenLoader, samples: int, for_s: float) -> tuple[list[float], list[int]]:
    """Seconds, and resident memory then."""
    batches = samples // BATCH
    seconds, resident = [], []
    # What was imported stays, and need not be looked through each time.
    gc.freeze()
    begun = time.monotonic()
    for number in range(batches):
        next(loader)
        if number % max(1, batches // LOOKS) == 0:
            gc.collect()
            seconds.append(time.monotonic() - begun)
            resident.append(resident_bytes())
        ahead = for_s * (number + 1) / batches - (time.monotonic() - begun)
        if ahead > 0.05:
            time.sleep(ahead)
    return seconds, resident


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--for-s", type=float, default=1800.0, help="seconds that they are spread over (%(default)g)")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        target = stack.enter_context(serving(NQN, "mem:32MiB"))
        volume = stack.enter_context(Volume.create([target.uri()]))
        ingest_texts(volume, Path(folder), count=60)
        loader = stack.enter_context(
            TokenLoader(volume, "corpus", sequence_length=32, global_batch=BATCH, rank=0, world=1, seed=1)
        )
        seconds, resident = draw(loader, options.samples, options.for_s)
        drawn, epochs = loader.consumed, loader.epochs["corpus"]
    third = len(seconds) // 3
    slope, _ = np.polyfit(seconds[third:], resident[third:], 1)
    middle, last = statistics.median(resident[third : 2 * third]), statistics.median(resident[2 * third :])
    print(
        json.dumps(
            {
                "samples": drawn,
                "epochs": round(epochs, 1),
                "seconds": round(seconds[-1], 1),
                "resident_mib": round(resident[-1] / MIB, 2),
                "growth_kib_last_thirds": round((last - middle) / 1024, 1),
                "slope_mib_an_hour": round(float(slope) * 3600 / MIB, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
