"""Is the run that was broken and resumed the run that nobody disturbed? Pure: records in, findings out."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.errors import UsageError
from headrace.measure import StepRecord

#: Largest difference of the loss allowed where the number of ranks differs: the same terms are added in another order,
#: and training amplifies the difference of the last bits. In nats; the loss itself is between 4 and 9 here.
LOSS_TOLERANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class StepProof:
    """What one step of one run consumed and gave."""

    step: int
    ranks: int
    #: SHA-256 over the hashes of all samples of the global batch, in global order.
    samples: str
    loss: float


def proofs(records: Iterable[StepRecord]) -> dict[int, StepProof]:
    """Records of all ranks of one phase -> its steps. A step that not all ranks finished (a kill) is left out.

    Each rank holds a contiguous part of the global batch, so ranks in order give the samples in global order.
    """
    by_step: dict[int, dict[int, StepRecord]] = defaultdict(dict)
    for record in records:
        if "samples" in record.notes:
            by_step[record.step][record.rank] = record
    world = max((len(ranks) for ranks in by_step.values()), default=0)
    found = {}
    for step, ranks in sorted(by_step.items()):
        if sorted(ranks) != list(range(world)):
            continue
        digest = hashlib.sha256()
        for rank in range(world):
            for sample in ranks[rank].notes["samples"]:
                digest.update(bytes.fromhex(sample))
        losses = {float(record.notes["loss"]) for record in ranks.values()}
        if len(losses) != 1:
            raise UsageError(f"ranks disagree about the loss of step {step}", found=str(sorted(losses)))
        found[step] = StepProof(step=step, ranks=world, samples=digest.hexdigest(), loss=losses.pop())
    return found


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The run against the reference."""

    steps: int
    #: Steps whose samples differ, in either phase; and steps that nobody trained.
    samples_differ: list[int]
    missing: list[int]
    #: Steps trained in both phases, because the kill came after the checkpoint.
    trained_twice: list[int]
    #: Steps with as many ranks as the reference, and those of them whose loss is not equal bit for bit.
    same_ranks: int
    same_ranks_differ: list[int]
    #: Steps with another number of ranks, and the largest difference of their losses.
    other_ranks: int
    other_ranks_difference: float
    tolerance: float = LOSS_TOLERANCE

    @property
    def samples_equal(self) -> bool:
        return not self.samples_differ and not self.missing

    @property
    def losses_bitwise(self) -> bool:
        return not self.same_ranks_differ

    @property
    def losses_within_tolerance(self) -> bool:
        return self.other_ranks_difference <= self.tolerance

    @property
    def holds(self) -> bool:
        return self.samples_equal and self.losses_bitwise and self.losses_within_tolerance


def compare(
    reference: Mapping[int, StepProof], first: Mapping[int, StepProof], resumed: Mapping[int, StepProof]
) -> Comparison:
    """Both phases are compared at every step that they have; `resumed` goes on from a checkpoint of `first`."""
    runs = (first, resumed)
    same_ranks, same_differ, other_ranks, difference = 0, set(), 0, 0.0
    differ = set()
    for run in runs:
        for step, proof in run.items():
            expected = reference.get(step)
            if expected is None or expected.samples != proof.samples:
                differ.add(step)
            if expected is None:
                continue
            if expected.ranks == proof.ranks:
                same_ranks += 1
                if expected.loss != proof.loss:
                    same_differ.add(step)
            else:
                other_ranks += 1
                gap = abs(expected.loss - proof.loss)
                # A loss that is not a number is as far from another as can be; `max` would pass over it.
                difference = max(difference, math.inf if math.isnan(gap) else gap)
    return Comparison(
        steps=len(reference),
        samples_differ=sorted(differ),
        missing=sorted(step for step in reference if step not in first and step not in resumed),
        trained_twice=sorted(step for step in first if step in resumed),
        same_ranks=same_ranks,
        same_ranks_differ=sorted(same_differ),
        other_ranks=other_ranks,
        other_ranks_difference=difference,
    )
