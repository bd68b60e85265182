"""The native engine against the reference engine, on random batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.device import (
    Batch,
    BlockDevice,
    Buffer,
    NativeDevice,
    open_device,
    read_batch,
    reference,
    submit_read,
    submit_write,
    write_batch,
)
from headrace.device.protocol import U32
from headrace.errors import ChecksumMismatch, DeviceTimeout, UsageError
from headrace.fabric import MemoryMedia, NamespaceOptions, SubsystemOptions, Target, TargetOptions
from headrace.testing import MemoryDevice

SIZE = 1 << 20


class Plain:
    """A native device without its handle, so that the reference engine serves it."""

    def __init__(self, device: NativeDevice) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, int, int]:
    """A batch for two members of 1 MiB, its logical block, and the buffer bytes that it needs.

    Segments do not overlap on the members, nor in the buffer; they often touch, so that they can be merged.
    """
    block = draw(st.sampled_from([512, 4096]))
    checksum_block = draw(st.sampled_from([512, 4096, 65536, 12288]))
    if max(block, checksum_block) % min(block, checksum_block):
        checksum_block = 4096
    place = [0, 0]
    rows: list[tuple[int, ...]] = []
    into = draw(st.integers(0, 9))
    for _ in range(draw(st.integers(0, 12))):
        member = draw(st.integers(0, 1))
        offset = place[member] + draw(st.sampled_from([0, 0, 1, 7])) * block
        if offset >= SIZE:
            continue
        longest = min(SIZE - offset, draw(st.sampled_from([1, block, 4 * block, 200_000, SIZE])))
        length = draw(st.one_of(st.integers(0, longest), st.just(longest)))
        skip = draw(st.one_of(st.just(0), st.integers(0, length)))
        take = draw(st.one_of(st.just(length - skip), st.integers(0, length - skip)))
        birth, first = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**40))
        rows.append((member, offset, length, skip, take, into, birth, first))
        place[member] = offset + -(-length // block) * block
        into += length + draw(st.sampled_from([0, 0, 3]))
    columns = np.array(rows, np.object_).reshape(len(rows), 8)
    u64 = [columns[:, i].astype(np.uint64) for i in range(8)]
    batch = Batch(
        member=columns[:, 0].astype(np.uint32), offset=u64[1], length=u64[2], skip=u64[3], take=u64[4],
        buffer_offset=u64[5], birth=u64[6], first_block=u64[7], checksum_block_bytes=checksum_block,
        volume_id=draw(st.binary(min_size=16, max_size=16)),
    )  # fmt: skip
    return batch, block, into


def _read(devices: list[BlockDevice], batch: Batch, room: int, checksums: U32 | None) -> bytes:
    buffer = np.full(room, 0xCD, np.uint8)
    read_batch(devices, batch, [buffer], checksums)
    return buffer.tobytes()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(batches(), st.integers(0, 2**32))
def test_native_and_reference_agree(drawn: tuple[Batch, int, int], seed: int) -> None:
    batch, block, room = drawn
    data = np.random.default_rng(seed).integers(0, 256, room, np.uint8)
    native: list[BlockDevice] = [open_device(f"mem:{SIZE}?block={block}") for _ in range(2)]
    fakes: list[BlockDevice] = [MemoryDevice(SIZE, block_bytes=block) for _ in range(2)]
    sums: list[U32] = []
    for devices in (native, fakes):
        found = np.zeros(batch.checksum_count, np.uint32)
        write_batch(devices, batch, [data], found)
        sums.append(found)
    assert sums[0].tolist() == sums[1].tolist()
    for mine, theirs in zip(native, fakes, strict=True):
        whole = bytearray(SIZE)
        mine.read_into(0, whole)
        assert whole == theirs.data  # type: ignore[attr-defined]
    for checksums in (None, sums[0]):
        assert _read(native, batch, room, checksums) == _read(fakes, batch, room, checksums)
        # The same devices under the reference engine: the oracle sees what the native engine wrote.
        assert _read([Plain(d) for d in native], batch, room, checksums) == _read(native, batch, room, checksums)  # type: ignore[arg-type]
    for device in native:
        device.close()


@pytest.fixture(scope="module")
def served() -> Iterator[list[tuple[int, str, str]]]:
    """(logical block, address, address) of two namespaces of 1 MiB, for both logical blocks."""
    targets = []
    for block in (512, 4096):
        spaces = [NamespaceOptions(nsid=nsid, block_bytes=block, media=MemoryMedia(size_bytes=SIZE)) for nsid in (1, 2)]
        nqn = f"nqn.2026-01.io.example:block-{block}"
        options = TargetOptions(
            # Small, so that commands are split, and data come with capsules and without.
            mdts_bytes=32 << 10,
            in_capsule_bytes=8 << 10,
            subsystems=[SubsystemOptions(nqn=nqn, namespaces=spaces)],
        )
        targets.append((block, Target(options)))
    yield [(block, target.uri(nsid=1), target.uri(nsid=2)) for block, target in targets]
    for _, target in targets:
        target.stop()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(batches(), st.integers(0, 2**32), st.booleans())
def test_the_network_changes_nothing(
    served: list[tuple[int, str, str]], drawn: tuple[Batch, int, int], seed: int, digests: bool
) -> None:
    batch, block, room = drawn
    data = np.random.default_rng(seed).integers(0, 256, room, np.uint8)
    uris = next(uris for size, *uris in served if size == block)
    more = "&hdgst=1&ddgst=1" if digests else ""
    remote: list[BlockDevice] = [open_device(uri + more) for uri in uris]
    local: list[BlockDevice] = [open_device(f"mem:{SIZE}?block={block}") for _ in range(2)]
    for device in remote:
        device.write(0, bytes(SIZE))
    sums = [np.zeros(batch.checksum_count, np.uint32) for _ in range(2)]
    for devices, found in ((remote, sums[0]), (local, sums[1])):
        write_batch(devices, batch, [data], found)
    assert sums[0].tolist() == sums[1].tolist()
    for checksums in (None, sums[0]):
        assert _read(remote, batch, room, checksums) == _read(local, batch, room, checksums)
    for mine, theirs in zip(remote, local, strict=True):
        whole, expected = bytearray(SIZE), bytearray(SIZE)
        mine.read_into(0, whole)
        theirs.read_into(0, expected)
        assert whole == expected
    for device in (*remote, *local):
        device.close()


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(batches(), st.data())
def test_one_flipped_bit_is_found_and_named(drawn: tuple[Batch, int, int], data: st.DataObject) -> None:
    batch, block, room = drawn
    if not batch.length.sum():
        return
    device: list[BlockDevice] = [open_device(f"mem:{SIZE}?block={block}") for _ in range(2)]
    sums = np.zeros(batch.checksum_count, np.uint32)
    write_batch(device, batch, [np.zeros(room, np.uint8)], sums)
    segment = data.draw(st.sampled_from([i for i in range(len(batch)) if batch.length[i]]))
    at = data.draw(st.integers(0, int(batch.length[segment]) - 1))
    place = int(batch.offset[segment]) + at
    member = device[int(batch.member[segment])]
    lba = bytearray(block)
    member.read_into(place - place % block, lba)
    lba[place % block] ^= 1 << data.draw(st.integers(0, 7))
    member.write(place - place % block, lba)
    transfer = submit_read(device, batch, [np.zeros(room, np.uint8)], sums)
    with pytest.raises(ChecksumMismatch) as caught:
        transfer.wait(20)
    assert transfer.failed_segment == segment
    number = int(batch.first_block[segment]) + at // batch.checksum_block_bytes
    assert f"segment {segment}, member {batch.member[segment]}, " in str(caught.value)
    assert f"block {number}:" in str(caught.value)
    with pytest.raises(ChecksumMismatch):
        read_batch([Plain(d) for d in device], batch, [np.zeros(room, np.uint8)], sums)  # type: ignore[arg-type, list-item]


def test_identity_is_part_of_the_checksum() -> None:
    device = open_device("mem:1MiB")
    batch = Batch(
        member=np.zeros(1, np.uint32), offset=np.zeros(1, np.uint64), length=np.array([10000], np.uint64),
        buffer_offset=np.zeros(1, np.uint64), birth=np.array([5], np.uint64), first_block=np.array([2], np.uint64),
        checksum_block_bytes=4096, volume_id=b"v" * 16,
    )  # fmt: skip
    sums = np.zeros(3, np.uint32)
    write_batch([device], batch, [bytes(10000)], sums)
    buffer = np.zeros(10000, np.uint8)
    read_batch([device], batch, [buffer], sums)
    for other in (
        replace(batch, birth=np.array([6], np.uint64)),
        replace(batch, first_block=np.array([3], np.uint64)),
        replace(batch, volume_id=b"w" * 16),
    ):
        with pytest.raises(ChecksumMismatch):
            read_batch([device], other, [buffer], sums)


def _rows(**changes: Any) -> Batch:
    columns: dict[str, Any] = {
        "member": [0, 1], "offset": [0, 4096], "length": [4096, 5000], "buffer_offset": [0, 4096], "buffer": [0, 0],
        "skip": [0, 0], "take": [4096, 5000], "birth": [0, 0], "first_block": [0, 0],
    }  # fmt: skip
    whole = {name: changes.pop(name) for name in list(changes) if name not in columns}
    columns.update(changes)
    arrays = {n: np.array(c, np.uint32 if n in ("member", "buffer") else np.uint64) for n, c in columns.items()}
    return Batch(**arrays, **whole)


@pytest.mark.parametrize("kind", ["native", "reference"])
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"member": [0, 2]}, "no such member"),
        ({"buffer": [0, 1]}, "no such buffer"),
        ({"offset": [0, 100]}, "the offset is not aligned"),
        ({"offset": [0, 1 << 20]}, "the range leaves the device"),
        ({"offset": [0, 2**64 - 4096]}, "the range leaves the device"),
        ({"length": [4096, 2**64 - 1]}, "the range leaves the device"),
        ({"skip": [0, 1]}, "the wanted part leaves the segment"),
        ({"skip": [0, 2**64 - 1]}, "the wanted part leaves the segment"),
        ({"buffer_offset": [0, 6000]}, "the segment leaves its buffer"),
        ({"buffer_offset": [0, 2**64 - 1]}, "the segment leaves its buffer"),
    ],
)
def test_what_cannot_be_is_refused_with_the_same_words(kind: str, changes: dict[str, Any], what: str) -> None:
    devices: list[BlockDevice] = [open_device(f"mem:{SIZE}") for _ in range(2)]
    if kind == "reference":
        devices = [MemoryDevice(SIZE) for _ in range(2)]
    batch = _rows(**changes)
    for submit, buffer in ((submit_read, np.zeros(10000, np.uint8)), (submit_write, bytes(10000))):
        if submit is submit_write and "skip" in changes:
            continue
        with pytest.raises(UsageError, match=what) as caught:
            submit(devices, batch, [buffer])
        assert caught.value.where is not None and caught.value.where.startswith("segment 1")


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_buffers_and_checksums_that_cannot_be(kind: str) -> None:
    devices: list[BlockDevice] = [open_device(f"mem:{SIZE}") for _ in range(2)]
    if kind == "reference":
        devices = [MemoryDevice(SIZE) for _ in range(2)]
    room: Buffer = np.zeros(10000, np.uint8)
    good = _rows(checksum_block_bytes=4096)
    for buffer in (bytes(10000), np.zeros((10000, 2), np.uint8)[:, 0], 5):
        with pytest.raises(UsageError, match="buffer"):
            submit_read(devices, good, [buffer])  # type: ignore[list-item]
    for sums, what in (
        (np.zeros(2, np.uint32), "wrong length"),
        (np.zeros(3, np.uint64), "cannot be used"),
        (np.zeros(6, np.uint32)[::2], "cannot be used"),
    ):
        with pytest.raises(UsageError, match=what):
            submit_read(devices, good, [room], sums)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=what):
            submit_write(devices, good, [room], sums)  # type: ignore[arg-type]
    frozen = np.zeros(3, np.uint32)
    frozen.flags.writeable = False
    with pytest.raises(UsageError, match="cannot be used"):
        submit_write(devices, good, [room], frozen)
    with pytest.raises(UsageError, match="block size"):
        submit_read(devices, _rows(), [room], np.zeros(3, np.uint32))
    for block, what in ((6000, "fit together"), (32 << 20, "too long")):
        bad = _rows(checksum_block_bytes=block)
        with pytest.raises(UsageError, match=what):
            submit_read(devices, bad, [room], np.zeros(bad.checksum_count, np.uint32))


def test_a_read_only_member_is_not_written_to(tmp_path: Any) -> None:
    path = tmp_path / "disk"
    path.write_bytes(bytes(SIZE))
    devices = [open_device(f"mem:{SIZE}"), open_device(f"file:{path}", read_only=True)]
    with pytest.raises(UsageError, match="member 1"):
        submit_write(devices, _rows(), [bytes(10000)])
    write_batch(devices, _rows(member=[0, 0]), [bytes(10000)])


def test_wait_has_a_deadline_and_can_be_repeated() -> None:
    device = open_device("mem:256MiB")
    count = 60_000
    batch = Batch(
        member=np.zeros(count, np.uint32), offset=np.arange(count, dtype=np.uint64) * np.uint64(4096),
        length=np.full(count, 4000, np.uint64), buffer_offset=np.zeros(count, np.uint64), checksum_block_bytes=4096,
    )  # fmt: skip
    sums = np.zeros(count, np.uint32)
    write_batch([device], batch, [bytes(4000)], sums)
    transfer = submit_read([device], batch, [np.zeros(4000, np.uint8)], sums)
    with pytest.raises(DeviceTimeout, match="did not end in time"):
        transfer.wait(0)
    transfer.wait(60)
    assert transfer.done()
    transfer.wait(0)
    assert transfer.failed_segment is None


def test_reference_module_is_the_oracle_for_crc32c() -> None:
    from headrace.device import crc32c

    data = np.random.default_rng(3).integers(0, 256, 200_001, np.uint8)
    assert crc32c(data) == reference.crc32c(data) == crc32c(data[1000:], crc32c(data[:1000]))
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0
