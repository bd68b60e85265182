"""Loaders of the same token samples, ours and peers of PyPI, each in a process of its own.

    python -m benchmarks.feed_loaders NAME FOLDER [URI] [WORKERS]

FOLDER has `tokens.bin` (int32, little-endian); a peer makes its own files of it beside, once. Every loader gives torch
int64 [8, 8193], in a shuffled order without end. Jobs as `benchmarks.programs` says:

    {"first": 3}       construct a loader and take its first batch, so often -> seconds each
    {"seconds": 2.0}   take batches for so long -> samples, seconds, CPU seconds of the process and its workers
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

SEQUENCE, BATCH = 8192, 8
WINDOW = SEQUENCE + 1
SEED = 7
#: Samples of a file of those peers that keep samples in many files.
SHARD_SAMPLES = 512

Batches = Iterable[Any]


def tokens_of(folder: Path) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.memmap(folder / "tokens.bin", np.dtype("<i4"), "r")


def sample_count(folder: Path) -> int:
    return (tokens_of(folder).size - 1) // SEQUENCE


def samples_of(folder: Path) -> Iterator[np.ndarray[Any, np.dtype[np.int32]]]:
    tokens = tokens_of(folder)
    for number in range(sample_count(folder)):
        yield np.array(tokens[number * SEQUENCE : number * SEQUENCE + WINDOW])


def forever(make: Callable[[int], Batches]) -> Iterator[torch.Tensor]:
    """Epoch after epoch, each batch as int64."""
    epoch = 0
    while True:
        for batch in make(epoch):
            tensor = (
                batch["tokens"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list | tuple) else batch
            )
            yield torch.as_tensor(tensor).to(torch.int64)
        epoch += 1


def loader_of(dataset: Any, workers: int, **more: Any) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(dataset, num_workers=workers, persistent_workers=workers > 0, **more)


# ---- loaders: each makes its files where they are not there, and gives batches ---------------------------------------


def headrace(folder: Path, uri: str, workers: int) -> Iterator[torch.Tensor]:
    from headrace.torch import TokenLoader
    from headrace.volume import Volume

    volume = Volume.open(uri.split(" "))
    return iter(TokenLoader(volume, "tokens", sequence_length=SEQUENCE, global_batch=BATCH, seed=SEED, prefetch=8))


def memmap(folder: Path, uri: str, workers: int) -> Iterator[torch.Tensor]:
    """The loop that people write by hand."""
    tokens, count = tokens_of(folder), sample_count(folder)

    def epoch(number: int) -> Batches:
        order = np.random.default_rng([SEED, number]).permutation(count)
        for first in range(0, count - BATCH + 1, BATCH):
            yield torch.from_numpy(
                np.stack([tokens[at * SEQUENCE : at * SEQUENCE + WINDOW] for at in order[first : first + BATCH]])
            )

    return forever(epoch)


def arrow(folder: Path, uri: str, workers: int) -> Iterator[torch.Tensor]:
    """HF datasets, map-style: Arrow files, mapped."""
    import datasets

    datasets.disable_progress_bars()
    place = folder / "arrow"
    if not place.exists():
        features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("int32"), length=WINDOW)})
        made = datasets.Dataset.from_generator(
            lambda: ({"tokens": sample} for sample in samples_of(folder)),
            features=features,
            cache_dir=str(folder / "arrow-cache"),
        )
        made.save_to_disk(str(place))
    data = datasets.load_from_disk(str(place)).with_format("numpy")

    def epoch(number: int) -> Batches:
        order = np.random.default_rng([SEED, number]).permutation(len(data))
        for first in range(0, len(data) - BATCH + 1, BATCH):
            yield np.asarray(data[order[first : first + BATCH]]["tokens"])

    return forever(epoch)


def streaming(folder: Path, uri: str, workers: int) -> Iterator[torch.Tensor]:
    """mosaicml-streaming: MDS shards."""
    from streaming import MDSWriter, StreamingDataset

    place = folder / "mds"
    if not place.exists():
        with MDSWriter(out=str(place), columns={"tokens": f"ndarray:int32:{WINDOW}"}) as writer:
            for sample in samples_of(folder):
                writer.write({"tokens": sample})
    data = StreamingDataset(local=str(place), shuffle=True, shuffle_seed=SEED, batch_size=BATCH)
    loader = loader_of(data, workers, batch_size=BATCH, drop_last=True)
    return forever(lambda _: loader)


def litdata(folder: Path, uri: str, workers: int) -> Iterator[torch.Tensor]:
    """litdata: its own chunks of tokens."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

    place = folder / "litdata"
    if not place.exists():
        optimize(
            fn=_Pieces(folder),
            inputs=list(range(0, sample_count(folder), SHARD_SAMPLES)),
            output_dir=str(place),
            num_workers=1,
            chunk_size=WINDOW * SHARD_SAMPLES,
            item_loader=TokensLoader(),
        )
    data = StreamingDataset(
        str(place), item_loader=TokensLoader(block_size=WINDOW), shuffle=True, seed=SEED, drop_last=True
    )
    loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=workers, drop_last=True)
    return forever(lambda _: loader)


