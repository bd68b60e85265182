"""What is measured: a target of ours, this machine's own file systems, and what the command says of both."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.device import NvmeTcpAddress, parse_address
from headrace.doctor import probe as probing
from headrace.doctor.checks.measured import check_measured
from headrace.doctor.probe import PortalProbe, TargetProbe, probe_target
from headrace.doctor.tcp import PathMtu, path_mtu
from headrace.doctor.touch import Touch, touch, touch_mount
from headrace.testing.serve import ServeProcess, free_port, serving

NQN = "nqn.2026-01.io.headrace:doctor"
HOST = f"nqn.2014-08.org.nvmexpress:uuid:{uuid.UUID(int=7)}"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    image = tmp_path_factory.mktemp("media") / "a.img"
    with serving(NQN, f"{image}:16MiB", "mem:16MiB", options=["--allow-host", HOST]) as one:
        yield one


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOSTNQN", HOST)
    monkeypatch.setenv("HEADRACE_HOSTID", str(uuid.UUID(int=7)))


def _probe(target: ServeProcess, **options: object) -> TargetProbe:
    address = parse_address(target.uri(**options))  # type: ignore[arg-type]
    assert isinstance(address, NvmeTcpAddress)
    return probe_target(address)


def _ids(*probes: TargetProbe, touches: tuple[Touch, ...] = ()) -> dict[str, str]:
    return {one.id: one.severity for one in check_measured(probes, touches)}


@pytest.mark.usefixtures("host")
def test_a_target_says_what_it_is_worth(target: ServeProcess) -> None:
    found = _probe(target)
    assert (found.error, found.model, found.hostnqn) == (None, "headrace", HOST)
    assert (found.fence, found.fence_now, found.session_accepted) == ("persistent", "none", True)
    assert found.latency is not None and found.latency.count > 10
    assert 0 < found.latency.p50_s <= found.latency.p99_s <= found.latency.max_s
    # Our own connections, by the kernel's account: the admin queue and at least one of I/O.
    assert len(found.connections) >= 2 and {one.port for one in found.connections} == {target.port}
    assert all(one.rtt_s > 0 and one.mss > 500 for one in found.connections)
    (portal,) = found.portals
    assert portal.error is None and portal.mtu is not None and portal.mtu.full and portal.mtu.small
    # Nothing was taken there.
    space = target.ask("status")["subsystems"][0]["namespaces"][0]
    assert not space["reservations"]["type"] and space["reservations"]["registered"] == 0
    assert {one for one, severity in _ids(found).items() if severity == "error"} == set()


def test_a_host_that_is_not_allowed_is_told(target: ServeProcess) -> None:
    found = _probe(target)
    assert found.refused and found.error and "HOSTNQN" in found.error
    assert found.portals[0].error is None
    assert _ids(found) == {"target-refused": "error"}


@pytest.mark.usefixtures("host")
def test_a_wrong_name_or_namespace_is_not_the_hosts_fault(target: ServeProcess) -> None:
    for wrong in (target.uri().replace(NQN, f"{NQN}-other"), target.uri().replace("nsid=1", "nsid=9")):
        address = parse_address(wrong)
        assert isinstance(address, NvmeTcpAddress)
        found = probe_target(address)
        assert _ids(found) == {"target-away": "error"} and found.error and not found.refused


@pytest.mark.usefixtures("host")
def test_a_portal_that_is_away_is_told_beside_one_that_answers(target: ServeProcess) -> None:
    address = parse_address(f"nvme+tcp://127.0.0.1:{target.port},127.0.0.1:{free_port()}/{NQN}?nsid=1")
    assert isinstance(address, NvmeTcpAddress)
    assert _ids(probe_target(address))["target-portal"] == "warning"
    (away,) = (replace(address, portals=address.portals[1:]),)
    assert _ids(probe_target(away)) == {"target-away": "error"}


@pytest.mark.usefixtures("host")
def test_portals_that_the_target_names_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more that answers, one that does not, and one that nobody can use."""
    away = free_port()
    with serving(NQN, "mem:16MiB", options=["--listen", f"127.0.0.1:{free_port()}"]) as target:
        found = _probe(target)
        assert found.error is None
        (more,) = found.advertised
        assert more.error is None and more.portal != f"127.0.0.1:{target.port}"
        assert _ids(found)["target-more-portals"] == "note" and "target-advertised" not in _ids(found)
        real = probing.discover

        def lies(*given: object, **options: object) -> object:
            said = real(*given, **options)  # type: ignore[arg-type]
            (record, *_) = [one for one in said.records if one.subnqn == NQN]
            wild = replace(record, traddr="0.0.0.0", problem="a wildcard address")
            return replace(said, records=[replace(record, trsvcid=str(away)), wild])

        monkeypatch.setattr(probing, "discover", lies)
        found = _probe(target)
    told = [one for one in check_measured([found], []) if one.id == "target-advertised"]
    assert [one.severity for one in told] == ["warning", "warning"]
    assert f"127.0.0.1:{away}" in told[0].title and "wildcard" in told[1].evidence
    assert "target-more-portals" not in _ids(found)


