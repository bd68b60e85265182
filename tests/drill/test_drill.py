"""The drill on targets that keep nobody out, that people restart, that hold something: what it says, and does not."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path

import pytest

from headrace.accidents.processes import Processes
from headrace.cli import main
from headrace.cli.drill import NOTHING_SAID, _ask
from headrace.device import NvmeTcpAddress, parse_address
from headrace.drill import hooks, scenarios
from headrace.drill.hooks import Hook
from headrace.drill.page import build
from headrace.drill.report import DrillFailed, Finding, Report, rows_of
from headrace.drill.run import NAME, SCENARIOS, DrillOptions, run_drill
from headrace.drill.world import Hooks, World
from headrace.errors import WriterActive
from headrace.fabric import FileMedia, NamespaceOptions, SubsystemOptions, Target, TargetOptions
from headrace.testing.serve import free_port
from headrace.units import MIB
from headrace.volume import Volume
from tests.drill.careless import careless
from tests.measure.test_report import check_page
from tests.waiting import PATIENCE_S, until

NQN = "nqn.2026-01.io.headrace:drilled"
BEAT = 0.5


@contextmanager
def target(folder: Path, *, no_reservations: bool = False) -> Iterator[list[str]]:
    """Two members."""
    spaces = [
        NamespaceOptions(
            nsid=nsid,
            media=FileMedia(path=str(folder / f"{nsid}.img"), size_bytes=16 * MIB, create=True),
            no_reservations=no_reservations,
        )
        for nsid in (1, 2)
    ]
    with Target(TargetOptions(subsystems=[SubsystemOptions(nqn=NQN, namespaces=spaces)])) as running:
        yield [running.uri(nsid=nsid) for nsid in (1, 2)]


def drill(uris: Sequence[str], *scenarios: str) -> Report:
    options = DrillOptions(uris=uris, scenarios=scenarios, shard_bytes=256 << 10, heartbeat_s=BEAT)
    said: list[str] = []
    return run_drill(options, tell=said.append, say=said.append)


def test_a_target_without_reservations_lets_late_writes_through(tmp_path: Path) -> None:
    with target(tmp_path, no_reservations=True) as uris:
        report = drill(uris, "freeze")
    (frozen,) = report.findings
    assert report.fence == "none" and not report.trusted
    assert frozen.verdict == "not trusted" and frozen.moved_bytes > 0 and frozen.refused == 0, frozen
    # The look of headrace itself, in place of the target's.
    assert frozen.late_commit.startswith("SessionLost") and frozen.last_step == "step-000003"
    assert frozen.whole, "what was committed is there all the same"
    page = build(report).html()
    assert {"table", "section"} <= set(check_page(page).tags)
    assert f"{frozen.moved_bytes} B of " in page and "✗ not trusted" in page and "0 of 1" in page
    assert all(escape(text) in page for _, texts in rows_of(frozen) for text in texts)
    assert "NOT refused" in report.sentence and "by time alone" in report.to_json()["fenced_by"]


def test_storage_that_says_that_it_fences_and_does_not(tmp_path: Path) -> None:
    """`headrace volume info` believes it; what the drill finds is that two jobs write."""
    with target(tmp_path) as uris:
        behind = parse_address(uris[0])
        assert isinstance(behind, NvmeTcpAddress)
        port = behind.portals[0].port
        with careless(port) as storage:
            report = drill([uri.replace(f":{port}/", f":{storage.port}/") for uri in uris], "freeze")
    (finding,) = report.findings
    assert report.fence == "persistent" and not report.trusted
    assert finding.verdict == "not trusted" and finding.refused == finding.held_back == 0 < finding.moved_bytes, finding
    assert finding.late_commit.startswith("acknowledged") and "NOT refused" in report.sentence


def test_who_has_no_command_for_it_and_files_are_told_what_was_not_tried(tmp_path: Path) -> None:
    report = drill([f"file:{tmp_path}/{name}?create=16MiB" for name in "ab"], "takeover", "restart", "cut")
    assert [finding.verdict for finding in report.findings] == ["not tried"] * 3
    assert not report.trusted and report.sentence == "Not tried: takeover, restart, cut."
    assert "--restart-command" in report.findings[1].problems[0]


def test_a_path_that_was_cut_is_healed_though_nobody_could_follow(tmp_path: Path) -> None:
    """A lock keeps processes of this machine apart, so that what comes behind the cut is not tried."""
    log = tmp_path / "log"
    options = DrillOptions(
        uris=[f"file:{tmp_path}/a?create=16MiB"], scenarios=["cut"], shard_bytes=256 << 10, heartbeat_s=BEAT,
        cut_command=f"echo cut >> {log}", heal_command=f"echo healed >> {log}",
    )  # fmt: skip
    report = run_drill(options, tell=lambda text: None, say=lambda line: None)
    assert report.findings[0].verdict == "not tried" and "nobody can follow" in report.findings[0].problems[0]
    assert log.read_text().split() == ["cut", "healed"]


def test_a_command_that_restarts_nothing_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "_NOTICED_S", 0.2)
    with target(tmp_path) as uris:
        options = DrillOptions(
            uris=uris, scenarios=["restart"], shard_bytes=256 << 10, heartbeat_s=BEAT, restart_command="true"
        )
        report = run_drill(options, tell=lambda text: None, say=lambda line: None)
    (finding,) = report.findings
    assert finding.verdict == "not tried" and "no target was restarted" in finding.problems[0], finding
    assert not report.trusted


def test_a_command_that_fails_or_nobody_means_that_it_was_not_tried() -> None:
    Hook("heal it", "true")()
    Hook("heal it", ask=lambda what, patience_s: what == "heal it")()
    for hook in (Hook("heal it", "echo no such port >&2; exit 3"), Hook("heal it", ask=lambda what, patience_s: False)):
        with pytest.raises(DrillFailed, match=r"heal it failed.*exit status 3, no such port|nobody did it: heal it"):
            hook()
    assert not Hook("heal it")


def test_a_command_has_ended_though_what_it_started_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a target would that it starts again in the background."""
    monkeypatch.setattr(hooks, "PATIENCE_S", PATIENCE_S)
    here = tmp_path / "here"
    here.touch()
    try:
        Hook("restart the target", f"(while test -e {here}; do sleep 0.1; done) &")()
    finally:
        here.unlink()


