"""Several paths to one namespace, and the traffic classes of a device, from Python."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest

from headrace.device import NativeDevice, open_device, submit_write
from headrace.errors import ConnectRefused, DeviceClosed, UsageError
from headrace.fabric import (
    FileMedia,
    ListenOptions,
    MemoryMedia,
    NamespaceOptions,
    SubsystemOptions,
    Target,
    TargetOptions,
)
from headrace.testing.serve import free_port
from tests.device.test_nvme_tcp import BLOCK, NQN, batch


@pytest.fixture
def ports() -> Iterator[list[int]]:
    options = TargetOptions(
        listen=[ListenOptions(port=0), ListenOptions(port=0)],
        subsystems=[
            SubsystemOptions(nqn=NQN, namespaces=(NamespaceOptions(media=MemoryMedia(size_bytes=8 << 20)),)),
        ],
    )
    with Target(options) as target:
        yield [port for _, port in target.addresses]


def uri(ports: list[int], more: str = "") -> str:
    portals = ",".join(f"127.0.0.1:{port}" for port in ports)
    return f"nvme+tcp://{portals}/{NQN}?nsid=1{more}"


def all_ready(device: NativeDevice) -> None:
    deadline = time.monotonic() + 20
    while not all(path.usable for path in device.paths()):
        assert time.monotonic() < deadline, device.paths()
        time.sleep(0.02)


def test_io_goes_over_all_paths_and_each_tells_its_share(ports: list[int]) -> None:
    with open_device(uri(ports, "&policy=round-robin")) as device:
        assert isinstance(device, NativeDevice)
        all_ready(device)
        for row in range(16):
            device.write(row * BLOCK, bytes([row]) * BLOCK)
        device.flush()
        back = bytearray(BLOCK)
        for row in range(16):
            device.read_into(row * BLOCK, back)
            assert back == bytes([row]) * BLOCK
        paths = device.paths()
        assert [path.portal for path in paths] == [f"127.0.0.1:{port}" for port in ports]
        for path in paths:
            assert (path.state, path.why, path.reads, path.writes) == ("ready", "", 8, 8)
            assert (path.read_bytes, path.losses, path.under_way) == (8 * BLOCK, 0, 0)
            assert 0 < path.latency.p50_s <= path.latency.p99_s <= path.latency.max_s
            assert path.latency.count >= 16
        said = device.describe()
        assert [path["portal"] for path in said["paths"]] == [path.portal for path in paths]
        assert (said["policy"], said["stalled"], said["unsettled"]) == ("round-robin", False, 0)
        assert device.unsettled() == [] and device.settle(0) == 0


def test_a_path_where_nobody_listens_says_why(ports: list[int]) -> None:
    with open_device(uri([1, ports[0]])) as device:
        assert isinstance(device, NativeDevice)
        device.write(0, bytes(BLOCK))
        dead, alive = device.paths()
        assert not dead.usable and "cannot connect" in dead.why and alive.usable
        device.reconnect()
        device.write(0, bytes(BLOCK))


def test_classes_of_traffic_are_views_of_one_device(ports: list[int]) -> None:
    with open_device(uri(ports[:1])) as device:
        assert isinstance(device, NativeDevice)
        checkpoint, metadata = device.lane("checkpoint"), device.lane("metadata")
        checkpoint.write(0, b"c" * BLOCK)
        metadata.write(BLOCK, b"m" * BLOCK)
        back = bytearray(2 * BLOCK)
        device.read_into(0, back)
        assert back == b"c" * BLOCK + b"m" * BLOCK
        submit_write([device, checkpoint], batch(2), [bytes(2 * BLOCK)]).wait(20)
        assert metadata.uri == device.uri and metadata.describe()["lane"] == "metadata"
        assert device.describe()["lanes"] == {"feed": 1, "checkpoint": 1, "metadata": 1}
        checkpoint.close()
        checkpoint.write(0, b"d" * BLOCK)
        other = pickle.loads(pickle.dumps(checkpoint))
        other.read_into(0, back)
        assert back[:BLOCK] == b"d" * BLOCK and other.describe()["lane"] == "checkpoint"
        other.lane("feed").flush()
        other._device.close()
        with pytest.raises(UsageError, match="checkpoint"):
            device.lane("bulk")  # type: ignore[arg-type]
    with pytest.raises(DeviceClosed):
        checkpoint.write(0, bytes(BLOCK))


def test_other_devices_have_no_paths_and_one_lane() -> None:
    with open_device("mem:1MiB") as device:
        assert isinstance(device, NativeDevice)
        assert device.lane("metadata") is device
        with pytest.raises(UsageError, match="NVMe"):
            device.paths()
        with pytest.raises(UsageError, match="NVMe"):
            device.unsettled()


def test_another_host_waits_for_a_lost_target_as_io_does_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    media = FileMedia(path=str(tmp_path / "image"), size_bytes=8 << 20, create=True)
    subsystem = SubsystemOptions(nqn=NQN, namespaces=(NamespaceOptions(media=media),))
    options = TargetOptions(listen=[ListenOptions(port=port)], subsystems=[subsystem])
    back = threading.Event()

    def comes_back() -> None:
        time.sleep(0.5)
        back.set()
        targets.enter_context(Target(options))

    with ExitStack() as targets, ExitStack() as hosts:
        with Target(options):
            patient = hosts.enter_context(open_device(uri([port])))
            hasty = hosts.enter_context(open_device(uri([port], "&loss_timeout=0.1")))
        assert isinstance(patient, NativeDevice) and isinstance(hasty, NativeDevice)
        with pytest.raises(ConnectRefused):
            hasty.as_host(uuid4())
        with monkeypatch.context() as patch, pytest.raises(ConnectRefused):
            patch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
            patient.as_host(uuid4(), wait=False)
        thread = threading.Thread(target=comes_back)
        thread.start()
        with patient.as_host(uuid4()) as other:
            assert back.is_set()
            other.write(0, b"o" * BLOCK)
        thread.join()
