"""`headrace doctor --expect`: claims held against what was measured, on this machine and on a recorded one."""

from __future__ import annotations

import json
import os
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.bench import cache
from headrace.cli import expectation, main
from headrace.cli.expectation_bench import Bench
from headrace.device import NativeDevice, open_device
from headrace.doctor import rate
from headrace.doctor.facts import gather
from headrace.doctor.machine import Machine
from headrace.doctor.storage import named_storage
from headrace.errors import UsageError
from headrace.plan.catalogue import load_catalogue
from headrace.plan.example import example, example_catalogue
from headrace.plan.expect import compare, read_measured
from headrace.testing.serve import serving
from tests.doctor.machines import unpack

NQN = "nqn.2026-01.io.headrace:expect"
CLAIM = '[[offering.claim]]\nwhat = "{}"\nlow = {}\nunit = "{}"\nper = "node"\nbound = "at least"\n'


def catalogue(folder: Path, *claims: str, seen: str = "fabric-visible", date: str = "2020-01") -> Path:
    head = (
        f'[[offering]]\nprovider = "ours"\nname = "array"\nkind = "block"\ntransport = ["nvme-tcp"]\nseen = "{seen}"\n'
    )
    file = folder / "ours.toml"
    file.write_text(head + f'source = "our contract"\ndate = "{date}"\ngrade = "contract"\n' + "".join(claims))
    return file


def test_a_target_is_held_against_a_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rate, "SECONDS", 0.1)
    # However busy the machine is that runs this.
    monkeypatch.setattr(rate, "HOST_BUSY", 1e9)
    file = catalogue(
        tmp_path, CLAIM.format("throughput", 0.001, "MB/s"), CLAIM.format("iops", 1e12, "IOPS"),
        '[[offering.claim]]\nwhat = "capacity"\nlow = 64\nunit = "TB"\nper = "volume"\nbound = "at least"\n',
    )  # fmt: skip
    page, record = tmp_path / "page.html", tmp_path / "record"
    with serving(NQN, "mem:64MiB") as target:
        uri = target.uri()
        words = ["doctor", uri, "--expect", "ours", "--catalogue", str(file)]
        status = main([*words, "--json", "--html", str(page), "--record", str(record)])
    said = json.loads(capsys.readouterr().out)
    assert status == 1
    claims = {(one["way"], one["verdict"]): one for one in said["expected"]["claims"]}
    assert set(claims) == {
        ("read", "met"), ("write", "cannot be measured here"), ("iops", "below"), ("capacity", "below"),
    }  # fmt: skip
    read = claims["read", "met"]
    assert read["measured"] > 1e6 and read["ratio"] == pytest.approx(read["measured"] / 1e3)
    assert (read["source"], read["date"], read["grade"], read["age"]) == (
        "our contract", "2020-01", "contract", "older than a year",
    )  # fmt: skip
    assert "writes nothing" in claims["write", "cannot be measured here"]["why"]
    assert said["rate"]["reads_per_s"] == claims["iops", "below"]["measured"] > 100
    below = [one for one in said["findings"] if one["id"] == "expect-below"]
    assert len(below) == 2 and {one["severity"] for one in below} == {"warning"}
    text = page.read_text()
    assert "against what ours/array claims" in text and "older than a year" in text
    # A record keeps the figures: the machine that was recorded is held against other claims later.
    catalogue(tmp_path, CLAIM.format("read", 1e6, "GB/s"), seen="hypervisor-presented")
    words = ["doctor", "--machine", str(record), uri, "--expect", "ours/array", "--catalogue", str(file)]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "Of 1 claims of ours/array: 0 met, 1 below, 0 cannot be measured here." in out
    assert "[expect-other-storage]" in out and "figures out of measured.json" in out
    # They are of that target, and of nothing else.
    assert main([word if word != uri else "/" for word in words]) == 2
    assert "of another storage" in capsys.readouterr().err


