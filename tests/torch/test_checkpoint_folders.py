"""Checkpoints out of a volume and into it, as folders: real ones of DCP, bit for bit, and such as somebody forged."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.metadata import Metadata

from headrace.checkpoint import CheckpointId, list_checkpoints, read_manifest
from headrace.checkpoint.foreign import read_folder
from headrace.checkpoint.pickled import load, plain
from headrace.cli import main
from headrace.errors import CheckpointFailed, ChecksumMismatch, ObjectExists, UsageError, VolumeFull
from headrace.torch import VolumeReader, VolumeWriter
from headrace.torch.files.export_folder import export_dcp, export_safetensors
from headrace.torch.files.import_folder import import_dcp
from headrace.volume import Volume
from headrace.volume.inspect import details_of
from tests.torch.crew import Crew, Rank

ONE = CheckpointId("run", 1)


def state_of(rank: Rank, fill: bool) -> dict[str, Any]:
    """Cut along either dimension, unevenly; replicated; of many dtypes; empty; and what is no tensor."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(11)
    whole = {
        "rows": torch.randn(7, 33),
        "columns": torch.randn(5, 9).to(torch.bfloat16),
        "small": torch.randn(64).to(torch.float8_e4m3fn),
        "flags": torch.rand(4, 5) > 0.5,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "turned": torch.randn(6, 4).t(),
    }
    if not fill:
        whole = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    if rank.world > 1:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (rank.world,))
        how = {"rows": Shard(0), "columns": Shard(1), "flags": Replicate()}
        whole |= {name: distribute_tensor(whole[name], mesh, [place]) for name, place in how.items()}
    return {"model": whole, "loader": {"consumed": 70 if fill else 0, "seed": b"\x00\xff" if fill else b""}}


def leaves(state: dict[str, Any]) -> dict[str, Any]:
    found = dict(state["loader"])
    for name, tensor in state["model"].items():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found[name] = (
            str(local.dtype),
            tuple(local.shape),
            bytes(local.contiguous().view(-1).view(torch.uint8).tolist()),
        )
    return found


def both_ways(rank: Rank, place: tuple[str, str]) -> None:
    """DCP's folder -> volume -> DCP's folder; read from each, by as many ranks."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    folder, uri = Path(place[0]), place[1]
    state = state_of(rank, True)
    dcp.save(state, checkpoint_id=folder / "saved")
    if rank.rank == 0:
        with Volume.open(uri, write=True) as volume:
            with volume.session(run_id="import") as session:
                report = import_dcp(session, folder / "saved", ONE)
            assert (report.tensors, report.others, report.files) == (7, 2, rank.world)
            exported = export_dcp(volume, str(ONE), folder / "exported")
            assert exported.data_bytes == report.data_bytes
    if rank.world > 1:
        dist.barrier()
    from_folder, from_volume = state_of(rank, False), state_of(rank, False)
    dcp.load(from_folder, checkpoint_id=folder / "exported")
    with VolumeReader(uri, "run/step-1") as reader:
        reader.load(from_volume)
    assert leaves(from_folder) == leaves(state) == leaves(from_volume) != leaves(state_of(rank, False))


@pytest.mark.parametrize("world", [1, 2])
def test_both_ways_bit_for_bit(tmp_path: Path, world: int) -> None:
    uri = f"file:{tmp_path}/member"
    Volume.create(f"{uri}?create=32MiB").close()
    Crew(world, both_ways, (str(tmp_path), uri)).join()
    # As many as saved it, though all came from one process.
    with Volume.open(uri) as volume:
        assert [info.ranks for info in list_checkpoints(volume)] == [world]
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("view", [torch.conj, lambda value: torch._neg_view(value.real.contiguous())])
def test_views_that_conjugate_or_negate(tmp_path: Path, view: Any) -> None:
    import torch.distributed.checkpoint as dcp

    value = view(torch.complex(torch.arange(1.0, 5), torch.arange(2.0, 6)))
    dcp.save({"a": value}, checkpoint_id=tmp_path / "saved", no_dist=True)
    uri = f"file:{tmp_path}/member"
    Volume.create(f"{uri}?create=16MiB").close()
    with Volume.open(uri, write=True) as volume, volume.session(run_id="import") as session:
        import_dcp(session, tmp_path / "saved", ONE)
    for into in (torch.zeros(4, dtype=value.dtype), view(torch.zeros(4, dtype=torch.complex64))):
        with VolumeReader(uri, "run/step-1") as reader:
            reader.load({"a": into})
        assert torch.equal(into, value)


WEIGHTS = {
    "a": torch.arange(3 * 70_000, dtype=torch.float32).reshape(3, 70_000),
    "b": torch.ones(9, 5, dtype=torch.bfloat16),
    "count": torch.tensor(7),
}


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A checkpoint of WEIGHTS and something else."""
    uri = f"file:{tmp_path}/member"
    Volume.create(f"{uri}?create=32MiB").close()
    with VolumeWriter(uri, "run") as writer:
        writer.save({"model": WEIGHTS, "step": 1}, "run/step-1")
    return uri


