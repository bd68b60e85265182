"""What is wrong, by what was gathered: one file a domain. A check reads facts, and touches nothing."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.doctor.checks.block import check_block
from headrace.doctor.checks.gpu import check_gpus
from headrace.doctor.checks.identity import check_identity
from headrace.doctor.checks.limits import check_limits
from headrace.doctor.checks.mounts import check_mounts
from headrace.doctor.checks.network import check_network
from headrace.doctor.checks.nvme import check_nvme
from headrace.doctor.checks.queues import check_queues
from headrace.doctor.checks.rdma import check_rdma
from headrace.doctor.facts import Facts
from headrace.doctor.finding import MACHINE, SEVERITIES, Finding
from headrace.doctor.storage import Storage

CHECKS = (
    check_nvme, check_identity, check_network, check_queues, check_rdma, check_mounts, check_block, check_limits,
    check_gpus,
)  # fmt: skip


def check_all(facts: Facts, storage: Sequence[Storage], *, everything: bool) -> list[Finding]:
    """Findings about this storage and the machine, the worst first. `everything`: about all else as well."""
    parts = {MACHINE, *(part for one in storage for part in one.parts)}
    found = [finding for check in CHECKS for finding in check(facts, storage)]
    kept = [finding for finding in found if everything or parts & set(finding.about)]
    return sort(kept)


def sort(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda one: SEVERITIES.index(one.severity))
