"""Staging by real processes: killed, several at once, out of space, beside a target that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.dataset import (
    StageOptions,
    StageProgress,
    Staging,
    drop_stage,
    stage,
    stages,
)
from headrace.dataset import staging as staging_module
from headrace.errors import DeviceTimeout, UsageError
from headrace.testing.serve import serving
from headrace.volume import Volume
from headrace.volume.stage.store import address_of, hold
from tests.dataset.corpora import put_stream, some_lengths
from tests.dataset.staged import WAIT_S, epoch, feed, report_of, stager, there
from tests.stopping import stopped
from tests.waiting import until

NQN = "nqn.2026-01.io.headrace:test-staging"
#: A chunk of 4 MiB takes so long that nobody is through before he is killed.
SLOWLY = ("--limit", "100KB")


@dataclass(frozen=True)
class Source:
    uri: str
    volume: Volume
    good: str


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    uri = f"file:{tmp_path_factory.mktemp('source')}/a.img"
    with Volume.create(f"{uri}?create=64MiB") as volume:
        # Four chunks of tokens.
        put_stream(volume, "corpus", some_lengths(700, 6000))
        assert volume.stat("corpus.bin").length_bytes > 12 << 20
        yield Source(uri, volume, epoch(feed(volume, "corpus", None, length=2047)))


def found(source: Source, where: Path) -> float:
    """The same batches, and the share of the stage."""
    each = feed(source.volume, "corpus", where, length=2047)
    assert epoch(each) == source.good
    said = each.describe()["corpus"]["stage"]
    assert said["trouble"] is None
    return float(said["stage_share"])


def test_a_stager_that_is_killed_goes_on_where_it_was(source: Source, tmp_path: Path) -> None:
    where = tmp_path / "nvme"
    with stager(source.uri, "corpus", where, *SLOWLY) as process:
        until(lambda: there(where) >= 1, "nothing was staged")
        assert next(stages(where)).busy
        os.kill(process.pid, signal.SIGKILL)
        process.wait(WAIT_S)
    left = next(stages(where))
    assert not left.busy and not left.complete and left.there_chunks >= 1
    assert found(source, where) < 1
    with stager(source.uri, "corpus", where, "--verify") as process:
        report = report_of(process)
    assert report["complete"] and report["mended_chunks"] == 0
    assert 0 < report["copied_bytes"] < report["wanted_bytes"]
    assert found(source, where) == 1


def test_ctrl_c_keeps_what_is_there(source: Source, tmp_path: Path) -> None:
    where = tmp_path / "nvme"
    with stager(source.uri, "corpus", where, *SLOWLY) as process:
        until(lambda: there(where) >= 1, "nothing was staged")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 130 and "Traceback" not in err
    assert not next(stages(where)).busy and there(where) >= 1


def test_who_waits_takes_over_from_one_that_is_killed(source: Source, tmp_path: Path) -> None:
    where = tmp_path / "nvme"
    with stager(source.uri, "corpus", where, *SLOWLY) as first:
        until(lambda: there(where) >= 1, "nothing was staged")
        waited = threading.Event()

        def seen(now: StageProgress) -> None:
            if now.doing == "waiting" and not waited.is_set():
                waited.set()
                os.kill(first.pid, signal.SIGKILL)

        report = stage(source.volume, "corpus", where, progress=seen)
    assert waited.is_set() and report.complete and not report.by_another
    assert 0 < report.copied_bytes < report.wanted_bytes
    assert found(source, where) == 1


def test_who_waits_is_done_with_the_other(source: Source, tmp_path: Path) -> None:
    where = tmp_path / "nvme"
    waiting, reports = threading.Event(), {}

    def hold_on(now: StageProgress) -> None:
        assert waiting.wait(WAIT_S)

    def run(name: str, progress: object) -> None:
        reports[name] = stage(source.volume, "corpus", where, progress=progress)

    first = threading.Thread(target=run, args=("first", hold_on))
    first.start()
    until(lambda: where.is_dir() and any(each.busy for each in stages(where)), "nobody holds it")
    second = threading.Thread(target=run, args=("second", lambda now: now.doing == "waiting" and waiting.set()))
    second.start()
    for thread in (first, second):
        thread.join(WAIT_S)
    assert reports["first"].complete and not reports["first"].by_another
    # By then the other may just have ended: then there was nothing to do.
    assert reports["second"].complete and reports["second"].copied_bytes == 0


@pytest.mark.parametrize("partial", [False, True])
def test_a_part_that_another_stages_is_not_taken_for_the_whole(
    source: Source, tmp_path: Path, partial: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "nvme"
    part = StageOptions(most_bytes=9 << 20, partial=True)
    waiting, reports = threading.Event(), {}

    def part_is_there() -> bool:
        found = list(stages(where)) if where.is_dir() else []
        return any(each.busy and 0 < each.wanted_chunks <= each.there_chunks for each in found)

    def hold_on(now: StageProgress) -> None:
        if part_is_there():
            assert waiting.wait(WAIT_S)

    first = threading.Thread(
        target=lambda: reports.update(first=stage(source.volume, "corpus", where, part, progress=hold_on))
    )
    first.start()
    until(part_is_there, "nobody holds it")
    options = part if partial else StageOptions()
    report = stage(source.volume, "corpus", where, options, progress=lambda now: waiting.set())
    first.join(WAIT_S)
    assert not reports["first"].complete and 0 < reports["first"].wanted_bytes < reports["first"].dataset_bytes
    assert report.complete is not partial and bool(report.copied_bytes) is not partial
    assert (report.wanted_bytes < report.dataset_bytes) is partial
    assert main(["dataset", "stage", "--to", str(where), "--status"]) == 0
    said = capsys.readouterr().out
    assert ("a part" in said, "complete" in said, "100.0%" in said) == (partial, not partial, not partial)
    assert main(["dataset", "stage", "corpus", "-V", source.uri, "--to", str(where), "--max", "9MiB", "--partial"]) == 0
    assert ("a part of" in capsys.readouterr().out) is partial


def test_one_that_holds_a_stage_and_does_nothing_is_not_waited_for_for_ever(source: Source, tmp_path: Path) -> None:
    address = address_of(tmp_path, source.volume.id, "corpus")
    held = hold(address)
    assert held is not None
    with held:
        with pytest.raises(DeviceTimeout, match="another process"):
            stage(source.volume, "corpus", tmp_path, StageOptions(patience_s=0.2))
        (status,) = stages(tmp_path)
        assert status.busy and status.problem is None
        with pytest.raises(UsageError, match="being filled"):
            drop_stage(status.where)
    assert not list(tmp_path.iterdir())


RANK = """
import sys, time
from headrace.dataset import (
    Feed,
    FeedOptions,
    Staging,
    StageOptions,
    TokenStream,
    open_samples,
)
from headrace.volume import Volume

