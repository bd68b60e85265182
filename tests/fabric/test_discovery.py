"""Discovery of several real targets; what hostile ones say is for `native/host/tests/discovery.rs`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from headrace.device import open_device, parse_address
from headrace.errors import ConnectRefused, UsageError
from headrace.fabric import (
    DiscoveryRecord,
    ListenOptions,
    MemoryMedia,
    NamespaceOptions,
    SubsystemOptions,
    Target,
    TargetOptions,
    discover,
)
from headrace.testing.serve import free_port

A, B = "nqn.2026-01.io.example:a", "nqn.2026-01.io.example:b"


def options(*nqns: str) -> TargetOptions:
    return TargetOptions(
        listen=[ListenOptions(), ListenOptions()],
        subsystems=[
            SubsystemOptions(nqn=nqn, namespaces=[NamespaceOptions(media=MemoryMedia(size_bytes=1 << 20))])
            for nqn in nqns
        ],
    )


@pytest.fixture
def targets() -> Iterator[tuple[Target, Target]]:
    with Target(options(A, B)) as first, Target(options(B)) as second:
        yield first, second


def test_several_at_once_and_an_address_with_every_way(targets: tuple[Target, Target]) -> None:
    first, second = targets
    found = discover([first.addresses[0], second.addresses[0], first.addresses[0]])
    assert [controller.via for controller in found.controllers] == [None, None]
    assert not found.failures
    nvm = {(r.subnqn, r.traddr, int(r.trsvcid)) for r in found.records if r.subtype == "nvm"}
    assert nvm == {(A, *p) for p in first.addresses} | {(B, *p) for p in (*first.addresses, *second.addresses)}
    uris = found.subsystems()
    assert set(uris) == {A, B}
    address = parse_address(uris[A])
    assert sorted(address.portals) == sorted(first.addresses)  # type: ignore[union-attr]
    with open_device(uris[A]) as device:
        assert device.size_bytes == 1 << 20


def test_one_that_is_away_does_not_hide_the_other(targets: tuple[Target, Target]) -> None:
    dead = ("127.0.0.1", free_port())
    found = discover([dead, targets[0].addresses[0]])
    assert [failure.address for failure in found.failures] == [f"127.0.0.1:{dead[1]}"]
    assert found.records
    with pytest.raises(ConnectRefused):
        discover([dead])
    with pytest.raises(UsageError, match="nowhere"):
        discover([])
    with pytest.raises(UsageError, match="port"):
        discover([("127.0.0.1", 0)])


def test_what_cannot_be_connected_to_has_no_address() -> None:
    record = DiscoveryRecord(
        trtype="tcp", adrfam="ipv6", subtype="nvm", traddr="fe80::1", trsvcid="4420", subnqn="nqn.a b/c", controller=""
    )
    assert record.portal == "[fe80::1]:4420"
    assert record.uri == "nvme+tcp://[fe80::1]:4420/nqn.a%20b%2Fc?nsid=1"
    for change in ({"problem": "a wildcard"}, {"trtype": "rdma"}, {"subtype": "referral"}):
        assert DiscoveryRecord(**{**vars(record), **change}).uri is None


def test_the_command(targets: tuple[Target, Target]) -> None:
    places = [f"127.0.0.1:{target.addresses[0][1]}" for target in targets]
    dead = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "headrace", "discover", *places, dead, "--no-referrals"]
    answer = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
    assert f"headrace: {dead}: cannot connect" in answer.stderr
    found = json.loads(answer.stdout)
    assert [controller["address"] for controller in found["controllers"]] == places
    assert set(found["subsystems"]) == {A, B}
    assert all(record["problem"] is None for record in found["records"])
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    printed = answer.stdout.splitlines()
    lines = [line.split("\t") for line in printed if "\t" in line]
    assert printed[len(lines) :] == list(found["subsystems"].values())
    assert {line[3] for line in lines if line[1] == "nvm"} == {A, B}
    assert {line[4] for line in lines} == set(places)
    answer = subprocess.run(
        [sys.executable, "-m", "headrace", "discover", places[0], "--host-traddr", "127.0.0.3"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    answer = subprocess.run(
        [sys.executable, "-m", "headrace", "discover", places[0], "--host-traddr", "203.0.113.9"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode != 0
    assert "host_traddr" in answer.stderr and "Traceback" not in answer.stderr


def test_a_host_that_may_use_nothing_is_told_its_name() -> None:
    media = NamespaceOptions(media=MemoryMedia(size_bytes=1 << 20))
    one = SubsystemOptions(nqn=A, allow_hosts=["nqn.2026-01.test:somebody"], namespaces=[media])
    with Target(TargetOptions(subsystems=[one])) as target:
        command = [sys.executable, "-m", "headrace", "discover", f"127.0.0.1:{target.addresses[0][1]}"]
        env = {**os.environ, "HEADRACE_HOSTNQN": "nqn.2026-01.test:nobody"}
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert answer.returncode == 0
    assert "no subsystem is offered to this host, nqn.2026-01.test:nobody" in answer.stderr
