"""`torch-checkpointing`: its savers, from processes of its own, and its loader, on a volume."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch_checkpointing.builder import make_async_checkpoint_saver, make_sync_checkpoint_saver
from torch_checkpointing.checkpoint_base import CheckpointBase, CheckpointItem
from torch_checkpointing.checkpoint_layout import JsonSerialization, LayoutInfo
from torch_checkpointing.checkpoint_loader import CheckpointLoader
from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
from torch_checkpointing.checkpoint_reader import CheckpointReader
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.storage.base_storage import ReadArgs
from torch_checkpointing.types import RankInfo

from headrace.errors import UsageError
from headrace.torch.torch_checkpointing import VolumeStorage, VolumeStorageConfig
from headrace.volume import Volume
from tests.frameworks.cases import halting
from tests.frameworks.cases.job import Job, as_torchrun
from tests.torch.crew import Crew, Rank
from tests.waiting import until

RUN = "meta"
ROWS = 70_000


def _state(world: int) -> dict[str, torch.Tensor]:
    """Sharded over the ranks, unevenly over three; large enough that some of it is not copied on its way."""
    mesh = init_device_mesh("cpu", (world,))
    part = -(-ROWS // world)
    mine = torch.arange(ROWS, dtype=torch.float32)[dist.get_rank() * part : (dist.get_rank() + 1) * part]
    local = mine[:, None].repeat(1, 3).contiguous()
    sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(ROWS, 3), stride=(3, 1))
    return {"weight": sharded, "moment": torch.zeros(5)}


def _step(model: dict[str, torch.Tensor], step: int) -> None:
    for tensor in model.values():
        _local(tensor).mul_(0.75).add_(step / 3)


class _OnCpu(DefaultMetadataManager):
    """Theirs gathers the metadata of the ranks in tensors on "cuda", whatever the group is."""

    def _all_gather_pickled_data(self, data: Any, process_group: Any = None) -> dict[int, Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, data, group=process_group)
        return dict(enumerate(found))


class _Checkpoint(CheckpointBase):
    def __init__(self, model: dict[str, torch.Tensor], step: int | None) -> None:
        self._items = {"model": CheckpointItem(model, resharder=DefaultResharder())}
        if step is not None:
            layout = LayoutInfo("step.json", JsonSerialization())
            self._items["step"] = CheckpointItem(step or None, layout=layout)
        self.loaded: dict[str, Any] = {}

    def get_items(self) -> dict[str, CheckpointItem]:
        return self._items

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


class _Manager:
    """As `CheckpointManager` puts it together, but for `_OnCpu`."""

    def __init__(self, job: Job, rank: Rank, *, asynchronous: bool) -> None:
        self.rank = rank
        ranks = RankInfo(
            global_world_size=rank.world, global_rank=rank.rank, role_rank=rank.rank, role_world_size=rank.world
        )
        self.storage = VolumeStorageConfig(job.uri, run_id=RUN)
        # Its synchronous saver writes metadata only when they are made anew.
        metadata = _OnCpu(ranks, should_cache_metadata=asynchronous)
        options: dict[str, Any] = {
            "rank_info": ranks, "storage_config": self.storage, "checkpoint_metadata_manager": metadata,
            "pre_finalize_callback": halting.in_mid_save,
        }  # fmt: skip
        if asynchronous:
            # Its processes import all of this, on a machine that may be busy.
            config = AsyncCheckpointSaverConfig(process_config=CheckpointProcessConfig(240))
            self._saver: Any = make_async_checkpoint_saver(config, **options)
        else:
            self._saver = make_sync_checkpoint_saver(**options)
        self._loader = CheckpointLoader(CheckpointReader(ranks, self.storage), metadata)

    def save(self, model: dict[str, torch.Tensor], step: int) -> None:
        saving = self._saver.save(f"{RUN}/step-{step}", _Checkpoint(model, step if self.rank.rank == 0 else None))
        if saving is None:
            return
        done = saving[1]
        halted = Path(os.environ[halting.FOLDER])
        until(lambda: done.done() or len(list(halted.glob("halted-*"))) == self.rank.world, "it is saved", 240)
        if not done.done():
            self.rank.say("halted")
            self.rank.hear()
        done.result()

    def load(self, model: dict[str, torch.Tensor], step: int) -> None:
        checkpoint = _Checkpoint(model, 0)
        self._loader.load(f"{RUN}/step-{step}", checkpoint, strict=True)
        assert checkpoint.loaded["step"] == step

    def close(self) -> None:
        self._saver.close()
        # The session, so that whatever comes next can write: a rank ends without a word.
        self.storage.create_storage().close()


def killed_while_it_saves(rank: Rank, job: Job) -> None:
    as_torchrun(rank)
    os.environ[halting.FOLDER] = str(job.folder)
    model = _state(rank.world)
    manager = _Manager(job, rank, asynchronous=True)
    for step in (1, 2, 3):
        _step(model, step)
        manager.save(model, step)


def goes_on(rank: Rank, job: Job) -> int:
    as_torchrun(rank)
    os.environ[halting.FOLDER] = str(job.folder / "nothing")
    expected, model = _state(rank.world), _state(rank.world)
    manager = _Manager(job, rank, asynchronous=False)
    latest = max(int(name.removeprefix("step-")) for name in manager.storage.create_storage().ls(Path(RUN)))
    for step in range(1, latest + 1):
        _step(expected, step)
    _forget(model)
    manager.load(model, latest)
    _same(model, expected)
    for step in range(latest + 1, 5):
        for each in (model, expected):
            _step(each, step)
        manager.save(model, step)
        _forget(model)
        manager.load(model, step)
        _same(model, expected)
    manager.close()
    return latest


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _forget(model: dict[str, torch.Tensor]) -> None:
    for tensor in model.values():
        _local(tensor).zero_()


def _same(model: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(_local(model[name]), _local(tensor)) for name, tensor in expected.items())


def test_two_ranks_are_killed_in_mid_save_and_three_go_on(job: Job) -> None:
    (job.folder / "step-3").touch()
    running = Crew(2, killed_while_it_saves, job)
    for number in range(2):
        running.hear(number, "halted")
    with Volume.open(job.uri) as volume:
        assert {info.name for info in volume.list(f"{RUN}/")} == {
            f"{RUN}/step-{step}/{name}" for step in (1, 2) for name in
            ("model_0.pt", "model_1.pt", "step.json", "metadata.pkl")
        }  # fmt: skip
        for step in (1, 2):
            assert len({info.sequence for info in volume.list(f"{RUN}/step-{step}/")}) == 1
    for pid in running.pids:
        os.killpg(pid, signal.SIGKILL)
    running.join(dead=(0, 1))
    assert Crew(3, goes_on, job).join() == [2] * 3


@pytest.fixture
def storage(job: Job) -> Iterator[VolumeStorage]:
    storage = VolumeStorageConfig(job.uri, run_id="contract").create_storage()
    yield storage
    storage.rmdir(Path("contract"))
    storage.close()


def test_the_contract_of_a_rename(storage: VolumeStorage) -> None:
    """Row by row, as `Storage.rename` has it."""
    folder = Path("/contract")
    storage.write(folder / "tmp_a" / "sub" / "one", b"1")
    assert storage.exists(folder / "tmp_a") and not storage.exists(folder / "a")
    assert storage.ls(folder / "tmp_a") == ["sub"] and storage.getsize(folder / "tmp_a" / "sub" / "one") == 1
    storage.rename(folder / "tmp_a", folder / "a", is_directory=True)
    assert not storage.exists(folder / "tmp_a") and storage.read(folder / "a" / "sub" / "one") == b"1"
    # Occupied: a folder that has something in it, and a file.
    with pytest.raises(FileExistsError):
        storage.write(folder / "tmp_a" / "two", b"2")
    storage.rename(folder / "a", folder / "b", is_directory=True)
    storage.write(folder / "a" / "two", b"2")
    with pytest.raises(FileExistsError):
        storage.rename(folder / "b", folder / "a", is_directory=True)
    storage.write(folder / "file", b"3")
    with pytest.raises(FileExistsError):
        storage.rename(folder / "b", folder / "file", is_directory=True)
    with pytest.raises(FileNotFoundError):
        storage.rename(folder / "nothing", folder / "c", is_directory=True)
    # Files: a file gives way, a folder does not.
    storage.rename(folder / "file", folder / "other")
    storage.write(folder / "file", b"4")
    storage.rename(folder / "file", folder / "other")
    assert storage.read(folder / "other") == b"4" and not storage.exists(folder / "file")
    with pytest.raises(OSError, match="is a folder"):
        storage.rename(folder / "other", folder / "a")
    assert storage.ls(folder) == ["a", "b", "other"]
    assert storage.glob("contract/*") == ["contract/a", "contract/b", "contract/other"]


def test_what_is_given_up_is_nowhere(storage: VolumeStorage) -> None:
    with pytest.raises(ZeroDivisionError), storage.stream_write(Path("contract/half")) as stream:
        stream.write(b"half of it")
        _ = 1 // 0
    storage.write(Path("contract/tmp_x/one"), b"1")
    storage.rmdir(Path("contract/tmp_x"))
    assert not storage.exists(Path("contract"))
    with pytest.raises(FileNotFoundError):
        storage.read(Path("contract/half"))
    storage.write(Path("contract/whole"), b"")
    assert storage.read(Path("contract/whole")) == b"" and storage.getsize(Path("contract/whole")) == 0


def test_what_was_given_up_for_another_save_is_not_taken_for_saved(storage: VolumeStorage) -> None:
    """`CheckpointWriter` leaves out the rename of a folder that is not there, and says that all is well."""
    other = storage._config.create_storage()
    for writer, folder in ((storage, "tmp_a"), (other, "tmp_b")):
        writer.write(Path("contract") / folder / "one", b"1")
    other.rename(Path("contract/tmp_b"), Path("contract/b"), is_directory=True)
    assert storage.exists(Path("contract/tmp_a"))
    with pytest.raises(UsageError, match="given up"):
        storage.rename(Path("contract/tmp_a"), Path("contract/a"), is_directory=True)
    storage.write(Path("contract/tmp_a/one"), b"1")
    storage.rename(Path("contract/tmp_a"), Path("contract/a"), is_directory=True)
    assert storage.ls(Path("contract")) == ["a", "b"] and not storage.exists(Path("contract/tmp_a"))


def test_tensors_are_written_from_where_they_are(storage: VolumeStorage) -> None:
    state = {"large": torch.randn(100_000), "small": torch.arange(9), "view": torch.randn(300, 300).t()[:, 5:]}
    path = Path("contract/state.pt")
    with storage.get_write_stream(path, state) as stream:
        torch.save(state, stream)
        copied = len(stream._small) + sum(len(part) for part in stream._parts if not stream._is_held(part))
        assert copied < 64 << 10
    loaded = torch.load(io.BytesIO(storage.read(path)))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    with storage.stream_read(path, ReadArgs(pre_read_full_file=False)) as read:
        assert read.seek(-4, io.SEEK_END) == storage.getsize(path) - 4
        assert read.read(100) == storage.read(path)[-4:] and read.read(1) == b""