uri, where = sys.argv[1:]
volume = Volume.open(uri)
with Staging(volume, "corpus", where, StageOptions(limit_bytes_s=100_000)):
    samples = open_samples(TokenStream.open(volume, "corpus"), "windows", 2047)
    feed = Feed({"corpus": samples}, FeedOptions(sequence_length=2047, global_batch=64, seed=3, stage=where))
    while True:
        batch = feed.acquire()
        feed.release(batch)
        print(batch.position, flush=True)
        time.sleep(0.01)
"""


def test_a_rank_that_stages_behind_itself_is_killed(source: Source, tmp_path: Path) -> None:
    where = tmp_path / "nvme"
    rank = subprocess.Popen([sys.executable, "-c", RANK, source.uri, str(where)], stdout=subprocess.PIPE)
    try:
        assert rank.stdout is not None and rank.stdout.readline()
        until(lambda: there(where) >= 1, "nothing was staged")
    finally:
        rank.kill()
        rank.communicate()
    assert not next(stages(where)).complete and found(source, where) < 1
    assert stage(source.volume, "corpus", where).complete
    assert found(source, where) == 1


FULL = """
import os, subprocess, sys
from pathlib import Path
from headrace.dataset import StageOptions, stage, stages
from headrace.errors import DeviceError, VolumeFull
from headrace.volume import Volume
from headrace.volume.stage.store import Held
from tests.dataset.staged import epoch, feed

uri, where, good = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(where)], check=True)
volume = Volume.open(uri)
lay_out = Held.lay_out

def then_fill_the_disk(self, *arguments, **options):
    lay_out(self, *arguments, **options)
    room = os.statvfs(where)
    (where / "ballast").write_bytes(bytes(room.f_bavail * room.f_frsize - (6 << 20)))

