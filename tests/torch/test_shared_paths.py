"""DCP's own writer and reader of files, on `headrace://` paths, from several ranks: a save is one commit."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from headrace.errors import UsageError
from headrace.testing.serve import serving
from headrace.torch.paths import JobFileSystem, share_paths
from headrace.volume import Volume
from tests.torch.crew import Crew, Rank

try:
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter
except ModuleNotFoundError:  # PyTorch before 2.15
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

FOLDER = "run/model"
ROWS = 70_000


@pytest.fixture
def uri() -> Iterator[str]:
    with serving("nqn.2026-01.io.headrace:test-paths", "mem:64MiB", start_timeout_s=60) as target:
        Volume.create([target.uri()]).close()
        yield target.uri()


def _state(value: float) -> dict[str, Any]:
    """Sharded over the ranks that there are."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    part = -(-ROWS // world)
    rows = torch.arange(ROWS, dtype=torch.float32)[dist.get_rank() * part :][:part] + value
    sharded = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=(ROWS,), stride=(1,))
    return {"sharded": sharded, "whole": torch.full((10,), value), "step": int(value)}


def _save(uri: str, value: float, **options: Any) -> None:
    dcp.save(
        _state(value), storage_writer=FsspecWriter(f"headrace://{FOLDER}", sync_files=False, volume=uri, **options)
    )


def _load(uri: str) -> float:
    """The value that all of it has."""
    state = _state(-1.0)
    dcp.load(state, storage_reader=FsspecReader(f"headrace://{FOLDER}", volume=uri))
    value = float(state["step"])
    expected = _state(value)
    assert torch.equal(state["sharded"].to_local(), expected["sharded"].to_local())
    assert torch.equal(state["whole"], expected["whole"])
    return value


def killed_while_they_save_again(rank: Rank, uri: str) -> None:
    share_paths()
    _save(uri, 1.0)
    assert _load(uri) == 1.0
    _save(uri, 2.0)
    assert _load(uri) == 2.0
    move = JobFileSystem.mv

    def halt(*arguments: Any, **options: Any) -> None:
        rank.say("halted")
        rank.hear()
        move(*arguments, **options)

    JobFileSystem.mv = halt  # type: ignore[method-assign]
    _save(uri, 3.0)


def go_on(rank: Rank, uri: str) -> tuple[float, float]:
    share_paths()
    begun = _load(uri)
    _save(uri, begun + 2)
    return begun, _load(uri)


def test_two_ranks_are_killed_in_mid_save_and_three_go_on(uri: str) -> None:
    """Into the same folder each time: what a file system mixes here."""
    running = Crew(2, killed_while_they_save_again, uri)
    running.hear(0, "halted")
    with Volume.open(uri) as volume:
        found = volume.list(f"{FOLDER}/")
        assert sorted(info.name.rpartition("/")[2] for info in found) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
        assert len({info.sequence for info in found}) == 1
    for pid in running.pids:
        os.kill(pid, signal.SIGKILL)
    running.join(dead=(0, 1))
    assert Crew(3, go_on, uri).join() == [(2.0, 4.0)] * 3


def refuse(rank: Rank, uri: str) -> str:
    share_paths()
    fs = JobFileSystem(uri)
    if rank.rank:
        # Nothing is pending before rank 0 has written: that is not waited for.
        with pytest.raises(FileNotFoundError):
            fs.rm("run/model/.metadata")
    dist.barrier()
    with contextlib.ExitStack() as stack:
        if rank.rank:
            stack.enter_context(pytest.raises(UsageError, match="only rank 0"))
        fs.pipe_file("notes", b"by rank 0")
    with pytest.raises(UsageError, match="use_collectives"):
        fs.open("run/model/__0.metadata.tmp", "wb")
    with pytest.raises(ZeroDivisionError), fs.open("run/other/__0_0.distcp", "wb") as file:
        file.write(b"half")
        _ = 1 // 0
    dist.barrier()
    found = ",".join(fs.find(""))
    dist.barrier()
    fs.close()
    return found


def test_what_is_not_for_all_ranks_is_refused(uri: str) -> None:
    assert Crew(2, refuse, uri).join() == ["notes"] * 2