@pytest.mark.usefixtures("host")
def test_a_session_identifier_that_is_refused_is_told(target: ServeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours takes any; others have one identifier for each name."""
    found = _probe(target)
    assert "target-session" not in _ids(found)
    assert _ids(replace(found, session_accepted=False, session_error="HOSTID"))["target-session"] == "error"
    assert _ids(replace(found, fence="none"))["fence-none"] == "warning"
    forgetful = replace(found, fence="until-restart")
    assert _ids(forgetful)["fence-until-restart"] == "note"
    # Ours keeps them, where it is no memory that it exports.
    assert any("but for mem:" in one.what_to_do for one in check_measured((forgetful,), ()))
    monkeypatch.setattr(probing, "READS", 0)
    assert _probe(target).latency is None


def test_slow_targets_and_lossy_ways_are_told(target: ServeProcess, host: None) -> None:
    found = _probe(target)
    assert found.latency is not None
    slow = replace(found.latency, p50_s=0.5, p99_s=0.6, max_s=0.7)
    assert _ids(replace(found, latency=slow))["target-slow"] == "warning"
    tail = replace(found.latency, p50_s=1e-4, p99_s=0.2, max_s=0.2)
    assert _ids(replace(found, latency=tail))["target-tail"] == "note"
    lossy = replace(found.connections[0], bytes_sent=1 << 20, bytes_retrans=1 << 19)
    assert _ids(replace(found, connections=(lossy,)))["target-retransmits"] == "warning"
    hole = replace(found.portals[0], mtu=PathMtu(mtu=9000, full=None, small=True))
    assert _ids(replace(found, portals=(hole,)))["target-path-mtu"] == "error"
    cut = replace(found.portals[0], mtu=PathMtu(mtu=9000, full=False, small=True))
    assert _ids(replace(found, portals=(cut,)))["target-path-mtu"] == "warning"
    silent: PortalProbe = replace(found.portals[0], mtu=PathMtu(mtu=9000, full=None, small=None))
    assert "target-path-mtu" not in _ids(replace(found, portals=(silent,)))


def test_packets_get_through_the_loopback() -> None:
    found = path_mtu("127.0.0.1", free_port())
    assert found is not None and found.full is True and found.small is True and not found.black_hole
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        # Somebody takes them, and says nothing: nobody knows.
        listener.bind(("127.0.0.1", 0))
        quiet = path_mtu("127.0.0.1", listener.getsockname()[1])
        assert quiet is not None and quiet.full is None and quiet.small is None and not quiet.black_hole


def test_file_systems_are_asked_in_a_process_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = touch("mount", str(tmp_path))
    assert found.outcome == "answered" and found.asked_s is not None and (found.size_bytes or 0) > 0
    assert touch("mount", str(tmp_path / "away")).outcome == "not asked"
    (tmp_path / "file").touch()
    assert touch("mount", str(tmp_path / "file" / "below")).outcome == "failed"
    # Before a Python can have started: as one that the kernel keeps.
    assert touch("mount", str(tmp_path), timeout_s=0.001).outcome == "silent"
    there = os.statvfs(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: os.statvfs_result([*there[:8], there.f_flag | os.ST_RDONLY, there[9]]))
        assert touch_mount(str(tmp_path)).free_bytes is None
    full = replace(found, size_bytes=1 << 40, free_bytes=1 << 30)
    silent = Touch(kind="mount", path="/mnt/x", outcome="silent")
    assert _ids(touches=(full, silent)) == {"storage-full": "warning", "storage-silent": "error"}


@pytest.mark.usefixtures("host")
def test_the_command_says_all_of_it(target: ServeProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    status = main(["doctor", target.uri(), "--json", "--html", str(page), "--fail-on", "error"])
    said = json.loads(capsys.readouterr().out)
    assert status == (1 if any(one["severity"] == "error" for one in said["findings"]) else 0)
    (storage,) = said["storage"]
    assert storage["verdict"] == "fabric-visible"
    (one,) = said["targets"]
    # Both names are in the environment, so that none is missing.
    assert not {found["id"] for found in said["findings"]} & {"identity-missing"}
    assert one["fence"] == "persistent" and one["session_accepted"] is True and one["latency"]["p50_s"] > 0
    text = page.read_text()
    assert NQN in text and "fabric-visible" in text
    # It needs nothing but itself.
    assert not re.search(r"<script|<link|src=|@import|url\(", text)


def test_what_nobody_saw_is_unknown(
    target: ServeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An address says what would be there. In the text, as JSON and on the page."""
    away = f"nvme+tcp://127.0.0.1:{free_port()}/{NQN}?nsid=1"
    other, absent = target.uri().replace(NQN, f"{NQN}-other"), target.uri().replace("nsid=1", "nsid=9")
    page = tmp_path / "page.html"
    for host, options, uri, word, why in (
        (HOST, [], target.uri(), "fabric-visible", "no kernel device stands between"),
        (f"{HOST}-other", [], target.uri(), "fabric-visible", "does not let this host in"),
        (HOST, [], away, "unknown", "nobody answered"),
        (HOST, [], other, "unknown", "gave no such namespace"),
        (HOST, [], absent, "unknown", "gave no such namespace"),
        (HOST, ["--no-measure"], target.uri(), "unknown", "nobody connected"),
    ):
        monkeypatch.setenv("HEADRACE_HOSTNQN", host)
        monkeypatch.setenv("HEADRACE_HOSTID", str(uuid.UUID(int=7)))
        words = ["doctor", uri, "--fail-on", "never", *options]
        assert main([*words, "--json", "--html", str(page)]) == 0
        said = json.loads(capsys.readouterr().out)
        (storage,) = said["storage"]
        assert storage["verdict"] == word and why in storage["why"], uri
        assert said["sentence"].startswith(f"Storage: 1 {word}.")
        assert any(one["id"] == "target-away" for one in said["findings"]) == (word == "unknown" and not options)
        assert main(words) == 0
        for text in (page.read_text(), capsys.readouterr().out):
            assert why in text and ("fabric-visible" in text) == (word == "fabric-visible"), uri


def test_exit_statuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.doctor.machines import unpack

    aws, gcp = (
        str(unpack(name, tmp_path / name)) for name in ("aws-ebs-and-instance-store", "gcp-hyperdisk-and-local-ssd")
    )
    assert main(["doctor", "--machine", aws]) == 0
    assert "Nothing is wrong" in capsys.readouterr().out
    assert main(["doctor", "--machine", gcp]) == 1
    assert main(["doctor", "--machine", gcp, "--fail-on", "never"]) == 0
    assert main(["doctor", "--machine", gcp, "--fail-on", "error", "/dev/nvme0n1"]) == 0
    capsys.readouterr()
    for wrong in (
        ["--machine", gcp, "/dev/nothing"], ["--fail-on", "x"], ["--machine", str(tmp_path / "none")],
        ["nvme+tcp://"], ["--machine", gcp, "--record", str(tmp_path / "r")], [str(tmp_path / "not-there")],
        ["--nodes", gcp], ["--machine", gcp, "\0"],
    ):  # fmt: skip
        assert main(["doctor", *wrong]) == 2, wrong
        error = capsys.readouterr().err
        assert error.startswith("headrace: error: ") and error.count("\n") == 1, error


def test_nodes_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.doctor.machines import unpack

    machine = unpack("kernel-tcp-host", tmp_path / "machine")
    assert main(["doctor", "--machine", str(machine), "--json"]) == 1
    other = tmp_path / "node-2.json"
    other.write_text(capsys.readouterr().out)
    (machine / "sys/class/net/enp1s0/mtu").write_text("1500\n")
    assert main(["doctor", "--machine", str(machine), "--nodes", str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    clones = [one["title"] for one in found if one["id"] == "nodes-cloned"]
    assert clones == ["2 nodes have one host identifier", "2 nodes have one host name"]
    assert [one["evidence"] for one in found if one["id"] == "nodes-differ"] == ["1500: this node; 9000: node-2"]
    # Whatever the file of another node says of itself.
    said = json.loads(other.read_text())
    said["facts"]["host"]["kernel"] = "\x1b[2J" + "6" * 1_000_000
    other.write_text(json.dumps(said))
    assert main(["doctor", "--machine", str(machine), "--nodes", str(other), "--json"]) == 1
    told = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["id"] == "nodes-differ"]
    assert len(told) == 2 and all(one["evidence"].isprintable() and len(one["evidence"]) < 1000 for one in told)


def test_modules_of_the_folder_one_stands_in_say_nothing_of_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    found = touch("mount", str(tmp_path))
    assert found.outcome == ("answered" if sys.version_info >= (3, 11) else "not asked")
    assert _ids(touches=(replace(found, outcome="not asked", size_bytes=None),)) == {}
    monkeypatch.setattr(sys, "executable", str(tmp_path / "away"))
    assert touch("mount", str(tmp_path)).outcome == "not asked"


@pytest.mark.parametrize("kind", ["endless", "deep", "[]", "\xff"])
def test_reports_that_are_none_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    file = tmp_path / "other.json"
    if kind == "endless":
        file.symlink_to("/dev/zero")
    else:
        file.write_bytes(b"[" * 100_000 if kind == "deep" else kind.encode("latin-1"))
    assert main(["doctor", "--no-measure", "--nodes", str(file)]) == 2
    assert ("not a plain file" if kind == "endless" else "not a report") in capsys.readouterr().err
