"""Loaders of the same token samples, ours and peers of PyPI, each in a process of its own.

    python -m benchmarks.feed_loaders NAME FOLDER URI WORKERS

FOLDER has `tokens.bin` (int32, little-endian); a peer makes its own files of it beside, once. Every loader gives torch
int64 [8, 8193], in a shuffled order without end. Jobs as `benchmarks.loader_process` says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.loader_process import Loader, Work, forever, loader_of, serve

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


def tensors(make: Callable[[int], Batches]) -> Iterator[torch.Tensor]:
    """Epoch after epoch, each batch as int64."""
    for batch in forever(make):
        tensor = batch["tokens"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list | tuple) else batch
        yield torch.as_tensor(tensor).to(torch.int64)


# ---- loaders: each makes its files where they are not there, and gives batches ---------------------------------------


def headrace(folder: Path, uri: str, workers: int, state: Any) -> Loader:
    from headrace.torch import TokenLoader
    from headrace.volume import Volume

    volume = Volume.open(uri.split(" "))
    loader = TokenLoader(volume, "tokens", sequence_length=SEQUENCE, global_batch=BATCH, seed=SEED, prefetch=8)
    if state is not None:
        loader.load_state_dict(state)
    return Loader(iter(loader), loader.state_dict)


def memmap(folder: Path, uri: str, workers: int, state: Any) -> Loader:
    """The loop that people write by hand."""
    tokens, count = tokens_of(folder), sample_count(folder)

    def epoch(number: int) -> Batches:
        order = np.random.default_rng([SEED, number]).permutation(count)
        for first in range(0, count - BATCH + 1, BATCH):
            yield torch.from_numpy(
                np.stack([tokens[at * SEQUENCE : at * SEQUENCE + WINDOW] for at in order[first : first + BATCH]])
            )

    return Loader(tensors(epoch))


def arrow_files(folder: Path) -> Any:
    """HF datasets: Arrow files, mapped."""
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
    return datasets.load_from_disk(str(place))


def arrow(folder: Path, uri: str, workers: int, state: Any) -> Loader:
    """HF datasets, map-style, in the order of a permutation. Only its iterable datasets have states."""
    data = arrow_files(folder).with_format("numpy")

    def epoch(number: int) -> Batches:
        order = np.random.default_rng([SEED, number]).permutation(len(data))
        for first in range(0, len(data) - BATCH + 1, BATCH):
            yield np.asarray(data[order[first : first + BATCH]]["tokens"])

    return Loader(tensors(epoch))


def arrow_iterable(folder: Path, uri: str, workers: int, state: Any) -> Loader:
    """HF datasets, iterable: shuffled by shard and in a buffer of at most 1,000 samples, which a state forgets."""
    data = arrow_files(folder)
    data = data.to_iterable_dataset(num_shards=32).shuffle(seed=SEED, buffer_size=min(1000, len(data) // 8))
    data = data.with_format("numpy").batch(BATCH, drop_last_batch=True)
    if state is not None:
        data.load_state_dict(state)
    return Loader(tensors(lambda _: data), data.state_dict)


def streaming(folder: Path, uri: str, workers: int, state: Any) -> Loader:
    """mosaicml-streaming: MDS shards."""
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

    place = folder / "mds"
    if not place.exists():
        with MDSWriter(out=str(place), columns={"tokens": f"ndarray:int32:{WINDOW}"}) as writer:
            for sample in samples_of(folder):
                writer.write({"tokens": sample})
    data = StreamingDataset(local=str(place), shuffle=True, shuffle_seed=SEED, batch_size=BATCH)
    more = {"persistent_workers": True} if workers else {}
    loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=workers, drop_last=True, **more)
    if state is not None:
        loader.load_state_dict(state)
    return Loader(tensors(lambda _: loader), loader.state_dict)


def litdata(folder: Path, uri: str, workers: int, state: Any) -> Loader:
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
    if state is not None:
        loader.load_state_dict(state)
    return Loader(tensors(lambda _: loader), loader.state_dict)


class _Pieces:
    """What litdata's workers make chunks of."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, first: int) -> Iterator[torch.Tensor]:
        tokens = tokens_of(self._folder)
        for number in range(first, min(first + SHARD_SAMPLES, sample_count(self._folder))):
            yield torch.from_numpy(np.array(tokens[number * SEQUENCE : number * SEQUENCE + WINDOW]))


def webdataset(folder: Path, uri: str, workers: int, state: Any) -> Loader:
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
    return Loader(tensors(lambda _: loader))


def grain(folder: Path, uri: str, workers: int, state: Any) -> Loader:
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
    batches = iter(data.to_iter_dataset(read_options=threads))
    if state is not None:
        batches.set_state(state)
    return Loader((torch.from_numpy(batch).to(torch.int64) for batch in batches), batches.get_state)


def megatron(folder: Path, uri: str, workers: int, state: Any) -> Loader:
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

    return Loader(tensors(epoch))


#: Each with the package whose version counts.
LOADERS: dict[str, tuple[Callable[[Path, str, int, Any], Loader], str]] = {
    "headrace": (headrace, "headrace"), "memmap": (memmap, "numpy"), "arrow": (arrow, "datasets"),
    "streaming": (streaming, "mosaicml-streaming"), "litdata": (litdata, "litdata"),
    "webdataset": (webdataset, "webdataset"), "grain": (grain, "grain"), "megatron": (megatron, "megatron-core"),
}  # fmt: skip


#: Not in turns: who has states that the other way of the same package has not.
ONLY_RESUME = {"arrow_iterable": (arrow_iterable, "datasets")}


def weigh(batch: torch.Tensor) -> tuple[int, int]:
    if batch.shape != (BATCH, WINDOW) or batch.dtype != torch.int64:
        raise AssertionError(f"{batch.dtype} {tuple(batch.shape)}")
    return BATCH, BATCH * SEQUENCE * 4


def main(name: str, folder: Path, uri: str, workers: int) -> None:
    make, package = {**LOADERS, **ONLY_RESUME}[name]
    half = sample_count(folder) // BATCH // 2
    serve(name, package, Work(partial(make, folder, uri, workers), weigh, torch.equal, half))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