Held.lay_out = then_fill_the_disk
try:
    stage(volume, "corpus", where, StageOptions(workers=1))
    raise SystemExit("there was room")
except DeviceError as error:
    assert "No space left" in str(error) and "what is staged is used" in str(error), error
Held.lay_out = lay_out
(status,) = stages(where)
assert 0 < status.there_chunks < status.wanted_chunks and not status.busy, status
each = feed(volume, "corpus", where, length=2047)
assert epoch(each) == good and 0 < each.describe()["corpus"]["stage"]["stage_share"] < 1
try:
    stage(volume, "corpus", where)
    raise SystemExit("it was not told before")
except VolumeFull as error:
    assert "no room" in str(error)
(where / "ballast").unlink()
report = stage(volume, "corpus", where)
assert report.complete and 0 < report.copied_bytes < report.wanted_bytes
each = feed(volume, "corpus", where, length=2047)
assert epoch(each) == good and each.describe()["corpus"]["stage"]["stage_share"] == 1
print("good")
"""


def test_the_disk_of_the_node_is_full(source: Source, tmp_path: Path) -> None:
    mine = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*mine, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces for users here")
    (tmp_path / "nvme").mkdir()
    command = [*mine, sys.executable, "-c", FULL, source.uri, str(tmp_path / "nvme"), source.good]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0 and done.stdout == "good\n", done.stderr


def test_what_is_staged_whole_is_read_without_the_target(tmp_path: Path) -> None:
    where = tmp_path / "nvme"
    with serving(NQN, "mem:32MiB") as target, Volume.create([target.uri(loss_timeout=1)]) as volume:
        put_stream(volume, "corpus", some_lengths(300, 6000))
        good = epoch(feed(volume, "corpus", None, length=2047))
        assert stage(volume, "corpus", where).complete
        each = feed(volume, "corpus", where, length=2047)
        each.begin()
        os.kill(target.process.pid, signal.SIGKILL)
        target.process.wait(WAIT_S)
        assert epoch(each) == good and each.describe()["corpus"]["stage"]["stage_share"] == 1


def test_a_staging_ends_though_the_volume_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(NQN, "mem:32MiB") as target, Volume.create([target.uri(loss_timeout="forever")]) as volume:
        put_stream(volume, "corpus", some_lengths(300, 6000))
        go_on = threading.Event()

        def later(*arguments: Any, **options: Any) -> Any:
            assert go_on.wait(WAIT_S)
            return stage(*arguments, **options)

        monkeypatch.setattr(staging_module, "stage", later)
        staging = Staging(volume, "corpus", tmp_path / "nvme")
        with stopped(target.process.pid):
            go_on.set()
            staging.close(timeout_s=0.5)
            # So short that its thread may still be at it.
            until(staging.done, "the staging ends while nobody answers")


def test_a_file_is_the_stage_of_one_dataset(source: Source, tmp_path: Path) -> None:
    options = ["corpus", "other", "-V", source.uri, "--to", f"file:{tmp_path}/one"]
    command = [sys.executable, "-m", "headrace.cli", "dataset", "stage", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2 and "the stage of one dataset" in done.stderr and not list(tmp_path.iterdir())


def test_a_file_in_which_another_dataset_is_being_staged_is_not_waited_for(source: Source, tmp_path: Path) -> None:
    """By a dataset of the same name, of another volume."""
    where = f"file:{tmp_path}/one"
    with (
        stager(source.uri, "corpus", Path(where), *SLOWLY) as process,
        Volume.create(f"file:{tmp_path}/other.img?create=16MiB") as other,
    ):
        put_stream(other, "corpus", some_lengths(100, 200))
        until(lambda: any(each.dataset for each in stages(where)), "nothing was staged")
        with pytest.raises(UsageError, match=f"another dataset is there.*{source.volume.id}"):
            stage(other, "corpus", where)
        assert process.poll() is None and next(stages(where)).busy


SHORT = """
import resource, signal, sys
from headrace.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
sys.exit(main(["dataset", "stage", "corpus", "-V", sys.argv[1], "--to", sys.argv[2]]))
"""


def test_a_file_system_whose_files_are_too_short(source: Source, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHORT, source.uri, str(tmp_path / "nvme")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "the stage cannot be made" in line and "or a block device" in line
