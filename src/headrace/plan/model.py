"""The model and how it is split: parameters, bytes of a checkpoint, and the largest share of one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.errors import UsageError
from headrace.plan import units
from headrace.plan.architecture import Architecture, architecture
from headrace.plan.fields import OPTIMIZER_STATE_BYTES
from headrace.plan.job import Job
from headrace.plan.quantities import Answer, Formula, Question, Range

MLPERF = "MLPerf Storage: fp16 weights and three fp32 states are 14 bytes; its Llamas of 8B to 1T come out so"

SIZE = Formula(
    result="size of a checkpoint",
    text="parameters * (weight bytes + state bytes)",
    unit=units.BYTES,
    symbols={
        "parameters": units.PARAMETERS, "weight bytes": units.BYTES_PER_PARAMETER,
        "state bytes": units.BYTES_PER_PARAMETER,
    },
    source=MLPERF,
    function=lambda parameters, weight_bytes, state_bytes: parameters * (weight_bytes + state_bytes),
)  # fmt: skip

WEIGHTS = Formula(
    result="of it weights",
    text="parameters * weight bytes",
    unit=units.BYTES,
    symbols={"parameters": units.PARAMETERS, "weight bytes": units.BYTES_PER_PARAMETER},
    source=MLPERF,
    function=lambda parameters, weight_bytes: parameters * weight_bytes,
)

RANK_ZERO3 = Formula(
    result="largest share of a rank",
    text="size / gpus",
    unit=units.SHARE_OF_GPU,
    symbols={"size": units.BYTES, "gpus": units.GPUS},
    source="ZeRO 3 and FSDP: every rank has its part of everything",
    function=lambda size, gpus: size / gpus,
)

RANK_ZERO1 = Formula(
    result="largest share of a rank",
    text="states / gpus + stage weights",
    unit=units.SHARE_OF_GPU,
    symbols={"states": units.BYTES, "gpus": units.GPUS, "stage weights": units.SHARE_OF_GPU},
    source="ZeRO 1: states over all ranks; the first data parallel rank of each stage writes its weights",
    function=lambda states, gpus, stage_weights: states / gpus + stage_weights,
)

RANK_WHOLE = Formula(
    result="largest share of a rank",
    text="stage weights * (1 + state bytes / weight bytes)",
    unit=units.SHARE_OF_GPU,
    symbols={
        "stage weights": units.SHARE_OF_GPU, "state bytes": units.BYTES_PER_PARAMETER,
        "weight bytes": units.BYTES_PER_PARAMETER,
    },
    source="nothing is sharded: the first data parallel rank of each stage writes it all",
    function=lambda stage_weights, state_bytes, weight_bytes: stage_weights * (1 + state_bytes / weight_bytes),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Model:
    parameters: Range
    #: Those that one token goes through.
    active: Range
    weight_bytes: Range
    state_bytes: Range
    gpus: int
    tp: int
    pp: int
    sharding: str
    shape: Architecture | None

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp)

    @staticmethod
    def of(job: Job) -> Model:
        shape = architecture(job)
        if shape is not None and job.has("model.parameters"):
            raise UsageError("the model's size is said twice", found="model.parameters, and its shape")
        if shape is None:
            parameters = job.need("model.parameters")
            active = job.range("model.active_parameters") or parameters
            if active.likely > parameters.likely:
                raise UsageError("model.active_parameters", expected="at most as many as parameters", found=str(active))
        else:
            parameters = Range.point(shape.parameters, units.PARAMETERS)
            active = Range.point(shape.active_parameters, units.PARAMETERS)
        gpus, tp, pp = job.whole("gpus"), job.whole("parallel.tp"), job.whole("parallel.pp")
        if gpus % (tp * pp):
            raise UsageError("gpus", expected=f"a multiple of tp * pp = {tp} * {pp}", found=str(gpus))
        if shape is not None and pp > shape.layers:
            raise UsageError("parallel.pp", expected=f"at most a stage a layer, {shape.layers}", found=str(pp))
        weight = OPTIMIZER_STATE_BYTES[job.text("model.weights") or "bf16"]
        states = sum(OPTIMIZER_STATE_BYTES[name] for name in job.texts("model.states"))
        return Model(
            parameters=parameters, active=active, weight_bytes=Range.point(weight, units.BYTES_PER_PARAMETER),
            state_bytes=Range.point(states, units.BYTES_PER_PARAMETER), gpus=gpus, tp=tp, pp=pp,
            sharding=job.text("parallel.sharding") or "zero3", shape=shape,
        )  # fmt: skip

    # ---- bytes ----------------------------------------------------------------------------------------------------

    def size(self) -> Answer:
        return SIZE.put(
            {"parameters": self.parameters, "weight bytes": self.weight_bytes, "state bytes": self.state_bytes}
        )

    def weights(self) -> Answer:
        return WEIGHTS.put({"parameters": self.parameters, "weight bytes": self.weight_bytes})

    def stage_weights(self) -> Range:
        """Bytes of weights of the rank that has most of them, over tensor and pipeline parallel ranks.

        With the shape known: whole layers, and one embedding at the first and at the last stage. Else an even share,
        and up to two of them, since no stage is even.
        """
        even = self.weights().value
        if self.shape is None:
            share = [value / (self.tp * self.pp) for value in (even.low, even.likely, even.high)]
            return Range(share[0], share[1], share[2] * (2 if self.pp > 1 else 1), units.SHARE_OF_GPU)
        embeddings = 1 if self.pp > 1 or self.shape.tied else 2
        count = math.ceil(self.shape.layers / self.pp) * self.shape.layer(self.shape.experts)
        count += embeddings * self.shape.embedding + (self.shape.hidden if self.pp == 1 else 0)
        return Range.point(count * self.weight_bytes.likely / self.tp, units.SHARE_OF_GPU)

    def share(self) -> Answer:
        """The most that one rank copies and writes in a save."""
        gpus = Range.point(self.gpus, units.GPUS)
        if self.sharding == "zero3":
            return RANK_ZERO3.put({"size": self.size().value, "gpus": gpus})
        if self.sharding == "zero1":
            states = WEIGHTS.put({"parameters": self.parameters, "weight bytes": self.state_bytes}).value
            return RANK_ZERO1.put({"states": states, "gpus": gpus, "stage weights": self.stage_weights()})
        return RANK_WHOLE.put(
            {"stage weights": self.stage_weights(), "state bytes": self.state_bytes, "weight bytes": self.weight_bytes}
        )

    def restart_bytes(self) -> Range:
        """What all ranks together read in a restart: each byte once, up to what every replica reads for itself."""
        size, weights = self.size().value, self.weights().value
        again = {"zero3": 0.0, "zero1": weights.high, "none": size.high}[self.sharding] * (self.dp - 1)
        source = "" if not again else "each byte once and passed on, up to every replica for itself"
        return Range(size.low, size.likely, size.high + again, units.BYTES, source=source)

    def question(self) -> Question:
        note = f"{self.gpus} GPUs = {self.tp} tensor * {self.pp} pipeline * {self.dp} data parallel, {self.sharding}"
        if self.shape is not None:
            note += f"; {self.shape.parameters:,} parameters from the model's shape"
        return Question(
            name="model", title="How large is a checkpoint?", answers=(self.size(), self.weights(), self.share()),
            note=note,
        )  # fmt: skip