def test_safetensors(uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = ["checkpoint", "export", "run", "-V", uri, "--format", "safetensors"]
    assert main([*export, str(tmp_path / "one")]) == 0
    found = safetensors.torch.load_file(tmp_path / "one" / "model.safetensors")
    assert {n: (t.dtype, t.tolist()) for n, t in found.items()} == {
        n: (t.dtype, t.tolist()) for n, t in WEIGHTS.items()
    }
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == safetensors.torch.save(WEIGHTS, {"format": "pt"})
    assert main([*export, str(tmp_path / "many"), "--shard-size", "1000", "--dtype", "bfloat16"]) == 0
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    found = {}
    for name in set(index["weight_map"].values()):
        found |= safetensors.torch.load_file(tmp_path / "many" / name)
    assert set(index["weight_map"]) == set(found) == set(WEIGHTS) and len(set(index["weight_map"].values())) == 2
    assert torch.equal(found["a"], WEIGHTS["a"].to(torch.bfloat16)) and found["count"].dtype == torch.int64
    capsys.readouterr()
    for more, text in (([], "there already"), (["--prefix", "nothing."], "nothing.")):
        target = tmp_path / ("one" if not more else "none")
        assert main([*export, str(target), *more]) in (1, 2)
        assert text in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many", "member", "one"]


def test_damaged_bytes_are_never_handed_on(uri: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with Volume.open(uri, write=True) as volume:
        export_dcp(volume, "run/step-1", folder)
        (name,) = (entry.name for entry in volume.list("run/step-00000001/rank"))
        extent = next(each for each in details_of(volume, name).blobs[0].extents if each.holds == "data")
    # In the folder, where neither DCP nor torch.load would see it.
    shard = folder / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[data.index(WEIGHTS["a"].numpy().tobytes()) + 4001] ^= 1
    shard.write_bytes(data)
    with Volume.open(uri, write=True) as volume, volume.session(run_id="t") as session:
        with pytest.raises(CheckpointFailed, match=r"shard of tensor 'model\.a' cannot be read.*CRC"):
            import_dcp(session, folder, CheckpointId("run", 2))
        assert [info.step for info in list_checkpoints(volume)] == [1]
    # In the volume.
    with (tmp_path / "member").open("r+b") as file:
        file.seek(extent.offset + 200_000)
        file.write(b"\xff")
    with Volume.open(uri) as volume:
        for export in (export_dcp, export_safetensors):
            with pytest.raises(ChecksumMismatch, match=r"'(model\.)?a' of a checkpoint is damaged"):
                export(volume, "run/step-1", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "member"]


class Runs:
    """A pickle that would do something."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], tuple(self.call[1:])


def laughs() -> bytes:
    """A tuple that holds another one twice, sixty times over: a page of pickle."""
    value: Any = ("ha",)
    for _ in range(60):
        value = (value, value)
    return pickle.dumps(value)


def forged(folder: Path, flaw: str) -> bytes:
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    storage = metadata.storage_data
    place = next(info for index, info in storage.items() if index.fqn == "model.a")
    entry: Any = metadata.state_dict_metadata["model.a"]
    if flaw == "runs":
        metadata.planner_data = Runs(os.system, f"touch {folder}/ran")
    elif flaw == "evaluates":
        return pickle.dumps(Runs(eval, f"open({str(folder / 'ran')!r}, 'w')"))
    elif flaw == "protocol 0":
        return pickle.dumps(Runs(os.system, f"touch {folder}/ran"), protocol=0)
    elif flaw == "laughs":
        metadata.planner_data = pickle.loads(laughs())
    elif flaw == "laughing key":
        return b"\x80\x04}" + laughs()[2:-1].replace(b"\x95", b"\x95", 1) + b"K\x01s."
    elif flaw == "memo":
        return b"\x80\x04Nr\xff\xff\xff\x7f."
    elif flaw == "cut off":
        return (folder / ".metadata").read_bytes()[:-20]
    elif flaw == "text":
        return b"no pickle at all"
    elif flaw == "length":
        return b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x0fx."
    elif flaw == "outside":
        place.relative_path = "../secret"
    elif flaw == "absolute":
        place.relative_path = "/etc/passwd"
    elif flaw == "link":
        (folder / "link").symlink_to("/etc/passwd")
        place.relative_path = "link"
    elif flaw == "pipe":
        os.mkfifo(folder / "pipe")
        place.relative_path = "pipe"
    elif flaw == "beyond":
        place.offset = 1 << 50
    elif flaw == "large":
        entry.size = entry.chunks[0].sizes = torch.Size([1 << 30, 1 << 20])
    elif flaw == "other shape":
        entry.size = entry.chunks[0].sizes = torch.Size([70_000, 3])
    elif flaw == "other item":
        for index, info in storage.items():
            if index.fqn == "model.b":
                info.offset, info.length = place.offset, place.length
    elif flaw == "nowhere":
        metadata.storage_data = {index: info for index, info in storage.items() if index.fqn != "model.a"}
    elif flaw == "a part":
        entry.size = torch.Size([4, 70_000])
    elif flaw == "transformed":
        place.transform_descriptors = ["zstd"]
    return pickle.dumps(metadata)


FLAWS = (
    "runs", "evaluates", "protocol 0", "laughs", "laughing key", "memo", "cut off", "text", "length", "outside",
    "absolute", "link", "pipe", "beyond", "large", "other shape", "other item", "nowhere", "a part", "transformed",
)  # fmt: skip


def test_a_forged_folder_does_nothing_and_is_refused(uri: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 2_000_000)
    with Volume.open(uri, write=True) as volume, volume.session(run_id="t") as session:
        whole = tmp_path / "whole"
        export_dcp(volume, "run/step-1", whole)
        for flaw in FLAWS:
            folder = tmp_path / flaw
            folder.mkdir()
            for path in whole.iterdir():
                os.link(path, folder / path.name)
            data = forged(folder, flaw)
            (folder / ".metadata").unlink()
            (folder / ".metadata").write_bytes(data)
            with pytest.raises((CheckpointFailed, UsageError)) as caught:
                import_dcp(session, folder, CheckpointId("run", 2))
            assert len(str(caught.value)) < 1500, flaw
            assert not (folder / "ran").exists(), flaw
        # Not because nothing can be imported.
        import_dcp(session, whole, CheckpointId("run", 2))
        with pytest.raises(ObjectExists):
            import_dcp(session, whole, CheckpointId("run", 2))
        assert [info.step for info in list_checkpoints(volume)] == [1, 2]
        for folder, text in ((tmp_path / "nothing", "no such folder"), (tmp_path, "no checkpoint of torch")):
            with pytest.raises(UsageError, match=text):
                import_dcp(session, folder, CheckpointId("run", 3))


def test_a_few_bytes_of_metadata_do_not_become_many(uri: str, tmp_path: Path) -> None:
    text = "x" * (1 << 20)
    for value in ([text] * 300, {"a": float("nan")}, {"a": 10**5000}):
        with pytest.raises(CheckpointFailed, match="the planner's data"):
            plain(load(pickle.dumps(value)))
    assert plain(load(pickle.dumps([text, (1 << 63, -0.5)])))
    folder = tmp_path / "folder"
    with Volume.open(uri) as volume:
        export_dcp(volume, "run/step-1", folder)
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    entry: Any = metadata.state_dict_metadata["model.a"]
    entry.chunks = entry.chunks * 100
    metadata.state_dict_metadata |= {f"model.{n}": entry for n in range(100)}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointFailed, match="as many as there are places"):
        read_folder(folder)


def test_metadata_of_every_protocol_is_the_same() -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties, TensorStorageMetadata

    entry = TensorStorageMetadata(properties=TensorProperties(), size=torch.Size([2, 3]), chunks=[])
    metadata = Metadata({"w": entry}, planner_data={"w": ("w",)}, storage_data={MetadataIndex("w", [0, 0]): None})
    for protocol in (2, 3, 4, 5):
        found = load(pickle.dumps(metadata, protocol=protocol))
        assert found.get("state_dict_metadata")["w"].get("size") == (2, 3)
        assert found.get("planner_data") == {"w": ("w",)}
        (index,) = found.get("storage_data")
        assert (index.get("fqn"), index.get("offset")) == ("w", (0, 0))


def stay_half_way(rank: Rank, what: tuple[str, str, str]) -> None:
    """Say "half" in the middle of an export or import, and stay there."""

    def heard(done: int, total: int) -> None:
        if done < total:
            rank.say("half")
            rank.hear()

    uri, folder, kind = what
    with Volume.open(uri, write=kind == "import") as volume:
        if kind == "export":
            export_dcp(volume, "run/step-1", Path(folder), heard=heard)
            return
        with volume.session(run_id="headrace volume import") as session:
            import_dcp(session, Path(folder), CheckpointId("run", 2), heard=heard)


def killed_half_way(uri: str, folder: Path, what: str) -> None:
    crew = Crew(1, stay_half_way, (uri, str(folder), what))
    crew.hear(0, "half")
    os.kill(crew.pids[0], signal.SIGKILL)
    crew.join(dead=(0,))


def test_killed_in_mid_export_and_in_mid_import(uri: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    killed_half_way(uri, folder, "export")
    assert not folder.exists()
    (left,) = (path for path in tmp_path.iterdir() if path.name.startswith(".out."))
    # No export of this name left these.
    others = [tmp_path / name for name in (".out.of my own.partial", ".out.v2.0123abcd.partial")]
    # Another node is at it: whether somebody holds its lock is not to be seen from here, as on NFS.
    others.append(tmp_path / ".out.0badcafe.0123abcd.partial")
    for other in others:
        other.mkdir()
    with Volume.open(uri) as volume:
        # One that lives is left alone; one that nobody holds goes.
        with pytest.raises(KeyboardInterrupt):
            export_dcp(volume, "run/step-1", folder, heard=_interrupt)
        assert not left.exists() and not folder.exists()
        export_dcp(volume, "run/step-1", folder)
    for other in others:
        other.rmdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["member", "out"]
    killed_half_way(uri, folder, "import")
    with Volume.open(uri) as volume:
        assert [info.step for info in list_checkpoints(volume)] == [1]
        assert not volume.list("run/step-00000002")
    assert main(["checkpoint", "import", str(folder), "run/step-2", "-V", uri]) == 0
    with Volume.open(uri) as volume:
        assert len(read_manifest(volume, CheckpointId("run", 2)).tensors) == 3


def _interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt


def command(rank: Rank, what: tuple[list[str], int]) -> tuple[int, str]:
    """The command in a process where no file may be written beyond so many bytes, as on a device that is full there."""
    arguments, limit_bytes = what
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = main(arguments)
    return status, said.getvalue()


def test_a_full_device_leaves_nothing(uri: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    arguments = ["checkpoint", "export", "run", str(folder), "-V", uri]
    assert Crew(1, command, (arguments, 500_000)).join() == [(1, "headrace: error: File too large\n")]
    assert [path.name for path in tmp_path.iterdir()] == ["member"]
    with Volume.open(uri, write=True) as volume:
        export_dcp(volume, "run/step-1", folder)
    # A volume that has no room says so before it writes; one whose device has none, in the middle.
    small = [f"file:{tmp_path}/{name}" for name in ("x", "y")]
    Volume.create([f"{each}?create=2MiB" for each in small]).close()
    with Volume.open(small, write=True) as volume, volume.session(run_id="t") as session:
        with session.transaction() as tx:
            tx.put("ballast", bytes(session.free_bytes - 700_000))
        with pytest.raises(VolumeFull):
            import_dcp(session, folder, ONE)
        assert session.quarantined_bytes == 0
    thin = [f"file:{tmp_path}/{name}" for name in ("v", "w")]
    Volume.create([f"{each}?create=64MiB" for each in thin], log_bytes=128 << 10).close()
    arguments = ["checkpoint", "import", str(folder), "run/step-1", "-V", thin[0], "-V", thin[1]]
    ((status, said),) = Crew(1, command, (arguments, 900_000)).join()
    assert status == 1 and len(said.splitlines()) == 1 and "File too large" in said
    with Volume.open(thin) as volume:
        assert not volume.list("")
    assert main(arguments) == 0


def test_without_torch_the_command_says_so(uri: str, tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from headrace.cli import main; sys.exit(main(sys.argv[1:]))"

    def answer(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, "checkpoint", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    for arguments in (["export", "run", str(tmp_path / "x")], ["import", str(tmp_path), "run/step-2"]):
        refused = answer(*arguments, "-V", uri)
        assert refused.returncode == 2 and "headrace[torch]" in refused.stderr and len(refused.stderr.splitlines()) == 1
    listed = answer("ls", uri)
    assert listed.returncode == 0 and "whole" in listed.stdout
