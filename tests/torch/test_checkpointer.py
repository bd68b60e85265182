"""`Checkpointer` in one process: what is put back, what is said, what is refused."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.checkpoint import list_checkpoints
from headrace.errors import CheckpointFailed, ChecksumMismatch, ObjectNotFound, UsageError, VolumeFull
from headrace.torch import Checkpointer, Preemption, VolumeReader, VolumeWriter, WriterOptions
from headrace.torch.job.saving import Cost, Costs, Schedule
from headrace.torch.save.options import SaveReport
from headrace.torch.save.pacing import PaceReport
from headrace.volume import Volume, hunger
from tests.torch.test_dcp_hazards import flip_a_bit
from tests.waiting import PATIENCE_S, until

#: So that a tensor is longer than a checksum block, and damage in its middle nobody else's.
WIDE = 9000


@pytest.fixture
def uris(tmp_path: Path) -> list[str]:
    uris = [f"file:{tmp_path}/member{i}" for i in range(2)]
    Volume.create([f"{uri}?create=16MiB" for uri in uris]).close()
    return uris


class Counting:
    """A loader whose position is all that it has."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Job:
    """A model with dropout and a parameter that never has a gradient, and data that three generators make."""

    def __init__(self, seed: int, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, WIDE), torch.nn.Dropout(0.5), torch.nn.Linear(WIDE, 1))
        self.model.register_parameter("unused", torch.nn.Parameter(torch.randn(3)))
        self.optimizer = optimizer(self.model.parameters(), lr=0.001)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.loader = Counting()
        random.seed(seed)
        np.random.seed(seed)

    @property
    def parts(self) -> dict[str, Any]:
        extra = {"scheduler": self.scheduler, "tokens": self.loader.at * 100}
        return {"model": self.model, "optimizer": self.optimizer, "loader": self.loader, "extra": extra}

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            x = torch.randn(4, 5) + random.random() + np.random.random()
            loss = self.model(x).square().mean() * (1 + self.loader.at)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.loader.at += 1
            losses.append(loss.item())
        return losses


def steps_of(uris: list[str]) -> list[int]:
    with Volume.open(uris) as volume:
        return [each.step for each in list_checkpoints(volume, "run")]


def damage(uris: list[str], tensor: torch.Tensor) -> None:
    flip_a_bit([Path(uri.removeprefix("file:")) for uri in uris], tensor.detach().numpy().tobytes())


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("saved_at", [0, 3])
def test_a_run_goes_on_as_if_it_had_not_ended(uris: list[str], saved_at: int, optimizer: Any) -> None:
    """Also where no step was made yet when it was saved, which torch's own functions do not manage."""
    unbroken = Job(1, optimizer).steps(8)
    job = Job(1, optimizer)
    with Checkpointer(uris, "run") as checkpointer:
        before = job.steps(saved_at)
        checkpointer.save(saved_at, **job.parts)
        # What is saved is what was there then, whatever training does meanwhile.
        assert before + job.steps(8 - saved_at) == unbroken
    job = Job(2, optimizer)
    with Checkpointer(uris, "run") as checkpointer:
        assert checkpointer.restore("latest", **job.parts) == saved_at
        assert checkpointer.extra["tokens"] == 100 * saved_at
        assert job.loader.at == saved_at
        assert job.steps(8 - saved_at) == unbroken[saved_at:]


def test_where_there_is_nothing_to_resume_nothing_is_touched(uris: list[str]) -> None:
    unbroken = Job(1).steps(3)
    job = Job(1)
    with Checkpointer(uris, "run") as checkpointer:
        assert checkpointer.restore("latest", **job.parts) is None
        assert (checkpointer.latest(), checkpointer.certificate) == (None, None)
        with pytest.raises(ObjectNotFound, match="none of this run"):
            checkpointer.restore(3, **job.parts)
        assert job.steps(3) == unbroken


def test_the_loop_of_four_lines(uris: list[str]) -> None:
    job = Job(1)
    for expected, last in ((None, 5), (4, 9)):
        with Checkpointer(uris, "run", interval=4) as checkpointer:
            done = checkpointer.restore("latest", **job.parts)
            assert done == expected
            for step in range((done or 0) + 1, last + 1):
                job.steps(1)
                if checkpointer.step(step):
                    raise AssertionError("nobody told it to stop")
            checkpointer.wait()
            assert checkpointer.latest() == last - 1
    with Volume.open(uris) as volume:
        assert [each.step for each in list_checkpoints(volume, "run")] == [4, 8]