def test_a_recorded_machine_says_what_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = str(unpack("aws-ebs-and-instance-store", tmp_path / "machine"))
    # The one network file system there is meant, without a name.
    assert main(["doctor", "--machine", machine, "--expect", "aws/fsx-lustre", "--fail-on", "never"]) == 0
    out = capsys.readouterr().out
    assert "a recorded machine, and nothing was measured" in out and "0 met, 0 below, 5 cannot" in out
    file = tmp_path / "bench.json"
    file.write_text('{"measured": [{"what": "read", "per": "node", "value": 120, "unit": "GiB/s", "how": "a bench"}]}')
    assert main(["doctor", "--machine", machine, "--expect", "aws/fsx-lustre", "--measured", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["expected"]
    assert [one["verdict"] for one in said["claims"] if one["way"] == "read" and one["measured"]] == ["met", "met"]
    assert any("more than the limit" in one["why"] for one in said["claims"])
    assert main(["doctor", "--machine", machine, "/dev/md0", "--expect", "aws/ebs"]) == 0
    assert "it claims no figure that can be measured" in capsys.readouterr().out


def test_what_a_bench_printed_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command's own JSON: what the doctor does not measure, it does."""
    (tmp_path / "data").mkdir()
    words = ["--size", "8MiB", "--flows", "1", "--seconds", "0.2", "--rounds", "1"]
    patterns = ["--pattern", "ingest", "--pattern", "sequential", "--pattern", "latency"]
    assert main(["bench", "run", str(tmp_path / "data"), *words, *patterns, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    best: dict[str, float] = {}
    for outcome in printed["outcomes"]:
        # Whatever the page cache of the machine that runs this did.
        outcome["cache"] = cache.state("dropped", left=0.0, memory=False, remote="")
        for figure in outcome["figures"]:
            best[figure["name"]] = max(figure["value"], best.get(figure["name"], 0.0))
    file = catalogue(tmp_path, CLAIM.format("throughput", 1, "MB/s"), CLAIM.format("iops", 1, "IOPS"), seen="unknown")
    told = ["--fail-on", "never", "--json", "--expect", "ours", "--catalogue", str(file)]
    told += ["--measured", str(tmp_path / "bench.json")]
    words = ["doctor", str(tmp_path), "--no-measure", *told]

    def held() -> dict[str, Any]:
        (tmp_path / "bench.json").write_text(json.dumps(printed))
        assert main(words) == 0
        said = json.loads(capsys.readouterr().out)["expected"]
        assert said["given_by"] == f"figures out of bench.json, a bench of {tmp_path / 'data'}"
        return {one["way"]: one for one in said["claims"]}

    claims = held()
    assert {way: one["measured"] for way, one in claims.items()} == {
        "read": pytest.approx(best["read"]), "write": pytest.approx(best["write"]),
        "iops": pytest.approx(best["reads"]),
    }  # fmt: skip
    assert all(one["verdict"] == "met" for one in claims.values()) and "fsync" in claims["write"]["how"]
    # Of nothing else on this machine, and of no other machine.
    machine = str(unpack("bare-metal-rdma", tmp_path / "machine"))
    for other in ({"hosts": ["elsewhere"]}, {"facts": {**printed["facts"], "mounted from": "elsewhere"}}, {"path": 1}):
        (tmp_path / "bench.json").write_text(json.dumps({**printed, **other}))
        assert main(words) == 2, other
        assert "of another storage" in capsys.readouterr().err
    for name in ("/dev/nvme0n1", "/scratch"):
        assert main(["doctor", "--machine", machine, name, *told]) == 2
        assert "of another storage" in capsys.readouterr().err
    (tmp_path / "bench.json").write_text(json.dumps({**printed, "hosts": []}))
    assert main(words) == 0
    assert "does not say on which machine" in json.loads(capsys.readouterr().out)["expected"]["given_by"]
    for outcome in printed["outcomes"]:
        outcome["nodes"] = 4
    assert held()["read"]["measured"] == pytest.approx(best["read"] / 4)
    # A page cache is nothing that a provider claims; what was written reached storage.
    for said in (cache.state(how, left=0.9, memory=False, remote="") for how in (cache.WARM, cache.DROPPED)):
        for outcome in printed["outcomes"]:
            outcome["cache"] = said
        claims = held()
        assert {way for way, one in claims.items() if one["measured"] is not None} == {"write"}
    for outcome in printed["outcomes"]:
        outcome["cache"] = cache.state(cache.DROPPED, left=None, memory=True, remote="")
    (tmp_path / "bench.json").write_text(json.dumps(printed))
    assert main(words) == 2
    assert "may have come out of memory" in capsys.readouterr().err
    for wrong in ("[1]", '[{"figures": 1}]', '[{"figures": [{"name": "read", "unit": "B/s", "value": NaN}]}]', "[]"):
        (tmp_path / "bench.json").write_text(f'{{"outcomes": {wrong}}}')
        assert main(words) == 2
        assert "nothing was measured in it" in capsys.readouterr().err


def test_a_bench_of_other_storage_is_told_from_one_of_this(tmp_path: Path) -> None:
    """Names of devices mean something on their own machine; exports and subsystems everywhere."""
    aws, rdma = (Machine(unpack(name, tmp_path / name)) for name in ("aws-ebs-and-instance-store", "bare-metal-rdma"))
    other, uri = ["elsewhere"], "nvme+tcp://10.0.0.1:4420/nqn.2026-01.example:pool?nsid=1"
    fsx = {"file system": "lustre", "mounted from": "10.0.3.20@tcp:/abcdef", "at": "/fsx"}
    raid = {"file system": "xfs", "mounted from": "/dev/md0", "at": "/scratch"}
    pool = {"name": "nvme0n1", "subsystem": "nqn.2026-01.example:pool", "size": "29.1 TiB"}
    for machine, name, fits, hosts, kind, path, said in (
        (aws, "/fsx", True, None, "folder", "/fsx/data", fsx),
        (aws, "/fsx", True, other, "folder", "/mnt/data", fsx | {"at": "/mnt"}),
        (aws, "/fsx", False, None, "folder", "/fsx", fsx | {"mounted from": "10.0.3.21@tcp:/abcdef"}),
        (aws, "/fsx", False, None, "block device", "/dev/md0", {}),
        (aws, "/dev/md0", True, None, "folder", "/scratch/data", raid),
        (aws, "/dev/md0", False, other, "folder", "/scratch/data", raid),
        (aws, "/dev/md0", False, None, "block device", "/dev/nvme1n1", {}),
        (aws, "/scratch", True, None, "block device", "/dev/md0", {}),
        (aws, "/scratch", False, None, "folder", "/fsx", fsx),
        (aws, "/scratch", True, None, "file as a device", "file:/scratch/image", {}),
        (aws, "/scratch", False, None, "file as a device", "file:/fsx/image", {}),
        (rdma, "/dev/nvme0n1", True, None, "block device", "/dev/disk/by-id/pool", pool),
        (rdma, "/dev/nvme0n1", True, None, "volume", "headrace://", {"on": "block:/dev/nvme0n1"}),
        (rdma, "/dev/nvme0n1", False, other, "block device", "/dev/nvme0n1", pool),
        (rdma, "/dev/nvme0n1", False, None, "block device", "/dev/nvme0n1", pool | {"subsystem": "nqn.2026-01.a:b"}),
        (rdma, "/dev/nvme0n1", False, None, "block device", "/dev/nvme0n1", pool | {"size": "1.0 TiB"}),
        (rdma, "/dev/nvme0n1", False, None, "namespace", uri, {}),
        (rdma, uri, True, other, "namespace", uri.replace("10.0.0.1", "10.0.0.2,10.0.0.3"), {}),
        (rdma, uri, True, None, "volume", "headrace://", {"on": uri}),
        (rdma, uri, False, None, "volume", "headrace://", {"on": f"{uri}, {uri}"}),
        (rdma, uri, False, None, "namespace", uri.replace("nsid=1", "nsid=2"), {}),
        (rdma, uri, False, None, "namespace", uri.replace("pool", "pond"), {}),
        (rdma, uri, False, None, "namespace", "nvme+tcp://[", {}),
        (rdma, uri, False, None, "", "", {}),
    ):  # fmt: skip
        facts = gather(machine)
        bench = Bench.of({"path": path, "kind": kind, "facts": said, "hosts": hosts or [socket.gethostname()]})
        refused = nullcontext() if fits else pytest.raises(UsageError, match="of another storage")
        with refused:
            bench.check(facts, named_storage(machine, facts, [name])[0], file="bench.json", live=True)
            assert ("by another node" in bench.told(live=True)) == bool(hosts)


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and exit status 2, before anything is looked at."""
    machine = str(unpack("gcp-hyperdisk-and-local-ssd", tmp_path / "machine"))
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "unit.json").write_text('{"measured": [{"what": "read", "value": 1, "unit": "TB"}]}')
    os.mkfifo(tmp_path / "pipe")
    base = ["doctor", "--machine", machine]
    for wrong in (
        ["--expect", "nobody"], ["--expect", "aws"], ["--measured", str(tmp_path / "list.json")],
        ["--expect", "gcp/hyperdisk-ml"],  # Two disks are such ones.
        *(["--expect", "aws/ebs", "--measured", str(tmp_path / f"{name}.json")] for name in
          ("list", "text", "empty", "unit", "away")),
        *(["--expect", "aws/ebs", option, str(file)] for option in ("--measured", "--catalogue")
          for file in (tmp_path / "pipe", "/dev/zero")),
        ["--html", str(tmp_path / "none" / "page.html")], ["--html", str(tmp_path)],
    ):  # fmt: skip
        assert main([*base, *wrong]) == 2, wrong
        out, err = capsys.readouterr()
        assert not out and err.startswith("headrace: error: ") and err.count("\n") == 1, err
    for command in (["plan", "--gpus", "8", "--parameters", "8B"], ["plan", "--job", str(tmp_path / "pipe")]):
        assert main([*command, "--html", str(tmp_path / "none" / "page.html")]) == 2
        assert "--html" in capsys.readouterr().err
    for command in (["plan", "--job"], ["plan", "--gpus", "8", "--config"], ["providers", "--catalogue"]):
        for file in ("pipe", "/dev/zero", "list.json/x"):
            assert main([*command, str(tmp_path / file)]) == 2
            assert "headrace: error: " in capsys.readouterr().err


def test_files_below_a_folder_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate, "SECONDS", 0.1)
    monkeypatch.setattr(rate, "FILE_MIN_BYTES", 4 << 20)
    found = rate.rate_of_files(str(tmp_path))
    assert found.read_bytes_per_s is None and "no file of 4.0 MiB or more" in (found.error or "")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "shard").write_bytes(os.urandom(5 << 20))
    (tmp_path / "hole").touch()
    os.truncate(tmp_path / "hole", 64 << 20)
    (tmp_path / "link").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "a" / "shard"):
        found = rate.rate_of_files(str(path))
        if found.error is None:
            assert "a file of 5.0 MiB" in found.how and (found.read_bytes_per_s or 0) > 1e5
        else:
            # Of memory, where this folder may lie.
            assert "O_DIRECT" in found.error
    apart = rate.rate_apart("x", "files", str(tmp_path))
    assert apart.name == "x" and "no file of 16.0 MiB" in (apart.error or "")


def test_what_this_node_held_back_is_not_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread of Python runs at a time, and one takes the answers of targets: what ends there is no fault of
    storage."""
    claimed = load_catalogue([catalogue(tmp_path, CLAIM.format("iops", 400_000, "IOPS"))]).find("ours/array")
    chosen: Any = SimpleNamespace(name="/data", kind="mount", size_bytes=None)
    for held_back, verdict in ((["iops"], "cannot be measured here"), (["read"], "below")):
        found: Any = SimpleNamespace(
            rate=rate.Rate(name="/data", reads_per_s=50_000, held_back=held_back), touches=(), targets=()
        )
        measured = expectation._measured(found, chosen)
        again = read_measured(expectation.to_record(measured), file="measured.json")
        for one in (*compare(claimed, measured), *compare(claimed, again)):
            assert (one.verdict, one.ratio) == (verdict, 0.125)
    monkeypatch.setattr(rate, "SECONDS", 0.05)
    with serving(NQN, "mem:64MiB") as target, open_device(target.uri(), read_only=True) as device:
        assert isinstance(device, NativeDevice)
        for limit, names in ((1e9, []), (0.0, ["read", "iops"])):
            monkeypatch.setattr(rate, "HOST_BUSY", limit)
            assert rate.rate_of_device("x", device).held_back == names


#: What each kind of file should be, to be spoilt.
FILES = {
    "--job": example(), "--catalogue": example_catalogue(),
    "--config": '{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, '
    '"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}',
    "--measured": '{"measured": [{"what": "read", "per": "node", "value": 11.2, "unit": "GB/s"}]}',
    "--nodes": '{"facts": {"host": {"identity": {"hostid": "x"}}}, "storage": [{"parts": ["eth0"]}]}',
}  # fmt: skip
_PIECES = st.one_of(
    st.binary(max_size=12),
    st.sampled_from([b"[" * 3000, b"{" * 3000, b"nan", b"1e999", b"-1", b"9" * 5000, b"\xff", b"\0", b"[[", b'"',
                     b"null", b"= ", b"1979-05-27", b"\xef\xbb\xbf", b"[]", b"{}", b"true"]),
)  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(option=st.sampled_from(sorted(FILES)), piece=_PIECES, data=st.data())
def test_spoilt_files_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, piece: bytes, data: st.DataObject
) -> None:
    text = FILES[option].encode()
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.sampled_from([begin, min(begin + 8, len(text)), len(text)]))
    file = tmp_path / "file"
    file.write_bytes(text[:begin] + piece + text[end:])
    (tmp_path / "machine").mkdir(exist_ok=True)
    doctor = ["doctor", "--machine", str(tmp_path / "machine")]
    words = {
        "--job": ["plan", "--json"], "--catalogue": ["providers", "--json"], "--config": ["plan", "--gpus", "8"],
        "--measured": [*doctor, "--expect", "aws/ebs"], "--nodes": doctor,
    }[option]  # fmt: skip
    status = main([*words, option, str(file)])
    out, err = capsys.readouterr()
    assert status in (0, 1, 2), err
    if status == 2:
        assert not out and err.count("\n") == 1 and len(err) < 2000
        assert err.startswith(("headrace: error: ", '{"error": ')), err
