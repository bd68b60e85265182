"""What suite `checkpoint` is compared with that is not in the project's environment: `torch-checkpointing`, and fio."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import peers
from benchmarks.checkpoint_jobs import _local, held
from headrace.units import MIB

#: As `CheckpointManager` names it.
FOLDER = "torch-checkpointing"
#: fio: requests under way of a process, and the longest that one run may take.
DEPTH, LIMIT_S = 4, 300


def packages() -> str:
    """Where `torch-checkpointing` lies: beside the project's packages, none of which it replaces."""
    return sysconfig.get_path("purelib", vars={"base": str(Path(peers.python()).parent.parent)})


def attach(packages: str, threads: int) -> None:
    """On each rank: its synchronous saver and its reader, over its own storage of files. The state goes into as many
    files a rank as threads write."""
    if packages not in sys.path:
        sys.path.append(packages)
    from torch_checkpointing.checkpoint_reader import CheckpointReader
    from torch_checkpointing.checkpoint_writer import CheckpointWriter, CheckpointWriterArgs, CheckpointWriterConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
    from torch_checkpointing.types import RankInfo

    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = RankInfo(global_world_size=world, global_rank=rank, role_rank=rank, role_world_size=world)
    # 0.1.1 writes ends of files that O_DIRECT does not take: EINVAL on ext4.
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    config = CheckpointWriterConfig(file_write_max_threads=threads)
    held["meta"] = (
        CheckpointWriter(
            CheckpointWriterArgs(config, ranks, storage, pre_finalize_callback=_sync, finalize_callback=_seal)
        ),
        CheckpointReader(ranks, storage),
    )
    # Shared out by bytes.
    parts: list[dict[str, Any]] = [{} for _ in range(threads)]
    for name, value in sorted(held["state"].items(), key=lambda pair: -_local(pair[1]).nbytes):
        min(parts, key=lambda part: sum(tensor.nbytes for tensor in part.values()))[name] = _local(value)
    held["meta_parts"] = parts


def detach() -> None:
    held.pop("meta", None)
    held.pop("meta_parts", None)


def clear(folder: str) -> None:
    """It saves into no folder that is there."""
    if dist.get_rank() == 0:
        shutil.rmtree(Path(folder) / FOLDER, ignore_errors=True)
    dist.barrier()


def _items() -> dict[str, Any]:
    from torch_checkpointing.checkpoint_base import CheckpointItem

    return {f"part_{number}": CheckpointItem(part) for number, part in enumerate(held["meta_parts"])}


def save(folder: str) -> None:
    from torch_checkpointing.checkpoint_base import CheckpointInfo

    held["meta"][0].write(f"{folder}/{FOLDER}", CheckpointInfo(_items()).for_writes())


def load(folder: str) -> None:
    from torch_checkpointing.checkpoint_base import CheckpointInfo

    _, missing = held["meta"][1].read(f"{folder}/{FOLDER}", CheckpointInfo(_items()).for_reads())
    if missing:
        raise AssertionError(f"not loaded: {missing[:3]}")


def _sync(arguments: Any) -> None:
    """It syncs nothing itself: the files of this rank, before it says that they are written."""
    for path in Path(arguments.path).glob(f"*_{dist.get_rank()}.pt"):
        _fsync(path)


def _seal(arguments: Any) -> None:
    if dist.get_rank() == 0:
        _fsync(Path(arguments.path))
        _fsync(Path(arguments.path).parent)


def _fsync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def has_fio() -> bool:
    """Whether fio is here; says so where it is not."""
    if shutil.which("fio"):
        return True
    print("figures beside fio are left out: fio is not here (Debian: apt install fio)", file=sys.stderr)
    return False


def fio(folder: Path, size: int, processes: int, write: bool) -> float:
    """GB/s of as many processes, each over a file of its own: sequential, past the page cache, writes synced."""
    blocks = -(-size // processes // MIB)
    # A sync behind the last write, in the time of the run.
    how = ["--rw=write", f"--fdatasync={blocks}"] if write else ["--rw=read"]
    command = [
        "fio", "--name=fio", f"--directory={folder}", *how, f"--bs={MIB}", f"--size={blocks * MIB}",
        f"--numjobs={processes}", f"--iodepth={DEPTH}", "--direct=1", "--ioengine=libaio", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"fio: {(done.stderr or done.stdout).strip()[-300:]}")
    jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    found = [job["write" if write else "read"] for job in jobs]
    return float(sum(one["io_bytes"] for one in found)) / 1e6 / float(max(one["runtime"] for one in found))
