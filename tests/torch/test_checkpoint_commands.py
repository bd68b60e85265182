"""`headrace checkpoint`: what it shows, checks, compares, pins and deletes, of checkpoints that ranks saved."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.checkpoint import CheckpointId, read_manifest
from headrace.checkpoint import difference as difference_module
from headrace.checkpoint.difference import Difference, differences
from headrace.checkpoint.manifest import DTYPE_BYTES
from headrace.checkpoint.numbers import distances, stored_dtype
from headrace.cli import main
from headrace.torch import VolumeWriter
from headrace.units import MIB
from headrace.volume import Volume
from headrace.volume.inspect import details_of
from tests.torch.crew import Crew, Rank


def weights(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    found = {"a": torch.randn(37, 19), "b": torch.randn(8, 6, 10).to(torch.bfloat16), "same": torch.arange(50)}
    if step == 2:
        found["a"][5, 3] += 0.5
        found["a"][36, 18] -= 0.25
        found["b"][7, 5, 9] = float("inf")
    return found


def save_two(rank: Rank, uri: str) -> None:
    """Step 1 cut along dimension 0, step 2 along dimension 1, so that no chunk of the one is a chunk of the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (rank.world,))
    with VolumeWriter(uri, "team/run") as writer:
        for step in (1, 2):
            state: dict[str, Any] = {
                name: distribute_tensor(tensor, mesh, [Shard(step - 1 if tensor.dim() > 1 else 0)])
                for name, tensor in weights(step).items()
            }
            others = {"new": torch.ones(3)} if step == 2 else {"old": torch.ones(4), "kind": 7}
            others |= {"cast": torch.zeros(4, dtype=torch.float16 if step == 2 else torch.float32)}
            others |= {"grown": torch.zeros(step, 2), "scalar": torch.tensor(float(step))}
            others |= {"kind": torch.ones(1)} if step == 2 else {}
            writer.save({"model": state, "loader": {"consumed": step}, **others}, f"team/run/step-{step}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    member = tmp_path_factory.mktemp("volume") / "member"
    Volume.create(f"file:{member}?create=32MiB", stripe_bytes=65536).close()
    Crew(2, save_two, f"file:{member}").join()
    return member


class Case:
    def __init__(self, saved: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.member = folder / "member"
        self.member.write_bytes(saved.read_bytes())
        self.uri = f"file:{self.member}"
        self._capsys = capsys

    def run(self, *arguments: str) -> tuple[int, str, str]:
        where = [self.uri] if arguments[0] == "ls" else ["--volume", self.uri]
        status = main(["checkpoint", *arguments, *where])
        said = self._capsys.readouterr()
        return status, said.out, said.err

    def good(self, *arguments: str) -> str:
        status, out, err = self.run(*arguments)
        assert status == 0, err
        return out

    def told(self, *arguments: str) -> list[Any]:
        return [json.loads(line) for line in self.good(*arguments, "--json").splitlines()]

    def refused(self, *arguments: str) -> str:
        status, out, err = self.run(*arguments)
        assert status in (1, 2) and not out
        line = err.splitlines()[-1]
        assert line.startswith("headrace: error: ")
        return line

    def flip(self, fqn: str) -> None:
        """One bit of this tensor's last shard of step 1, where it lies on the member."""
        with Volume.open(self.uri) as volume:
            manifest = read_manifest(volume, CheckpointId("team/run", 1))
            key = [tensor.fqn for tensor in manifest.tensors].index(fqn)
            item = int(np.flatnonzero(manifest.key == key)[-1])
            name = manifest.objects[int(manifest.object[item])].name
            (blob,) = details_of(volume, name).blobs
            extent = next(extent for extent in blob.extents if extent.holds == "data")
        assert int(manifest.offset[item]) < extent.length_bytes
        with self.member.open("r+b") as file:
            file.seek(extent.offset + int(manifest.offset[item]))
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 4]))


