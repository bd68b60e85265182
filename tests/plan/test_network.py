"""NICs and targets, and what replicas read for themselves, by hand."""

from __future__ import annotations

from headrace.plan import make_plan, read_job
from headrace.plan.model import Model

RESTART = {
    "gpus": 1024, "model.parameters": "405.85B", "parallel.tp": 8, "parallel.pp": 32, "parallel.sharding": "zero1",
    "failures.restart": "6s",
}  # fmt: skip


def test_nics_and_targets() -> None:
    job = read_job(None, {**RESTART, "network.nic_gbit": 25, "network.target_read": "10GB/s", "storage.read": "90GB/s"})
    made = make_plan(job)
    (network,) = [question for question in made.questions if question.name == "network"]
    values = {answer.formula.result: answer.value for answer in network.answers}
    # 5.682 TB in 6 s are 947 GB/s, 7.4 GB/s to each of 128 nodes; a NIC of 25 Gbit/s carries 2.8 GB/s of data.
    assert 7.39e9 < values["a node moves at most"].likely < 7.41e9
    assert values["storage NICs of a node"].likely == 3
    assert values["targets that deliver it"].likely == 95
    # What the NICs of all nodes carry, 128 * 3.125 GB/s * 0.9, is more than what storage delivers: that counts.
    assert made.storage.read.likely == 90e9
    narrow = make_plan(read_job(None, {**RESTART, "network.nic_gbit": 1, "storage.read": "90GB/s"}))
    assert narrow.storage.read.likely == 128 * 0.125e9 * 0.9


def test_what_replicas_read_for_themselves() -> None:
    model = Model.of(read_job(None, RESTART))
    read = model.restart_bytes()
    assert model.dp == 4 and read.likely == model.size().value.likely
    # Weights three times more, where nobody passes them on; with all of it sharded there is nothing to read twice.
    assert read.high == read.low + 3 * model.weights().value.likely
    whole = Model.of(read_job(None, {**RESTART, "parallel.sharding": "zero3"})).restart_bytes()
    assert whole.exact
    # Every replica all of it, and a save that the first one writes alone.
    none = Model.of(read_job(None, {**RESTART, "parallel.sharding": "none"}))
    assert none.restart_bytes().high == 4 * none.size().value.likely
    assert none.share().value.likely * 8 * 32 == none.size().value.likely