class _Pieces:
    """What litdata's workers make chunks of."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, first: int) -> Iterator[torch.Tensor]:
        tokens = tokens_of(self._folder)
        for number in range(first, min(first + SHARD_SAMPLES, sample_count(self._folder))):
            yield torch.from_numpy(np.array(tokens[number * SEQUENCE : number * SEQUENCE + WINDOW]))


def webdataset(folder: Path, uri: str, workers: int) -> Iterator[torch.Tensor]:
    """webdataset: tar shards, shuffled by shard and in a buffer of 1,000 samples."""
    import webdataset as wds

    place = folder / "webdataset"
    if not place.exists():
        place.mkdir()
        with wds.ShardWriter(str(place / "%05d.tar"), maxcount=SHARD_SAMPLES, verbose=0) as writer:
            for number, sample in enumerate(samples_of(folder)):
                writer.write({"__key__": f"{number:08d}", "npy": sample})
    shards = sorted(map(str, place.glob("*.tar")))
    data = wds.WebDataset(shards, shardshuffle=len(shards), seed=SEED, empty_check=False)
    data = data.shuffle(1000).decode().to_tuple("npy").batched(BATCH, partial=False)
    loader = loader_of(data, workers, batch_size=None)
    return forever(lambda _: loader)


def grain(folder: Path, uri: str, workers: int) -> Iterator[torch.Tensor]:
    """grain: its own shuffle and batching, threads that read ahead, over a memory map."""
    import grain.python as pygrain

    class Source:
        def __len__(self) -> int:
            return sample_count(folder)

        def __getitem__(self, number: int) -> np.ndarray[Any, Any]:
            return np.array(tokens[number * SEQUENCE : number * SEQUENCE + WINDOW])

    tokens = tokens_of(folder)
    data = pygrain.MapDataset.source(Source()).shuffle(seed=SEED).repeat().batch(BATCH, drop_remainder=True)
    threads = pygrain.ReadOptions(num_threads=max(1, workers), prefetch_buffer_size=16)
    return (torch.from_numpy(batch).to(torch.int64) for batch in data.to_iter_dataset(read_options=threads))


def megatron(folder: Path, uri: str, workers: int) -> Iterator[torch.Tensor]:
    """megatron-core's indexed dataset, whole documents of one sample each, in the order of a permutation."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    prefix = str(folder / "megatron")
    if not Path(f"{prefix}.idx").exists():
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
        for sample in samples_of(folder):
            builder.add_document(torch.from_numpy(sample), [WINDOW])
        builder.finalize(f"{prefix}.idx")
    data = IndexedDataset(prefix)

    def epoch(number: int) -> Batches:
        order = np.random.default_rng([SEED, number]).permutation(len(data))
        for first in range(0, len(data) - BATCH + 1, BATCH):
            yield np.stack([data.get(int(at)) for at in order[first : first + BATCH]])

    return forever(epoch)


LOADERS: dict[str, Callable[[Path, str, int], Iterator[torch.Tensor]]] = {
    "headrace": headrace, "memmap": memmap, "arrow": arrow, "streaming": streaming, "litdata": litdata,
    "webdataset": webdataset, "grain": grain, "megatron": megatron,
}  # fmt: skip


def _cpu_s() -> float:
    """Of this process and of those it started: workers that live are in neither sum of the kernel's."""
    import psutil

    me = psutil.Process()
    return time.process_time() + sum(sum(child.cpu_times()[:2]) for child in me.children(recursive=True))


def main() -> None:
    warnings.simplefilter("ignore")
    name, folder, uri, workers = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    # What libraries print goes elsewhere: standard output carries the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    make = LOADERS[name]
    stream = make(folder, uri, workers)
    seen = next(stream)
    if seen.shape != (BATCH, WINDOW) or seen.dtype != torch.int64:
        raise AssertionError(f"{name}: {seen.dtype} {tuple(seen.shape)}")
    print(json.dumps({"ready": name}), file=answers)
    for line in sys.stdin:
        job = json.loads(line)
        if "first" in job:
            took = []
            for _ in range(job["first"]):
                began = time.perf_counter()
                next(make(folder, uri, workers))
                took.append(time.perf_counter() - began)
            answer: dict[str, Any] = {"first_s": took}
        else:
            began, cpu, samples = time.perf_counter(), _cpu_s(), 0
            while time.perf_counter() - began < job["seconds"]:
                samples += len(next(stream))
            answer = {"samples": samples, "seconds": time.perf_counter() - began, "cpu_s": _cpu_s() - cpu}
            answer["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