@pytest.fixture
def case(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Case:
    return Case(saved, tmp_path, capsys)


def test_ls_shows_what_is_whole_and_what_is_not(case: Case) -> None:
    with (
        Volume.open(case.uri, write=True) as volume,
        volume.session(run_id="test") as session,
        session.transaction() as transaction,
    ):
        transaction.delete("team/run/step-00000001/rank-00001.data")
        transaction.put("x\n/step-00000003/manifest", b"none")
    rows = [line.split("\t") for line in case.good("ls").splitlines()]
    assert [row[0] for row in rows] == ["team/run/step-00000001", "team/run/step-00000002", "x\\n/step-00000003"]
    assert [row[5].partition(":")[0] for row in rows] == ["damaged", "whole", "damaged"]
    assert "rank-00001.data" in rows[0][5] and rows[1][2] == "2" and rows[1][4] == "-"
    (told,) = case.told("ls", "--run", "x\n")
    assert told["whole"] is False and told["ranks"] is None and "manifest" in told["error"]
    assert [each["step"] for each in case.told("ls", "--run", "team/run")] == [1, 2]


def test_show(case: Case) -> None:
    told = case.told("show", "team/run/step-1")[0]
    rows = {row["name"]: row for row in told["tensors"]}
    assert rows["model.a"] == {
        "name": "model.a", "dtype": "float32", "shape": [37, 19], "shards": 2, "length_bytes": 37 * 19 * 4
    }  # fmt: skip
    assert rows["scalar"]["shape"] == [] and rows["scalar"]["shards"] == 1
    assert {row["name"] for row in told["others"]} == {"loader.consumed", "kind"}
    assert (told["ranks"], told["pin"], len(told["objects"])) == (2, None, 2)
    # The latest of a run, for people.
    said = case.good("show", "team/run", "--prefix", "model.")
    assert "step-00000002" in said and re.search(r"model\.b +bfloat16 +8x6x10 +2 ", said) and "loader" not in said
    assert "none of this run" in case.refused("show", "nobody/step-1")
    assert "no committed checkpoint of run 'nobody'" in case.refused("show", "nobody")


def test_verify_names_the_tensor(case: Case) -> None:
    assert "every byte is good" in case.good("verify", "team/run")
    case.flip("model.b")
    status, out, err = case.run("verify", "team/run/step-1", "--json")
    told = json.loads(out)
    # All of this small object is one checksum block: no item of it can be read any more, also not that one.
    assert status == 1 and "model.b" in {damage["name"] for damage in told["damaged"]}
    assert told["bytes"] > 0 and "damaged of checkpoint" in json.loads(err)["error"]["message"]
    status, out, err = case.run("verify", "team/run/step-1")
    assert status == 1 and not out and "DAMAGED model.b: " in err
    # Of the other step not a byte is bad.
    assert "every byte is good" in case.good("verify", "team/run/step-2")
    # The first tensor in that block that was to be read.
    assert "'model.a' of a checkpoint is damaged" in case.refused("diff", "team/run/step-1", "team/run/step-2")


def test_verify_names_the_one_tensor_of_a_large_object(case: Case) -> None:
    with VolumeWriter(case.uri, "team/run") as writer:
        writer.save({name: torch.full((65536 * 3,), 1, dtype=torch.uint8) for name in "abc"}, "team/run/step-1000")
    with Volume.open(case.uri) as volume:
        (name,) = (entry.name for entry in volume.list("team/run/step-00001000/rank"))
        extents = [e for e in details_of(volume, name).blobs[0].extents if e.holds == "data"]
    with case.member.open("r+b") as file:
        file.seek(extents[0].offset + 65536 * 4)
        file.write(b"\0")
    told = json.loads(case.run("verify", "team/run", "--json")[1])
    assert [damage["name"] for damage in told["damaged"]] == ["b"]


@pytest.mark.parametrize("box_bytes", [2 * MIB, 100])
def test_diff_says_what_differs_and_by_how_much(case: Case, box_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(difference_module, "BOX_BYTES", box_bytes)
    found = {each["name"]: each for each in case.told("diff", "team/run/step-1", "team/run/step-2", "--all")}
    kinds = {name: each["kind"] for name, each in found.items()}
    assert kinds == {
        "model.a": "differs", "model.b": "differs", "model.same": "equal", "loader.consumed": "differs",
        "old": "missing", "new": "added", "cast": "dtype", "grown": "shape", "scalar": "differs", "kind": "kind",
    }  # fmt: skip
    one, two = weights(1)["a"].double(), weights(2)["a"].double()
    a = found["model.a"]
    assert (a["elements"], a["differing"], a["not_finite"]) == (37 * 19, 2, 0)
    assert a["max_abs"] == (one - two).abs().max().item()
    assert a["mean_abs"] == pytest.approx((one - two).abs().mean().item(), rel=1e-12)
    assert (found["model.b"]["differing"], found["model.b"]["not_finite"], found["model.b"]["max_abs"]) == (1, 1, 0)
    assert (found["scalar"]["differing"], found["scalar"]["max_abs"], found["scalar"]["mean_abs"]) == (1, 1, 1)
    assert (found["cast"]["was"], found["cast"]["now"]) == ("float32", "float16")
    assert (found["grown"]["was"], found["grown"]["now"]) == ("[1, 2]", "[2, 2]")


def test_diff_of_what_is_equal(case: Case) -> None:
    assert case.told("diff", "team/run", "team/run/step-2") == []
    assert re.search(r"all \d+ are equal", case.good("diff", "team/run", "team/run", "--exit-code"))
    status, out, err = case.run("diff", "team/run/step-1", "team/run", "--exit-code")
    assert status == 1 and not err and "model.same" not in out
    assert ["model.a", "differs", "703", "2", "0.5"] in [line.split("\t")[:5] for line in out.splitlines()]


def test_numbers_of_every_dtype() -> None:
    """Every pattern of bits of the small types, and some of the others, against what torch makes of them."""
    patterns = np.arange(256, dtype=np.uint8)
    for dtype, size in DTYPE_BYTES.items():
        torch_dtype = getattr(torch, dtype, None)
        if torch_dtype is None or dtype == "float4_e2m1fn_x2":
            continue
        raw = patterns if size == 1 else np.random.default_rng(5).integers(0, 256, 64 * size).astype(np.uint8)
        if dtype == "bool":
            raw = patterns & 1
        values = torch.from_numpy(raw.copy()).view(torch_dtype)
        wide = torch.complex128 if torch_dtype.is_complex else torch.float64
        expected = values.to(wide).abs().numpy()
        stored = raw.view(stored_dtype(dtype))
        found = distances(stored, np.zeros_like(stored), dtype) if dtype != "float8_e8m0fnu" else None
        if found is None:
            # It has no zero: the lowest pattern is 2^-127.
            found = distances(stored, np.zeros_like(stored), dtype) + 2.0**-127
        # The root of a sum of squares is rounded by each in its own way.
        np.testing.assert_allclose(found, expected, rtol=1e-15 * torch_dtype.is_complex, err_msg=dtype)
    two = distances(np.array([0x7F], np.uint8), np.array([0x00], np.uint8), "float4_e2m1fn_x2")
    assert two.tolist() == [6.0, 6.0]


def test_pin_unpin_rm(case: Case, tmp_path: Path) -> None:
    first, second = "team/run/step-1", "team/run/step-00000002"
    folder = tmp_path / "asked"
    folder.mkdir()
    with Volume.open(case.uri, write=True) as volume, volume.session("job"):
        # A job holds the volume: it is asked.
        assert "is asked for" in case.good("pin", second, "--ask", str(folder), "--note", "keep")
        assert "no committed checkpoint" in case.refused("pin", "team/run/step-7", "--ask", str(folder))
        assert "nowhere" in case.refused("pin", second, "--ask", str(tmp_path / "nowhere"))
    (told,) = (json.loads(path.read_text()) for path in folder.iterdir())
    assert told == {"checkpoint": second, "note": "keep"}
    assert case.good("pin", first, "--note", "keep\nit").strip() == "team/run/step-00000001 is pinned"
    assert case.told("pin", first, second) == [{"pinned": [second], "unchanged": ["team/run/step-00000001"]}]
    assert [each["pinned"] for each in case.told("ls")] == [True, True]
    assert "keep\\nit" in case.good("show", first)
    assert "unpin" in case.refused("rm", second, first)
    assert case.good("unpin", second).strip() == f"{second} is unpinned"
    assert "step-00000001 is pinned" in case.refused("rm", second, first)
    assert len(case.told("ls")) == 2
    (told,) = case.told("rm", second, "--dry-run")
    assert told["deleted"] is False and len(case.told("ls")) == 2
    assert "deleted team/run/step-00000002" in case.good("rm", second)
    assert [each["step"] for each in case.told("ls")] == [1]
    assert "no committed checkpoint" in case.refused("rm", second)
    assert "not a checkpoint id" in case.refused("rm", "team/run")


def test_memory_of_a_comparison_is_bounded(tmp_path: Path) -> None:
    """Whatever the shards are: no read is longer than a box, though one side has the whole tensor in each chunk."""
    uri = f"file:{tmp_path}/member"
    Volume.create(f"{uri}?create=64MiB").close()
    with VolumeWriter(uri, "run") as writer:
        for step in (1, 2):
            writer.save({"w": torch.full((3, 5, 1 << 18), step, dtype=torch.float32)}, f"run/step-{step}")
    with Volume.open(uri) as volume:
        manifests = [read_manifest(volume, CheckpointId("run", step)) for step in (1, 2)]
        longest = 0
        submit = volume.submit_read

        def watched(what: Any, offsets: Any, lengths: Any, *rest: Any) -> Any:
            nonlocal longest
            longest = max(longest, *lengths)
            return submit(what, offsets, lengths, *rest)

        volume.submit_read = watched  # type: ignore[method-assign]
        found: list[Difference] = [step.found for step in differences(volume, *manifests) if step.found is not None]
    assert [(each.kind, each.differing, each.max_abs, each.mean_abs) for each in found] == [
        ("differs", 3 * 5 << 18, 1.0, 1.0)
    ]
    assert 1 * MIB <= longest <= difference_module.BOX_BYTES
