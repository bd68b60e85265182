"""What the orchestrator hands to the trainer. Apart from it, because the orchestrator never imports torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What the orchestrator hands to every rank, as JSON."""

    #: Addresses of the volume's members.
    uris: list[str]
    #: Name of the token stream in the volume.
    dataset: str
    #: Checkpoints are `RUN/step-N`.
    run: str
    #: Name of this launch: prefix of the files it writes.
    phase: str
    #: Where step records and events go.
    directory: str
    steps: int
    #: 0: no checkpoints.
    save_every: int
    #: Start from the newest committed checkpoint of `run`.
    resume: bool
    global_batch: int
    micro_batch: int
    sequence: int
    vocabulary: int
    width: int
    heads: int
    layers: int
    learning_rate: float = 3e-3
    warmup_steps: int = 5
    seed: int = 1234
    #: "cuda" or "cpu".
    device: str = "cpu"
    #: How the model is spread: "fsdp2", or "ddp" where several ranks share a GPU, which NCCL refuses.
    parallel: str = "fsdp2"

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise UsageError("TrainConfig.device", expected="cpu or cuda", found=self.device)
        if self.parallel not in ("fsdp2", "ddp"):
            raise UsageError("TrainConfig.parallel", expected="fsdp2 or ddp", found=self.parallel)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> TrainConfig:
        return cls(**json.loads(path.read_text(encoding="utf-8")))
