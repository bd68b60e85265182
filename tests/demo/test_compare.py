"""The comparison finds what differs: a sample, an order, a missing step, the last bit of a loss."""

from __future__ import annotations

import hashlib
import math

import pytest

from headrace.demo.compare import LOSS_TOLERANCE, StepProof, compare, proofs
from headrace.errors import UsageError
from headrace.measure import StepRecord

BATCH = 8


def sample(step: int, index: int) -> str:
    return hashlib.sha256(f"{step}/{index}".encode()).hexdigest()


def records(steps: range, ranks: int, shift: float = 0.0) -> list[StepRecord]:
    part = BATCH // ranks
    return [
        StepRecord(
            rank=rank,
            step=step,
            started_s=float(step),
            data_wait_s=0,
            compute_s=1,
            notes={"loss": 9.0 - step + shift, "samples": [sample(step, rank * part + i) for i in range(part)]},
        )
        for step in steps
        for rank in range(ranks)
    ]


def test_a_step_has_the_same_proof_on_any_number_of_ranks() -> None:
    whole = proofs(records(range(5), 1))
    for ranks in (2, 4, 8):
        assert {s: p.samples for s, p in proofs(records(range(5), ranks)).items()} == {
            s: p.samples for s, p in whole.items()
        }


def test_a_step_that_not_all_ranks_finished_is_no_step() -> None:
    rows = [r for r in records(range(3), 2) if (r.step, r.rank) != (2, 1)]
    assert sorted(proofs(rows)) == [0, 1]


def test_ranks_that_disagree_about_the_loss_are_an_error() -> None:
    rows = records(range(1), 2)
    rows[1].notes["loss"] += 1e-6
    with pytest.raises(UsageError, match="disagree"):
        proofs(rows)


def test_an_equal_run_holds() -> None:
    reference = proofs(records(range(10), 2))
    result = compare(reference, proofs(records(range(7), 2)), proofs(records(range(4, 10), 1, shift=1e-5)))
    assert result.holds
    assert (result.same_ranks, result.other_ranks) == (7, 6)
    assert result.trained_twice == [4, 5, 6]
    assert result.other_ranks_difference == pytest.approx(1e-5, rel=1e-6)


@pytest.mark.parametrize("change", ["sample", "order", "missing", "bit", "tolerance", "extra"])
def test_every_difference_is_found(change: str) -> None:
    first, resumed = records(range(6), 2), records(range(6, 10), 1)
    if change == "sample":
        first[3].notes["samples"][0] = sample(99, 0)
    elif change == "order":
        resumed[0].notes["samples"].reverse()
    elif change == "missing":
        resumed = [r for r in resumed if r.step != 8]
    elif change == "bit":
        for row in first[4:6]:
            row.notes["loss"] = math.nextafter(row.notes["loss"], math.inf)
    elif change == "tolerance":
        resumed[0].notes["loss"] += 2 * LOSS_TOLERANCE
    else:
        resumed += records(range(10, 11), 1)
    result = compare(proofs(records(range(10), 2)), proofs(first), proofs(resumed))
    assert not result.holds
    assert result.samples_equal == (change in ("bit", "tolerance"))
    assert result.losses_bitwise == (change != "bit")
    assert result.losses_within_tolerance == (change != "tolerance")


def test_nan_is_never_within_tolerance() -> None:
    reference = {0: StepProof(step=0, ranks=2, samples="x", loss=math.nan)}
    same = compare(reference, reference, {})
    assert not same.losses_bitwise
    other = compare(reference, {}, {0: StepProof(step=0, ranks=1, samples="x", loss=1.0)})
    assert not other.losses_within_tolerance
