"""Every kind of device, one fixture: a test that takes `device` runs on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.device import NativeDevice, open_device
from headrace.errors import DeviceError
from headrace.fabric import MemoryMedia, NamespaceOptions, SubsystemOptions, Target, TargetOptions
from headrace.testing.loop import LoopDevice

SIZE_BYTES = 4 << 20

#: Gives a fresh, zeroed device of 4 MiB, with the logical block that was asked for.
Opener = Callable[[int], NativeDevice]


def _file(path: Path, engine: str, block_bytes: int) -> NativeDevice:
    return open_device(f"file:{path}?block={block_bytes}&create={SIZE_BYTES}&engine={engine}")


def _target(block_bytes: int) -> Target:
    media = MemoryMedia(size_bytes=SIZE_BYTES)
    namespaces = [NamespaceOptions(media=media, block_bytes=block_bytes)]
    return Target(
        TargetOptions(subsystems=[SubsystemOptions(nqn="nqn.2026-01.io.example:test", namespaces=namespaces)])
    )


@pytest.fixture(scope="session")
def io_uring(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Empty where io_uring is allowed, else why it is not: the usual container profile forbids it."""
    try:
        _file(tmp_path_factory.mktemp("io_uring") / "probe", "io_uring", 4096).close()
    except DeviceError as error:
        return str(error.found)
    return ""


@pytest.fixture(params=["mem", "file-pread", "file-io_uring", "block-pread", "block-io_uring", "nvme+tcp"])
def opener(request: pytest.FixtureRequest, tmp_path: Path, io_uring: str) -> Iterator[Opener]:
    if request.param.endswith("io_uring") and io_uring:
        pytest.skip(io_uring)
    if request.param.startswith("block") and LoopDevice.problem():
        pytest.skip(LoopDevice.problem())
    opened: list[NativeDevice] = []
    loops: list[LoopDevice] = []
    targets: list[Target] = []

    def open_one(block_bytes: int = 4096) -> NativeDevice:
        if request.param == "mem":
            device = open_device(f"mem:{SIZE_BYTES}?block={block_bytes}")
        elif request.param == "nvme+tcp":
            targets.append(_target(block_bytes))
            device = open_device(targets[-1].uri())
        elif request.param.startswith("block"):
            loops.append(LoopDevice(tmp_path / f"loop-{len(loops)}", SIZE_BYTES))
            engine = request.param.removeprefix("block-")
            device = open_device(f"{loops[-1].path}?block={block_bytes}&engine={engine}")
        else:
            device = _file(tmp_path / f"device-{len(opened)}", request.param.removeprefix("file-"), block_bytes)
        opened.append(device)
        return device

    yield open_one
    for device in opened:
        device.close()
    for target in targets:
        target.stop()
    for loop in loops:
        loop.close()


@pytest.fixture
def device(opener: Opener) -> NativeDevice:
    return opener(4096)
