"""DLIO of PyPI, unmodified, trains from a volume: one process, where `.venv-dlio` was made (`benchmarks dlio`)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from headrace.cli import main
from scripts.environments import DLIO, ROOT

#: Within DLIO's process: what the loader hands out, beside what DLIO says of it.
_PROBE = """
import hashlib, json, sys
from dlio_benchmark.common.enumerations import Shuffle
from dlio_benchmark.data_loader.torch_data_loader import dlio_sampler
from headrace.torch import dlio

class Seen(dlio.VolumeDataLoader):
    def next(self):
        with open(sys.argv[0] + ".seen", "a") as file:
            for batch in super().next():
                print(json.dumps([hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in batch]), file=file)
                yield batch

def order():
    # DLIO's own, of 10 samples with its seed.
    return list(dlio_sampler(rank=0, size=1, num_samples=10, shuffle=Shuffle.SEED, epochs=2, seed=123))
"""


def test_dlio_trains_from_a_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := DLIO.missing():
        pytest.skip(why)
    data = tmp_path / "data" / "unet3d"
    for part in ("train", "valid"):
        (data / part).mkdir(parents=True)
    chance = np.random.default_rng(1)
    arrays = [chance.integers(0, 255, (30 + number, 40, 1), np.uint8) for number in range(10)]
    for number, array in enumerate(arrays):
        np.savez(data / "train" / f"img_{number:02}_of_10.npz", x=array, y=[0])
    volume = f"file:{tmp_path}/a.img"
    assert main(["volume", "create", f"{volume}?create=64MiB"]) == 0
    assert main(["ingest", str(data / "train"), "unet3d/train", "--records", "--volume", volume]) == 0
    for file in (data / "train").iterdir():
        file.write_bytes(b"")
    (tmp_path / "probe.py").write_text(_PROBE)
    program = tmp_path / "run"
    program.write_text("import probe\nfrom dlio_benchmark.main import main\nmain()\nprint(probe.order())\n")
    settings = {
        "dataset.data_folder": data, "dataset.num_files_train": 10, "dataset.record_length": 1200,
        "reader.batch_size": 3, "reader.data_loader_classname": "probe.Seen", "reader.data_loader_sampler": "index",
        "train.epochs": 2, "train.computation_time": 0.01, "workflow.checkpoint": False,
    }  # fmt: skip
    command = [str(DLIO.python), str(program), "workload=unet3d_h100", f"hydra.run.dir={tmp_path}/out"]
    command += [f"++workload.{key}={value}" for key, value in settings.items()]
    path = os.pathsep.join(map(str, [ROOT / "src", ROOT / "benchmarks" / "stand_ins", tmp_path]))
    done = subprocess.run(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": path, "HEADRACE_VOLUME": volume, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["epochs"] == 2 and summary["metric"]["train_au_mean_percentage"] > 0
    seen = [json.loads(line) for line in Path(f"{program}.seen").read_text().splitlines()]
    order = json.loads(done.stdout.splitlines()[-1])
    assert sorted(order) == list(range(10)) != order
    expected = [hashlib.sha256(arrays[number][..., 0].tobytes()).hexdigest() for number in order]
    # The same in every epoch; the short batch is left out.
    assert seen == [expected[at : at + 3] for at in (0, 3, 6)] * 2
