"""Ids and object names, both ways."""

import pytest

from headrace.checkpoint import CheckpointId, parse_checkpoint_id
from headrace.checkpoint.names import parse_manifest_name
from headrace.errors import UsageError


@pytest.mark.parametrize(
    ("text", "run", "step"),
    [
        ("run/step-000100", "run", 100),
        ("run/step-0", "run", 0),
        ("team/llama/step-99999999", "team/llama", 99_999_999),
        ("run/step-123456789", "run", 123_456_789),
        ("run/step-7/", "run", 7),
    ],
)
def test_an_id_is_read_and_written(text: str, run: str, step: int) -> None:
    id = parse_checkpoint_id(text)
    assert (id.run, id.step) == (run, step)
    assert parse_checkpoint_id(str(id)) == id
    assert parse_manifest_name(id.manifest) == id


def test_a_step_alone_is_meant_within_the_run() -> None:
    assert parse_checkpoint_id("step-5", run="r") == CheckpointId("r", 5)


@pytest.mark.parametrize(
    "text", ["", "run", "step-5", "run/step-", "run/step--1", "run/step-1x", "/step-1", "run//step-1"]
)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_checkpoint_id(text)


@pytest.mark.parametrize(
    "name", ["run/step-1/manifest", "run/step-00000001/rank-00000.data", "manifest", "run/manifest"]
)
def test_other_objects_are_no_manifest(name: str) -> None:
    # The first has the right form with the wrong number of digits: such an object was not written by a save.
    assert parse_manifest_name(name) is None


def test_names_sort_as_steps_do() -> None:
    steps = [0, 9, 10, 99_999_999]
    assert sorted(str(CheckpointId("r", s)) for s in steps) == [str(CheckpointId("r", s)) for s in steps]
