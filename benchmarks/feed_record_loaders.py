"""Loaders of the same records of 0.1 to 15 MB, ours and peers of PyPI, each in a process of its own.

    python -m benchmarks.feed_record_loaders NAME FOLDER URI WORKERS

FOLDER has `files/*.bin`; a peer makes its own files of them beside, once. Every loader gives lists of eight records,
bytes or views of bytes, in a shuffled order without end, and one byte of every page is looked at: what is mapped is
only there then. Jobs as `benchmarks.loader_process` says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loader_process import Loader, Work, forever, loader_of, serve
from headrace.units import KIB, MIB

BATCH = 8
SEED = 7
PAGE_BYTES = 4 * KIB
#: Of a file of those peers that keep records in many files.
SHARD_BYTES = 64 * MIB
#: Records that are shuffled among each other where a peer shuffles in a buffer.
SHUFFLED = 64


def paths_of(folder: Path) -> list[Path]:
    return sorted((folder / "files").iterdir())


def headrace(folder: Path, uri: str, workers: int, state: Any) -> Loader:
    from headrace.torch import RecordLoader
    from headrace.volume import Volume

    loader: RecordLoader[Any] = RecordLoader(Volume.open(uri.split(" ")), "records", global_batch=BATCH, seed=SEED)
    if state is not None:
        loader.load_state_dict(state)
    return Loader(([record["bin"] for record in batch] for batch in loader), loader.state_dict)


class Files:
    """The dataset that people write by hand: a file a record."""

    def __init__(self, folder: Path) -> None:
        self._paths = paths_of(folder)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> bytes:
        return self._paths[number].read_bytes()


def files(folder: Path, uri: str, workers: int, state: Any) -> Loader:
    loader = loader_of(Files(folder), workers, batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=list)
    return Loader(forever(lambda _: loader))


def arrow(folder: Path, uri: str, workers: int, state: Any) -> Loader:
    """HF datasets, map-style: a binary column in Arrow files, mapped, and views of it."""
    import datasets

    datasets.disable_progress_bars()
    place = folder / "arrow"
    if not place.exists():
        made = datasets.Dataset.from_generator(
            lambda: ({"data": path.read_bytes()} for path in paths_of(folder)),
            features=datasets.Features({"data": datasets.Value("large_binary")}),
            cache_dir=str(folder / "arrow-cache"),
            writer_batch_size=BATCH,
        )
        made.save_to_disk(str(place))
    data = datasets.load_from_disk(str(place)).with_format("arrow")

    def epoch(number: int) -> Iterator[list[Any]]:
        order = np.random.default_rng([SEED, number]).permutation(len(data))
        for first in range(0, len(data) - BATCH + 1, BATCH):
            yield [each.as_buffer() for each in data[order[first : first + BATCH]]["data"]]

    return Loader(forever(epoch))


def streaming(folder: Path, uri: str, workers: int, state: Any) -> Loader:
    """mosaicml-streaming: MDS shards."""
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

    place = folder / "mds"
    if not place.exists():
        with MDSWriter(out=str(place), columns={"data": "bytes"}, size_limit=SHARD_BYTES) as writer:
            for path in paths_of(folder):
                writer.write({"data": path.read_bytes()})
    data = StreamingDataset(local=str(place), shuffle=True, shuffle_seed=SEED, batch_size=BATCH)
    more = {"persistent_workers": True} if workers else {}
    loader = StreamingDataLoader(
        data, batch_size=BATCH, num_workers=workers, drop_last=True, collate_fn=_together, **more
    )
    if state is not None:
        loader.load_state_dict(state)
    return Loader((batch["data"] for batch in forever(lambda _: loader)), loader.state_dict)


def litdata(folder: Path, uri: str, workers: int, state: Any) -> Loader:
    """litdata: its own chunks."""
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    place = folder / "litdata"
    if not place.exists():
        optimize(
            fn=_read,
            inputs=list(map(str, paths_of(folder))),
            output_dir=str(place),
            num_workers=1,
            chunk_bytes=SHARD_BYTES,
        )
    data = StreamingDataset(str(place), shuffle=True, seed=SEED, drop_last=True)
    loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=workers, drop_last=True, collate_fn=_together)
    if state is not None:
        loader.load_state_dict(state)
    return Loader((batch["data"] for batch in forever(lambda _: loader)), loader.state_dict)


def _read(path: str) -> dict[str, bytes]:
    return {"data": Path(path).read_bytes()}


def _together(rows: list[dict[str, bytes]]) -> dict[str, list[bytes]]:
    return {"data": [row["data"] for row in rows]}


def webdataset(folder: Path, uri: str, workers: int, state: Any) -> Loader:
    """webdataset: tar shards, shuffled by shard and in a buffer of 64 records."""
    import webdataset as wds

    place = folder / "webdataset"
    if not place.exists():
        place.mkdir()
        with wds.ShardWriter(str(place / "%05d.tar"), maxsize=SHARD_BYTES, verbose=0) as writer:
            for path in paths_of(folder):
                writer.write({"__key__": path.stem, "bin": path.read_bytes()})
    shards = sorted(map(str, place.glob("*.tar")))
    data = wds.WebDataset(shards, shardshuffle=len(shards), seed=SEED, empty_check=False)
    data = data.shuffle(SHUFFLED).to_tuple("bin").batched(BATCH, collation_fn=_firsts, partial=False)
    loader = loader_of(data, workers, batch_size=None)
    return Loader(forever(lambda _: loader))


def _firsts(rows: list[tuple[bytes]]) -> list[bytes]:
    return [row[0] for row in rows]


#: Each with the package whose version counts.
LOADERS: dict[str, tuple[Callable[[Path, str, int, Any], Loader], str]] = {
    "headrace": (headrace, "headrace"), "files": (files, "torch"), "arrow": (arrow, "datasets"),
    "streaming": (streaming, "mosaicml-streaming"), "litdata": (litdata, "litdata"),
    "webdataset": (webdataset, "webdataset"),
}  # fmt: skip


def weigh(batch: list[Any]) -> tuple[int, int]:
    if len(batch) != BATCH:
        raise AssertionError(f"{len(batch)} records")
    size = 0
    for record in batch:
        data = np.frombuffer(record, np.uint8)
        data[::PAGE_BYTES].max()
        size += len(data)
    return BATCH, size


def same(one: list[Any], other: list[Any]) -> bool:
    return all(bytes(a) == bytes(b) for a, b in zip(one, other, strict=True))


def main(name: str, folder: Path, uri: str, workers: int) -> None:
    make, package = LOADERS[name]
    half = len(paths_of(folder)) // BATCH // 2
    serve(name, package, Work(partial(make, folder, uri, workers), weigh, same, half))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