def test_nothing_is_left_of_a_command_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of its shell alone: what that had started would cut or restart something an hour later."""
    monkeypatch.setattr(hooks, "PATIENCE_S", 2.0)
    with (tmp_path / "lock").open("w") as lock:
        with pytest.raises(DrillFailed, match="does not end"):
            Hook("cut it", f"(flock -x 9; sleep 600; true) 9>{lock.name}; true")()

        def free() -> bool:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        until(free, "nobody holds the lock any more")


def test_an_enter_from_before_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = os.openpty()
    with os.fdopen(near, "wb", buffering=0) as keys, os.fdopen(far) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        keys.write(b"\n")
        assert not _ask("restart the target", 0.01)
        said = io.StringIO()
        monkeypatch.setattr(sys, "stderr", said)
        monkeypatch.setattr(said, "flush", lambda: keys.write(b"\n"))
        assert _ask("restart the target", PATIENCE_S) and "restart the target" in said.getvalue()


@pytest.mark.parametrize("heartbeat_s", [1.0, 60.0])
def test_a_stopped_writer_keeps_its_associations_until_it_was_followed(tmp_path: Path, heartbeat_s: float) -> None:
    uri = f"nvme+tcp://127.0.0.1:4420/{NQN}?nsid=1"
    nobody = Hook("nothing")
    world = World(
        Processes(), tmp_path, [uri], writer_uris=[uri], shard_bytes=1 << 20, heartbeat_s=heartbeat_s,
        hooks=Hooks(restart=nobody, cut=nobody, heal=nobody), target=None, tell=lambda text: None,
    )  # fmt: skip
    address = parse_address(world.writer_uris[0])
    assert isinstance(address, NvmeTcpAddress)
    # Who follows it waits for five missing beats, and tries up to three times.
    assert min(address.options.keep_alive_s, address.options.io_timeout_s) >= max(120, 3 * 5 * heartbeat_s)


def test_a_volume_that_is_not_the_drills_own_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = f"file:{tmp_path}/a.img"
    made = Volume.create(f"{uri}?create=16MiB", name="training")
    with made, made.session() as session, session.transaction() as tx:
        tx.put("weights", b"1")
    # Nobody is here to restart anything, so that nothing is tried.
    arguments = ["drill", uri, "--scenario", "restart", "--size", "256KiB", "--json"]
    assert main(arguments) == 2
    assert "training" in json.loads(capsys.readouterr().err)["error"]["message"]
    with Volume.open(uri) as volume:
        assert volume.read("weights") == b"1"
    # What is too small is not given up for nothing.
    assert main([*arguments, "--yes", "--size", "4MiB"]) == 2 and "too small" in capsys.readouterr().err
    with Volume.open(uri) as volume:
        assert volume.read("weights") == b"1"
    assert main([*arguments, "--yes"]) == NOTHING_SAID
    assert not json.loads(capsys.readouterr().out)["trusted"]
    # From now on it is the drill's own.
    assert main(arguments) == NOTHING_SAID
    with Volume.open(uri) as volume:
        assert volume.name == "headrace drill" and not [*volume.list()]


def test_what_is_not_trusted_and_what_cannot_be_reached_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCENARIOS, "kill", lambda world, finding: None)
    monkeypatch.setitem(SCENARIOS, "freeze", lambda world, finding: finding.problem("a byte moved"))
    arguments = ["drill", f"file:{tmp_path}/a?create=16MiB", "--size", "256KiB", "--scenario"]
    assert main([*arguments, "kill"]) == 0 and main([*arguments, "freeze", "--scenario", "kill"]) == 1
    capsys.readouterr()
    nobody = f"nvme+tcp://127.0.0.1:{free_port()}/{NQN}?nsid=1&connect_timeout=1"
    assert main(["drill", nobody, "--json"]) == NOTHING_SAID
    assert json.loads(capsys.readouterr().err)["error"]["exit_status"] == NOTHING_SAID


def test_what_was_found_is_told_though_a_process_dies_or_the_storage_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(world: World, finding: Finding) -> None:
        with world.job() as job:
            os.kill(job.nodes[1].child.pid, signal.SIGKILL)
            job.states()

    def gone(world: World, finding: Finding) -> None:
        finding.problem("a byte moved")
        (tmp_path / "a").unlink()

    monkeypatch.setitem(SCENARIOS, "cut", dies)
    monkeypatch.setitem(SCENARIOS, "freeze", gone)
    report = drill([f"file:{tmp_path}/a?create=16MiB"], "cut", "freeze", "kill")
    assert [finding.verdict for finding in report.findings] == ["not tried", "not trusted", "not tried"]
    died, moved, behind = (finding.problems for finding in report.findings)
    assert "rank 1 of the job ended" in died[0] and moved == ["a byte moved"], report
    assert "cannot be made again" in behind[0]


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        ([True, True], "Every step that was acknowledged is what was saved"),
        ([True, None], "ended before the steps that were acknowledged had been read"),
        ([None, False], "Not every step that was acknowledged could be read"),
    ],
)
def test_only_what_was_read_is_said_to_be_whole_or_not(whole: list[bool | None], said: str) -> None:
    findings = [Finding(scenario=name, whole=each) for name, each in zip(("freeze", "kill"), whole, strict=True)]
    findings[1].problem("it came to something")
    assert said in Report(uris=[], fence="none", findings=findings).sentence


def test_two_drills_at_once_are_refused(tmp_path: Path) -> None:
    with target(tmp_path) as uris, Volume.create(uris, name=NAME) as volume:
        # A heart that is not taken for dead on a busy machine.
        with volume.session("another drill", heartbeat_s=2) as session:
            with pytest.raises(WriterActive):
                drill(uris, "restart")
            with session.transaction() as tx:
                tx.put("step", b"1")
        assert drill(uris, "restart").findings[0].verdict == "not tried", "it has ended"


def test_what_was_found_is_told_also_where_the_page_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(uris=[], fence="none", findings=[Finding(scenario="kill", whole=True)])

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("headrace.drill.run.run_drill", lambda *_, **__: report)
    monkeypatch.setattr(Path, "write_text", full)
    assert main(["drill", "--embedded", "--html", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr()
    assert report.sentence in said.out and "No space left on device" in said.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--embedded", "mem:16MiB"],
        ["--embedded", "--restart-command", "true"],
        ["--embedded", "--scenario", "earthquake"],
        ["file:/x", "--cut-command", "true"],
        ["file:/x", "--writer", "file:/x", "--writer", "file:/y"],
        ["--embedded", "--html", "/nowhere/at/all.html"],
        ["--embedded", "--rounds", "0"],
    ],
)
def test_what_cannot_be_meant(arguments: list[str]) -> None:
    assert main(["drill", *arguments]) == 2
