"""What a rank does: it restores, says what that was, and saves one step after another until it is ended.

Everything that is saved can be told from the step and the number of the job that saved it, so that no two saves have a
byte in common, and what a restore puts together of two of them shows.
"""

from __future__ import annotations

import json
import time
import zlib
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from headrace.errors import HeadraceError
from headrace.torch import Checkpointer, VolumeReader, VolumeWriter, WriterOptions
from headrace.volume import Volume
from tests.torch.crew import Rank

#: Elements of the tensor that is spread over the ranks (unevenly, by three and by four), and of the one that all have.
SHARDED, REPLICATED = 400_001, 1_003
#: A rank without a sign of life for so long fails the save, and a round that takes so long does.
STALL_S, DEADLINE_S = 4.0, 15.0
KEPT = 2
#: A job that is not ended goes on behind so many failed saves.
FAILURES = 3
#: Beats that are missed by one who is dead: while a disk syncs for others, one who lives misses some, too.
BEAT_S, MISSED = 0.2, 8
#: Through `Checkpointer`, and through `VolumeWriter.async_save`: a run for each.
MODES = ("checkpointer", "writer")


def content(name: str, step: int, job: int, low: int, high: int) -> torch.Tensor:
    """The elements `low` to `high` of this tensor, as this job saves it at this step; the first two say which."""
    mixed = torch.arange(low, high, dtype=torch.int64) * 2654435761 + zlib.crc32(f"{name}/{step}/{job}".encode())
    values = ((mixed >> 7) & 0x7FFFFF).float()
    for at, number in ((0, step), (1, job)):
        if low <= at < high:
            values[at - low] = number
    return values


class Model(torch.nn.Module):
    def __init__(self, mesh: DeviceMesh, rank: int) -> None:
        super().__init__()
        share = -(-SHARDED // mesh.size())
        #: Of each parameter: which elements this rank has.
        self.bounds = {"w": (min(rank * share, SHARDED), min((rank + 1) * share, SHARDED)), "r": (0, REPLICATED)}
        for name, length, place in (("w", SHARDED, Shard(0)), ("r", REPLICATED, Replicate())):
            low, high = self.bounds[name]
            spread = DTensor.from_local(
                torch.zeros(high - low), mesh, [place], run_check=False, shape=torch.Size([length]), stride=(1,)
            )
            setattr(self, name, torch.nn.Parameter(spread))


class Training:
    """Parameters and the optimizer's moments, without the training."""

    def __init__(self, rank: Rank) -> None:
        self.model = Model(init_device_mesh("cpu", (rank.world,)), rank.rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def locals(self) -> dict[str, tuple[str, torch.Tensor]]:
        """Of each tensor its name, that of its parameter, and the memory of this rank's part."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = name, parameter.detach()
            for moment in ("exp_avg", "exp_avg_sq"):
                found[f"{name}.{moment}"] = name, self.optimizer.state[parameter][moment]
        return {key: (name, value.to_local()) for key, (name, value) in found.items()}  # type: ignore[attr-defined]

    def become(self, step: int, job: int) -> None:
        for key, (name, local) in self.locals().items():
            local.copy_(content(key, step, job, *self.model.bounds[name]))

    def change(self) -> None:
        for _, local in self.locals().values():
            local.add_(1.0)

    def found(self) -> tuple[int, int]:
        """Which step of which job this is; AssertionError where it is not that, or not all of it."""
        step, job = (int(number) for number in self.locals()["r"][1][:2])
        for key, (name, local) in self.locals().items():
            low, high = self.model.bounds[name]
            wrong = torch.nonzero(local != content(key, step, job, low, high)).flatten()
            assert not len(wrong), (
                f"{len(wrong)} of {high - low} elements of {key} are not those of step {step} of job {job}, "
                f"the first {low + int(wrong[0])}: {float(local[wrong[0]])}"
            )
        return step, job

    def state(self) -> dict[str, Any]:
        """As `VolumeWriter` is given it."""
        moments = {
            f"{name}.{moment}": self.optimizer.state[parameter][moment]
            for name, parameter in self.model.named_parameters()
            for moment in ("exp_avg", "exp_avg_sq")
        }
        return {**{name: parameter.detach() for name, parameter in self.model.named_parameters()}, **moments}


class ByCheckpointer:
    def __init__(self, uris: list[str], training: Training) -> None:
        self._training = training
        self._checkpointer = Checkpointer(uris, "checkpointer", options=_options())

    def restore(self) -> bool:
        return self._checkpointer.restore("latest", self._training.model, self._training.optimizer) is not None

    def begin(self, step: int) -> None:
        self._checkpointer.save(step, self._training.model, self._training.optimizer)

    def busy(self) -> bool:
        under_way = self._checkpointer._under_way
        return under_way is not None and not under_way.future.done()

    def end(self) -> None:
        self._checkpointer.wait()


class ByWriter:
    def __init__(self, uris: list[str], training: Training) -> None:
        self._uris, self._training = uris, training
        self._writer = VolumeWriter(uris, "writer", options=_options())
        self._future: Any = None

    def restore(self) -> bool:
        with Volume.open(self._uris) as volume:
            if not any(info.name.startswith("writer/") for info in volume.list()):
                return False
            VolumeReader(volume, "writer", stall_s=DEADLINE_S).load(self._training.state())
        return True

    def begin(self, step: int) -> None:
        self._future = self._writer.async_save(self._training.state(), f"writer/step-{step}")

    def busy(self) -> bool:
        return not self._future.done()

    def end(self) -> None:
        self._future.result()


def _options() -> WriterOptions:
    return WriterOptions(
        stall_s=STALL_S, deadline_s=DEADLINE_S, keep_last=KEPT, overwrite=True, takeover="if-dead"
    )  # fmt: skip


def beat_fast() -> None:
    """Sessions of this process: nobody waits long for one that is dead."""
    Volume.session.__kwdefaults__.update(heartbeat_s=BEAT_S, missed_beats=MISSED)


def job(rank: Rank, given: dict[str, Any]) -> None:
    beat_fast()
    number, failures = given["number"], 0

    def say(**what: Any) -> None:
        rank.say(json.dumps(what))

    try:
        training = Training(rank)
        saving = (ByCheckpointer if given["mode"] == "checkpointer" else ByWriter)(given["uris"], training)
        restored = training.found() if saving.restore() else (0, 0)
    except AssertionError as error:
        say(violation=str(error))
        return
    except HeadraceError as error:
        say(failed=str(error), kind=type(error).__name__, restoring=True)
        return
    say(restored=restored)
    step = restored[0]
    while failures < FAILURES:
        step += 1
        training.become(step, number)
        say(begun=(step, number))
        try:
            saving.begin(step)
            while saving.busy():
                training.change()
                time.sleep(0.004)
            saving.end()
        except HeadraceError as error:
            failures += 1
            say(failed=str(error), kind=type(error).__name__)
        else:
            say(acknowledged=(step, number))
