"""Volumes for everything that speaks fsspec: pandas, pyarrow, Hugging Face datasets, `torch.distributed.checkpoint`.

`pip install headrace[fsspec]` registers `headrace://`; nothing has to be imported:

    pandas.read_parquet("headrace://corpus/part-0.parquet", storage_options={"volume": "nvme+tcp://10.0.0.5/nqn..."})

What a path means is in `paths`, open files are in `files`, who may write is in `writing`, and the verbs are in
`filesystem`.
"""

from headrace.filesystem.filesystem import HeadraceFileSystem

__all__ = ["HeadraceFileSystem"]