def test_the_certificate_says_what_was_done(
    uris: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(1)
    with Checkpointer(uris, "run") as checkpointer:
        job.steps(1)
        checkpointer.save(7, **job.parts)
    with Checkpointer(uris, "run", certificate=tmp_path / "restart.json") as checkpointer:
        checkpointer.restore("latest", **job.parts)
        assert checkpointer.certificate is not None and checkpointer.certificate.first_step_s is None
        assert not capsys.readouterr().err
        assert not checkpointer.step(8)
        certificate = checkpointer.certificate
        [line] = capsys.readouterr().err.splitlines()
        checkpointer.step(9)
    assert not capsys.readouterr().err, "it is told once"
    said = json.loads((tmp_path / "restart.json").read_text())
    assert said == json.loads(certificate.to_json())
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        certificate.write(tmp_path / "folder")
    assert not list(tmp_path.glob("*.part")), "every restart would leave one"
    with Volume.open(uris) as volume:
        [info] = list_checkpoints(volume, "run")
    assert (said["checkpoint"], said["step"], said["commit"]) == ("run/step-00000007", 7, info.sequence)
    assert said["unique_bytes"] == said["read_bytes"] == info.data_bytes
    assert (said["verified"], said["rng"], said["data"]) == (True, "restored", "position restored")
    assert said["first_step_s"] >= said["process_to_restored_s"] >= said["restore_s"] > 0
    assert line == f"headrace: {said['line']}"
    for word in ("run/step-00000007", "read 1.00 times", "every byte verified", "to the first step", uris[0]):
        assert word in line


def test_a_damaged_step_names_the_tensor_and_the_one_before_is_taken_where_that_is_asked_for(
    uris: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(1)
    with Checkpointer(uris, "run") as checkpointer:
        for step in (1, 2, 3):
            job.steps(1)
            checkpointer.save(step, **job.parts)
            if step == 2:
                good = job.model[0].weight.detach().clone()
    damage(uris, job.model[0].weight)
    with Checkpointer(uris, "run") as checkpointer:
        with pytest.raises(ChecksumMismatch, match=r"'model\.0\.weight'.*on_damage=\"previous\""):
            checkpointer.restore("latest", **job.parts)
        assert not checkpointer.certificate
        with caplog.at_level(logging.WARNING, "headrace"):
            assert checkpointer.restore("latest", **job.parts, on_damage="previous") == 2
        assert torch.equal(job.model[0].weight, good) and job.loader.at == 2
        assert checkpointer.certificate is not None
        [passed] = checkpointer.certificate.damaged
        assert passed.checkpoint == "run/step-00000003" and "'model.0.weight'" in passed.error
        assert checkpointer.certificate.line.startswith("DAMAGED, PASSED OVER: run/step-00000003; restarted from")
        [loud] = [each.getMessage() for each in caplog.records if (each.name, each.levelname) == ("headrace", "ERROR")]
        assert "step 3 of run is DAMAGED, going back" in loud and "'model.0.weight'" in loud
    damage(uris, good)
    with Checkpointer(uris, "run") as checkpointer:
        assert checkpointer.restore(2, **job.parts, on_damage="previous") == 1
        assert [each.checkpoint for each in checkpointer.certificate.damaged] == ["run/step-00000002"]  # type: ignore[union-attr]


@pytest.mark.parametrize("started_again", [False, True])
def test_a_job_that_goes_back_goes_on_from_there(
    uris: list[str], started_again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether a new process goes back, or the loop does so by itself: what it saves from there on is what counts."""
    job, options = Job(1), WriterOptions(keep_last=3)
    with contextlib.ExitStack() as stack:
        checkpointer = stack.enter_context(Checkpointer(uris, "run", interval=2, options=options))
        assert checkpointer.restore("latest", **job.parts) is None
        for step in range(1, 7):
            job.steps(1)
            checkpointer.step(step)
        if started_again:
            stack.close()
            job = Job(2)
            checkpointer = stack.enter_context(Checkpointer(uris, "run", interval=2, options=options))
        else:
            checkpointer.wait()
        assert checkpointer.restore(4, **job.parts) == 4
        assert checkpointer.latest() == 6, "nothing was saved yet"
        [said] = [each.getMessage() for each in caplog.records if each.name == "headrace"]
        assert "restoring step 4 of run, behind which others were committed, the last of them step 6" in said
        job.steps(1)
        checkpointer.save(5, wait=True)
        assert (checkpointer.latest(), steps_of(uris)) == (5, [2, 4, 5]), "what was left behind goes first"
        job.steps(1)
        # The step that was saved last before it went back.
        checkpointer.step(6)
        checkpointer.wait()
        assert (checkpointer.latest(), steps_of(uris)) == (6, [4, 5, 6])
        weight = job.model[0].weight.detach().clone()
        # And once more, with no save in between.
        assert checkpointer.restore(5, **job.parts) == 5
        job.steps(1)
        assert checkpointer.due(6)
    unbroken = Job(1)
    unbroken.steps(6)
    assert torch.equal(weight, unbroken.model[0].weight)
    with Checkpointer(uris, "run") as checkpointer:
        # Without a bound all stay; from what was saved last it goes back to what that went on from.
        checkpointer.keep(6, "mine")
        assert checkpointer.restore(4, **job.parts) == 4
        assert "pinned, and not replaced: a save of step 6 will fail" in caplog.records[-1].getMessage()
        job.model[0].weight.data.add_(1)
        checkpointer.save(5, wait=True)
        assert steps_of(uris) == [4, 6, 5]
        checkpointer.save(6)
        with pytest.raises(CheckpointFailed, match="pinned, and not replaced"):
            checkpointer.wait()
        damage(uris, job.model[0].weight)
        assert checkpointer.restore("latest", **job.parts, on_damage="previous") == 4


def test_what_was_damaged_on_the_way_is_read_again(uris: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(1)
    with Checkpointer(uris, "run", options=WriterOptions(stall_s=7.0, deadline_s=70.0)) as checkpointer:
        checkpointer.save(1, **job.parts)
        checkpointer.save(2, **job.parts)
        whole, bad = VolumeReader.load, [True]

        def load(*arguments: Any, **options: Any) -> Any:
            assert (arguments[0]._stall_s, arguments[0]._timeout_s) == (7.0, 70.0), "as patient as with saves"
            if bad:
                bad.clear()
                raise ChecksumMismatch("bytes of a checkpoint were damaged on the way, a second reading was good")
            return whole(*arguments, **options)

        monkeypatch.setattr(VolumeReader, "load", load)
        assert checkpointer.restore("latest", **job.parts, on_damage="previous") == 2
        assert not bad
        assert checkpointer.certificate is not None and not checkpointer.certificate.damaged


@pytest.mark.parametrize("on_failure", ["raise", "log"])
def test_a_save_that_failed_is_heard_of(uris: list[str], on_failure: Any, caplog: pytest.LogCaptureFixture) -> None:
    small, large = torch.nn.Linear(3, 3), torch.nn.Linear(3000, 3000)
    with Checkpointer(uris, "run", on_failure=on_failure) as checkpointer:
        checkpointer.save(1, large)
        if on_failure == "raise":
            with pytest.raises(VolumeFull):
                checkpointer.save(2, small)
        checkpointer.save(3, small, wait=True)
        assert checkpointer.latest() == 3
    assert any("the save of step 1 of run FAILED" in each.getMessage() for each in caplog.records)


class Stuck(Volume):
    """Its writes wait until somebody lets them go."""

    go: threading.Event

    def write_grant(self, grant: Any, buffer: Any) -> Any:
        assert self.go.wait(PATIENCE_S)
        return super().write_grant(grant, buffer)


def test_a_save_that_hangs_is_waited_for_no_longer_than_was_said(uris: list[str]) -> None:
    volume = Stuck.open(uris, write=True)
    assert isinstance(volume, Stuck)
    volume.go = threading.Event()
    checkpointer = Checkpointer(volume, "run", wait_s=0.3)
    checkpointer.save(1, torch.nn.Linear(3, 3))
    for waits in (checkpointer.wait, lambda: checkpointer.wait(0.1), checkpointer.close):
        with pytest.raises(
            CheckpointFailed, match=r"step 1 is not committed in time.* rank 0.* run/step-00000001: it "
        ):
            waits()
    volume.go.set()
    # Nothing of it was closed under the save, and it is whole when what it waited for has come.
    assert checkpointer.wait(PATIENCE_S) is not None
    checkpointer.close()
    volume.close()
    with Volume.open(uris) as opened:
        assert [info.step for info in list_checkpoints(opened, "run")] == [1]


def test_too_little_room_for_what_is_to_stay_is_told_before_training(uris: list[str]) -> None:
    job = Job(1)
    for keep_last, room in ((2, True), (40, False)):
        with Checkpointer(uris, "run", options=WriterOptions(keep_last=keep_last)) as checkpointer:
            if room:
                assert checkpointer.restore("latest", **job.parts) is None
                continue
            with pytest.raises(VolumeFull):
                checkpointer.restore("latest", **job.parts)


def test_told_to_stop_the_last_save_is_tried_whatever_the_one_before_failed_with(uris: list[str]) -> None:
    with Checkpointer(uris, "run", preemption=Preemption(signals=(signal.SIGUSR1,), grace_s=60.0)) as checkpointer:
        checkpointer.save(1, torch.nn.Linear(3000, 3000))
        signal.raise_signal(signal.SIGUSR1)
        checkpointer.save(2, torch.nn.Linear(3, 3))
        assert checkpointer.stopping and checkpointer.latest() == 2


def test_a_step_that_is_saved_is_not_saved_again_unless_something_is_given(uris: list[str]) -> None:
    model = torch.nn.Linear(3, 3)
    with Checkpointer(uris, "run") as checkpointer:
        for given, commits in ((model, 1), (None, 1), (model, 2)):
            checkpointer.save(4, given)
            checkpointer.wait()
            with Volume.open(uris) as volume:
                [info] = list_checkpoints(volume, "run")
            if commits == 1:
                first = info.sequence
            assert (info.sequence > first) == (commits == 2)


def test_the_interval_follows_from_what_saves_cost(uris: list[str], caplog: pytest.LogCaptureFixture) -> None:
    job = Job(1)
    with (
        caplog.at_level(logging.INFO, "headrace"),
        Checkpointer(uris, "run", interval="auto", mtbf_s=1e9) as checkpointer,
    ):
        checkpointer.restore("latest", **job.parts)
        assert checkpointer.due(1), "the first save is made at once: it measures"
        checkpointer.step(1)
        checkpointer.wait()
        assert not checkpointer.due(2)
    assert any(each.getMessage().startswith("headrace: a save every") for each in caplog.records)
    costs = Costs()
    schedule = Schedule("auto", 1e9, costs)
    schedule.begun()
    assert not schedule.due(2), "none was measured yet"
    for seconds in (1000.0, 0.0):
        costs.note(Cost(blocked_s=seconds, committed_s=seconds, writing_s=0.0, around_s=0.0))
    # The first one, with all that is made once, does not count.
    assert schedule.due(3)


def test_what_saves_give_away_to_reads_does_not_lengthen_the_interval() -> None:
    report = SaveReport(
        checkpoint_id="run/step-1", rank=0, ranks=2, data_bytes=1, object_bytes=1, rewritten_bytes=0, grant_seconds=1.0,
        stage_seconds=1.0, write_seconds=300.0, wait_seconds=100.0,
        pacing=PaceReport(
            feed_seconds=250.0, target_seconds=30.0, learning_seconds=1.0, pressed_bytes=0, hurried_bytes=0,
            within_seconds=300.0, piece_bytes=1, piece_seconds=None,
        ),
    )  # fmt: skip
    costs = Costs()
    costs.note(Cost.of(report, blocked_s=0.001, committed_s=405.0))
    schedule = Schedule("auto", 1000.0, costs)
    interval = schedule.interval()
    # 281 of 300 s were given away, and 100 s another rank was waited for.
    assert interval is not None and (interval.seconds, interval.committed_s) == (4.0 + 20.0, 405.0)
    # Until it is known that the other rank itself takes longer.
    assert schedule.mine(rank=1) == (20.0, 0.0) and schedule.mine(rank=0) == (20.0, 24.0)
    schedule.agreed(90.0, 24.0)
    slower = schedule.interval()
    assert slower is not None and slower.seconds == 4.0 + 90.0
    assert schedule.left_s is None
    schedule.begun()
    assert schedule.left_s is not None and 0 < schedule.left_s <= 24.0


class Starved:
    """A feed that has nothing."""

    def batches_ahead(self) -> list[bool]:
        return [False]


def test_the_first_save_measures_and_later_ones_have_until_the_next(
    uris: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, model = Starved(), torch.nn.Linear(1200, 1000)
    monkeypatch.setattr(hunger, "_reading", {})
    hunger.join(feed)
    with Checkpointer(uris, "run", interval="auto", mtbf_s=1e4) as checkpointer:
        checkpointer.restore("latest", model)
        assert checkpointer.due(1)
        checkpointer.save(1)
        # Nobody waits for it, and the feed would hold it up for minutes.
        until(lambda: not checkpointer._writer._busy(), "the first save is committed")
        assert not checkpointer.due(2)
        interval = checkpointer._schedule.interval()
        checkpointer.save(2)
        until(lambda: checkpointer._writer.describe()["pacing"] is not None, "it is being written")
        within_s = checkpointer._writer.describe()["pacing"]["within_seconds"]
        report = checkpointer.wait()
        assert interval is not None and report is not None and report.pacing is not None
        assert 0 < within_s <= min(0.8 * interval.seconds, 300.0)
        assert report.pacing.hurried_bytes > 0, "it was waited for"


def test_a_save_right_behind_a_restore_is_the_latest(uris: list[str]) -> None:
    """So a restart finds what a job has gone back to, though it has not taken a step."""
    job = Job(1)
    with Checkpointer(uris, "run") as checkpointer:
        for step in (1, 2):
            job.steps(1)
            checkpointer.save(step, **job.parts, wait=True)
        assert checkpointer.restore(1, **job.parts) == 1 and checkpointer.latest() == 2
        checkpointer.save(1, wait=True)
        assert checkpointer.latest() == 1


def test_a_signal_is_noted_and_its_handler_is_put_back(uris: list[str]) -> None:
    job, before = Job(1), signal.getsignal(signal.SIGUSR1)
    with Checkpointer(uris, "run", preemption=Preemption(signals=(signal.SIGUSR1,), grace_s=60.0)) as checkpointer:
        checkpointer.restore("latest", **job.parts)
        assert not checkpointer.step(1) and not checkpointer.should_stop(1)
        signal.raise_signal(signal.SIGUSR1)
        # Agreed on once a step.
        assert not checkpointer.should_stop(1) and not checkpointer.stopping
        assert checkpointer.should_stop(2) and not checkpointer.stopping
        assert checkpointer.step(2) and checkpointer.stopping
        assert checkpointer.latest() == 2
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_checkpoint_of_another_hand_gives_back_its_tensors(uris: list[str]) -> None:
    model = torch.nn.Linear(3, 3)
    with VolumeWriter(uris, "run") as writer:
        writer.save({"model": model.state_dict()}, "run/step-5")
    other = torch.nn.Linear(3, 3)
    with Checkpointer(uris, "run") as checkpointer:
        assert checkpointer.restore("latest", other) == 5
        assert torch.equal(other.weight, model.weight)
        assert checkpointer.certificate is not None and checkpointer.certificate.rng == "not saved"
        with pytest.raises(CheckpointFailed, match="neither a position in data nor extras"):
            checkpointer.restore("latest", other, loader=Counting())
        with pytest.raises(CheckpointFailed, match="holds no optimizer"):
            checkpointer.restore("latest", other, torch.optim.SGD(other.parameters()))


def test_what_cannot_be_meant(uris: list[str]) -> None:
    model = torch.nn.Linear(3, 3)
    with pytest.raises(UsageError, match="mtbf_s"):
        Checkpointer(uris, "run", interval="auto")
    with pytest.raises(UsageError, match="interval"):
        Checkpointer(uris, "run", interval=0)
    with pytest.raises(UsageError, match="wait_s"):
        Checkpointer(uris, "run", wait_s=0)
    for never in (signal.SIGKILL, signal.SIGSTOP):
        with pytest.raises(UsageError, match=f"may hear of.*{never.name}"):
            Preemption(signals=(signal.SIGTERM, never))
    with Checkpointer(uris, "run") as checkpointer:
        with pytest.raises(UsageError, match="extra 'thing' cannot be saved"):
            checkpointer.save(1, model, extra={"thing": object()})
        with pytest.raises(UsageError, match="no model"):
            checkpointer.save(1, optimizer=torch.optim.SGD(model.parameters()))
        with pytest.raises(UsageError, match="no state"):
            checkpointer.save(1, model, loader=[1, 2])
        with pytest.raises(UsageError, match="latest"):
            checkpointer.restore("newest")  # type: ignore[arg-type]
        checkpointer.save(1, model)
        with pytest.raises(CheckpointFailed, match="no position in the data"):
            checkpointer.restore(1, model, loader=Counting())
