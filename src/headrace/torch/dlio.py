"""The DLIO benchmark, unmodified, reading from a volume: its data loader, named in its configuration.

    HEADRACE_VOLUME=nvme+tcp://... dlio_benchmark workload=unet3d_h100 \
        ++workload.reader.data_loader_classname=headrace.torch.dlio.VolumeDataLoader \
        ++workload.reader.data_loader_sampler=index

DLIO lists the files of `data_folder/train` itself, so they have to be there, as empty files; what is in them is the
dataset of records `FOLDER/train` of the volume, where FOLDER is the last part of `data_folder`. Its files are found by
their names, in the order that DLIO's own PyTorch loader has: each rank its part of them, shuffled alike.

What a sample is made of is DLIO's, too: the array `x` of an `.npz` file, else the bytes of the file. DLIO's own readers
throw that away and hand out one and the same picture; here the batch is what was read.
"""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dlio_benchmark.common.enumerations import DataLoaderType, DatasetType, Shuffle
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader

from headrace.dataset.ingestion.archives import key_of
from headrace.dataset.records.ahead import AheadOptions, Record, RecordsAhead
from headrace.dataset.records.npz import npz_array
from headrace.dataset.records.records import Records
from headrace.errors import DatasetError, UsageError
from headrace.settings import VOLUME, volume_addresses
from headrace.volume import Volume


class VolumeDataLoader(BaseDataLoader):  # type: ignore[misc]  # DLIO has no types.
    """Batches are lists of tensors: files differ in length."""

    def __init__(self, format_type: Any, dataset_type: Any, epoch: int) -> None:
        super().__init__(format_type, dataset_type, epoch, DataLoaderType.PYTORCH)
        self._kind = str(format_type)
        self._records: Records | None = None
        #: By key.
        self._numbers: dict[str, int] = {}
        self._ahead: RecordsAhead[torch.Tensor] | None = None

    def read(self) -> None:
        """Called once, before the first epoch."""
        addresses = volume_addresses()
        if addresses is None:
            raise UsageError("no volume is named to read from", next_step=f"set {VOLUME} to its members")
        volume = Volume.open(addresses)
        # At the latest when the process ends: DLIO does not say when that is.
        weakref.finalize(self, volume.close)
        self._records = Records.open(volume, f"{Path(self._args.data_folder).name}/{self.dataset_type}")
        keys = self._records.keys(np.arange(len(self._records)))
        self._numbers = {key: number for number, key in enumerate(keys)}
        if self._args.my_rank == 0:
            logging.info(f"headrace: {self._records.describe()}, from {', '.join(volume.uris)}")

    def next(self) -> Iterator[list[torch.Tensor]]:
        """The batches of one epoch."""
        if self._records is None:
            raise UsageError("no batches before `read`", where="the data loader of a volume")
        training = self.dataset_type is DatasetType.TRAIN
        found = self._args.train_global_index_map if training else self._args.val_global_index_map
        samples = [found[index] for index in self._order(sorted(found))]
        batches = [samples[at : at + self.batch_size] for at in range(0, len(samples), self.batch_size)]
        if batches and len(batches[-1]) < self.batch_size:
            del batches[-1]
        threads = max(1, self._args.read_threads)
        options = AheadOptions(
            # As many batches as the workers of DLIO's own loader have under way.
            prefetch=threads * max(1, math.ceil(self._args.prefetch_size / threads)),
            threads=threads if self._args.preprocess_time else 0,
        )
        numbers = [[self._number(path) for path, _ in batch] for batch in batches]
        self.finalize()
        self._ahead = RecordsAhead(self._records, numbers, kinds=[self._kind], decode=self._decode, options=options)
        for batch, tensors in zip(batches, self._ahead, strict=True):
            yield [tensor[..., place] for tensor, (_, place) in zip(tensors, batch, strict=True)]

    def finalize(self) -> None:
        """Called after each epoch."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _order(self, indices: list[int]) -> list[int]:
        """This rank's samples as DLIO's own sampler has them."""
        if self._args.sample_shuffle is not Shuffle.OFF:
            seed = self._args.seed if self._args.sample_shuffle is Shuffle.SEED else None
            np.random.RandomState(seed).shuffle(indices)
        return indices

    def _number(self, path: str) -> int:
        name = os.path.relpath(path, Path(self._args.data_folder, str(self.dataset_type)))
        number = self._numbers.get(os.fsdecode(key_of(name)[0]))
        if number is None:
            where = self._records.name if self._records else ""
            raise DatasetError("the volume has no record of a file", where=where, expected=name)
        return number

    def _decode(self, record: Record) -> torch.Tensor:
        if self._args.preprocess_time:
            time.sleep(max(0.0, np.random.normal(self._args.preprocess_time, self._args.preprocess_time_stdev)))
        data = record[self._kind]
        if self._kind == "npz":
            return torch.from_numpy(npz_array(data, "x", self._kind))
        return torch.frombuffer(data, dtype=torch.uint8).reshape(-1, 1)
