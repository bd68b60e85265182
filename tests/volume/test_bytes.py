"""A bounded sample of the byte damage of `tests.volume.bytes`, by seed; all of it is a long run (docs/proofs.md)."""

from __future__ import annotations

import random

import pytest

from headrace.volume.repair import scrub
from tests.volume import bytes as damage

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")
SEED = 20


@pytest.mark.parametrize("kind", damage.KINDS)
def test_damage_is_read_around_or_named_and_never_wrong_bytes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody writes beside the checker.
    monkeypatch.setattr(scrub, "_LOOKS", 1)
    image = damage.make(kind)
    chance = random.Random(SEED)
    counts, wrong = damage.run(image, damage.sample(image, 80, chance), chance)
    assert wrong == [], f"python -m tests.volume.bytes --sample 80 --seed {SEED}"
    assert {what.rsplit(": ")[-1] for what in counts} >= {"read around", "mended", "named"}


def test_the_images_have_records_of_every_kind() -> None:
    found = {one.what.removeprefix("record ") for kind in damage.KINDS for one in damage.make(kind).structures}
    # The area that a MOVED stands in is not in force any more: test_damage_cases.py has it.
    assert {*damage.KIND_NAMES.values(), "node", "page of checksums"} - found == {"MOVED"}
