"""Cases of `test_kernel_block.py`, run in the guest by the Python of the machine outside.

Each prints `CASE name ok`, or what went wrong. `OUTSIDE name` has something done outside (`guest.py`).
"""

from __future__ import annotations

import hashlib
import mmap
import multiprocessing
import os
import subprocess
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from examples.nfs_cure import inside
from headrace.device import (
    KernelReservations,
    NativeDevice,
    NvmeTcpAddress,
    ReservationType,
    kernel_reservations,
    new_key,
    open_device,
    parse_address,
)
from headrace.doctor import rate
from headrace.doctor.examine import examine
from headrace.doctor.machine import Machine
from headrace.doctor.probe import probe_target
from headrace.doctor.touch import touch_disk
from headrace.errors import (
    CommandFailed,
    DeviceGone,
    HeadraceError,
    ReservationConflict,
    SessionLost,
    UsageError,
    WriterActive,
)
from headrace.volume import Volume

BLOCK = 4096
SHARED = ReservationType.WRITE_EXCLUSIVE_REGISTRANTS
#: What the tests outside know, too.
KEY = 0x1234
DATA = np.random.default_rng(42).integers(0, 256, 3 << 20, np.uint8)
NQN, RDMA_NQN = os.environ["NQN"], os.environ["RDMA_NQN"]

_cases: list[Callable[[], None]] = []
#: The device that is connected over TCP, for cases that go on with it.
tcp: NativeDevice


def case(function: Callable[[], None]) -> Callable[[], None]:
    _cases.append(function)
    return function


def run(*command: str) -> str:
    """A program of the guest."""
    done = subprocess.run(
        ["chroot", "/proc/1/root", *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def outside(name: str) -> None:
    print(f"OUTSIDE {name}", flush=True)
    until(lambda: Path(f"/mnt/{name}.done").exists(), 60, f"nobody did {name}")


def until(true: Callable[[], bool], seconds: float, otherwise: str) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, otherwise
        time.sleep(0.05)


def connect(transport: str, address: str, port: str, nqn: str) -> str:
    """`nvme connect`; the path of the namespace's disk."""
    options = ["--nr-io-queues=1", "--keep-alive-tmo=5", "--reconnect-delay=1", "--ctrl-loss-tmo=120"]
    run("nvme", "connect", "-t", transport, "-a", address, "-s", port, "-n", nqn, *options)
    found: list[str] = []

    def look() -> bool:
        for folder in Path("/sys/class/nvme-subsystem").iterdir():
            if (folder / "subsysnqn").read_text().strip() == nqn:
                found[:] = [f"/dev/{disk.name}" for disk in folder.glob("nvme*n1") if "c" not in disk.name]
        return bool(found) and Path(found[0]).is_block_device()

    until(look, 60, f"no disk of {nqn}")
    return found[0]


def kernel(device: NativeDevice) -> KernelReservations:
    kept = device.reservations
    assert isinstance(kept, KernelReservations)
    return kept


def bytes_of(device: NativeDevice, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    device.read_into(offset, buffer)
    return bytes(buffer)


def write_and_compare(device: NativeDevice, offset: int) -> None:
    """Through memory that is not aligned."""
    memory = np.zeros(len(DATA) + 1, np.uint8)
    memory[1:] = DATA
    device.write(offset, memory[1:])
    memory[:] = 0
    device.read_into(offset, memory[1:])
    assert hashlib.sha256(memory[1:]).digest() == hashlib.sha256(DATA).digest()
    device.flush()


def volume_on(path: str) -> None:
    data = DATA.tobytes()
    with Volume.create(path, name="in the guest") as volume, volume.session(run_id="guest") as session:
        assert session.fence == "node"
        with session.transaction() as tx:
            tx.put("numbers", data)
            tx.put("more", data[:5000])
    with Volume.open(path) as volume:
        assert volume.info().fence == "node"
        assert volume.read("numbers") == data and volume.read("more") == data[:5000]


def clear(device: NativeDevice) -> None:
    """Nobody is registered any more; the session of a volume stays so."""
    kept = kernel(device)
    own = kept.report().of(kept.hostid or uuid.UUID(int=0))
    key = new_key()
    kept.register(key, replace=own.key if own else None)
    kept.clear(key)
    assert kept.report().registered == 0


def medium() -> mmap.mmap:
    """What lies behind the kernel's target, past the page cache, which it does not write through."""
    disk = os.open("/dev/nullb1", os.O_RDONLY | os.O_DIRECT)
    size = os.lseek(disk, 0, os.SEEK_END)
    found = mmap.mmap(-1, size)
    assert sum(os.preadv(disk, [memoryview(found)[at : at + (8 << 20)]], at) for at in range(0, size, 8 << 20)) == size
    os.close(disk)
    return found


def same(before: mmap.mmap, after: mmap.mmap) -> None:
    if not np.array_equal(np.frombuffer(before, np.uint64), np.frombuffer(after, np.uint64)):
        moved = np.flatnonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8))
        raise AssertionError(f"{len(moved)} bytes, from {moved[0]} to {moved[-1]}")


def conflicts() -> int:
    """Commands that the kernel's target has refused so, as its trace tells."""
    return run("cat", "/sys/kernel/tracing/trace").count("nvmet_req_complete:")


def stays_failed(device: NativeDevice, kind: type[Exception], says: str) -> None:
    """What writes fails from now on, flushes too; reads go on."""
    for act in (lambda: device.write(0, bytes(BLOCK)), device.flush, lambda: device.deallocate(0, BLOCK)):
        with pytest.raises(kind, match=f"^an earlier {says}"):
            act()
    bytes_of(device, 0, BLOCK)


@case
def over_tcp() -> None:
    global tcp
    tcp = open_device(connect("tcp", "10.0.2.2", os.environ["PORT"], NQN))
    said = tcp.describe()
    print(said)
    assert (said["transport"], said["direct"], said["writes_through"]) == ("block", True, True)
    assert said["engine"] == "io_uring" and said["kernel"]["subsysnqn"] == NQN
    assert [(path["transport"], path["state"]) for path in said["kernel"]["paths"]] == [("tcp", "live")]
    assert (tcp.block_bytes, tcp.volatile_cache, said["reservations"]["problem"]) == (BLOCK, False, "")
    write_and_compare(tcp, 1 << 20)
    outside("bytes")


@case
def volume_over_tcp() -> None:
    volume_on(tcp.uri)
    outside("volume")


@case
def volume_taken_over() -> None:
    """By a session outside, over NVMe/TCP, whose host is not this node."""
    with Volume.open(tcp.uri, write=True) as volume:
        first = volume.session(run_id="guest")
        # The same node again: the key of the session before is replaced by its successor's.
        with pytest.raises(WriterActive, match="a process of this machine"):
            Volume.open(tcp.uri, write=True).session(run_id="guest", takeover="now")
        with first.transaction() as tx:
            tx.put("before", DATA.tobytes())
        outside("take-volume")
        with pytest.raises(SessionLost), first.transaction() as tx:
            tx.put("late", DATA.tobytes())
        with suppress(HeadraceError):
            first.close()
    outside("volume-is-whole")


@case
def rank_joins() -> None:
    """Another process of the job, on a node that has the disk from its kernel. After a takeover none joins."""
    with Volume.open(tcp.uri, write=True) as volume:
        session = volume.session(run_id="guest", takeover="now")
        with Volume.open(tcp.uri, write=True, ticket=session.ticket) as rank, session.transaction() as tx:
            tx.accept(rank.write_grant(tx.allocate("granted", len(DATA)), DATA))
            assert rank._joined is not None and rank._joined[1][0].describe()["guard"]["state"] == "passed"
        assert volume.read("granted") == DATA.tobytes()
        outside("take-volume-again")
        with pytest.raises(SessionLost), Volume.open(tcp.uri, write=True, ticket=session.ticket):
            pass
        with suppress(HeadraceError):
            session.close()


@case
def forgotten() -> None:
    """Nobody holds any more, as when a target forgot while the kernel reconnected: a session that does nothing ends."""
    with Volume.open(tcp.uri, write=True) as volume:
        session = volume.session(run_id="guest", takeover="now")
        outside("clear")
        until(lambda: session._lost is not None, 30, "nobody asks")
        with pytest.raises(SessionLost, match=r"the reservation of this session is gone.*held by nobody"):
            session.check()
        with suppress(HeadraceError):
            session.close()


@case
def reserved() -> None:
    clear(tcp)
    kept = kernel(tcp)
    assert SHARED in kept.capabilities.types and kept.capabilities.persist
    kept.register(KEY)
    kept.acquire(KEY, SHARED)
    report = kept.report()
    own = report.of(kept.hostid or uuid.UUID(int=0))
    assert own is not None and (own.key, own.holds) == (KEY, True), report
    assert report.type is SHARED and report.persistent
    # The kernel's own way to ask tells keys, and the same.
    node = os.open(tcp.describe()["address"], os.O_RDONLY)
    keys = kernel_reservations._report_keys(node)
    os.close(node)
    assert [(found.key, found.holds, found.hostid.int) for found in keys.registrants] == [(KEY, True, 0)], keys
    assert (keys.type, keys.registered, keys.generation) == (SHARED, 1, report.generation)
    kept.join(KEY, SHARED)
    tcp.guard_writes(KEY, SHARED)
    tcp.write(0, b"h" * BLOCK)
    assert tcp.describe()["guard"]["state"] == "passed"
    outside("refused")


@case
def preempted() -> None:
    outside("preempt")
    with pytest.raises(ReservationConflict, match=r"^write failed: this node is fenced"):
        tcp.write(0, b"z" * BLOCK)
    stays_failed(tcp, ReservationConflict, "write failed: this node is fenced")
    with pytest.raises(ReservationConflict, match=r"not registered; held by 0x0*5678"):
        tcp.check_guard()
    outside("nothing-of-it")


@case
def late_node() -> None:
    """The session of the key was taken over from: its node that comes only now must not stay registered."""
    with pytest.raises(ReservationConflict, match="the session was taken over from"):
        kernel(tcp).join(KEY, SHARED)
    outside("only-the-other")


@case
def taken_over() -> None:
    kept = kernel(tcp)
    (victim,) = kept.report().holders
    own = new_key()
    kept.register(own)
    kept.preempt(own, victim.key, SHARED)
    report = kept.report()
    assert [found.key for found in report.registrants] == [own] and report.type is SHARED, report
    with open_device(tcp.uri) as again:
        again.guard_writes(own, SHARED)
        again.write(0, b"t" * BLOCK)
    outside("shut-out")
    kept.release(own, SHARED)
    kept.unregister(own)
    assert kept.report().registered == 0


@case
def partition() -> None:
    disk = Path(tcp.describe()["kernel"]["name"])
    subprocess.run(["addpart", f"/dev/{disk}", "1", "2048", "4096"], check=True)
    try:
        with open_device(f"/dev/{disk}p1") as device:
            assert device.size_bytes == 4096 * 512
            assert device.describe()["reservations"]["problem"].startswith(f"a partition of {disk}")
            for act in (device.reservations.report, lambda: device.reservations.register(KEY)):
                with pytest.raises(UsageError, match=f"a partition cannot be reserved.*found a partition of {disk}"):
                    act()
    finally:
        subprocess.run(["delpart", f"/dev/{disk}", "1"], check=True)


@case
def over_rdma() -> None:
    path = connect("rdma", "10.0.2.15", "4420", RDMA_NQN)
    with open_device(path) as device:
        assert [found["transport"] for found in device.describe()["kernel"]["paths"]] == ["rdma"]
        write_and_compare(device, 1 << 20)
    volume_on(path)


@case
def doctor() -> None:
    """What `headrace doctor` sees of both connections, and of the namespace behind one of them when it is touched."""
    paths = [tcp.describe()["kernel"]["name"], Path(connect("rdma", "10.0.2.15", "4420", RDMA_NQN)).name]
    found = examine(Machine(), [f"/dev/{name}" for name in paths], measure=False)
    print(found.sentence, *found.findings, sep="\n")
    assert [one.verdict.word for one in found.storage] == ["fabric-visible", "fabric-visible"]
    assert [one.verdict.why.partition(";")[0] for one in found.storage] == ["transport tcp", "transport rdma"]
    by_transport = {one.transport: one for one in found.facts.nvme.controllers}
    assert set(by_transport) == {"tcp", "rdma"}
    for one in by_transport.values():
        assert (one.state, one.queues, one.queue_size, one.keep_alive_s) == ("live", 2, 128, 5)
        assert (one.ctrl_loss_s, one.reconnect_delay_s, one.authenticates) == (120, 1, False)
    assert by_transport["tcp"].part("traddr") == "10.0.2.2" and by_transport["rdma"].part("traddr") == "10.0.2.15"
    assert all(path.ana == "optimized" for one in found.facts.nvme.namespaces for path in one.paths)
    # The way there, and soft RoCE on it.
    assert found.storage[0].parts >= {"eth0", by_transport["tcp"].name}
    assert found.storage[1].parts >= {"rxe0", by_transport["rdma"].name}
    (port,) = found.facts.rdma.devices[0].ports
    assert (port.state, port.link_layer, port.interfaces) == ("ACTIVE", "Ethernet", ("eth0",))
    said = {f"{one.id} {one.about[0]}" for one in found.findings}
    assert said >= {"rdma-software rxe0", f"nvme-one-path {paths[0]}", f"nvme-one-path {paths[1]}"}, said
    touched = touch_disk(f"/dev/{paths[0]}")
    assert touched.outcome == "answered" and touched.fence == "node" and touched.latency is not None, touched
    # How much the kernel's device delivers, and whether this kernel really has io_uring.
    with pytest.MonkeyPatch.context() as patch, open_device(f"/dev/{paths[0]}", read_only=True) as device:
        patch.setattr(rate, "SECONDS", 0.2)
        delivered = rate.rate_of_device("x", device)
    assert (delivered.read_bytes_per_s or 0) > 1e6 and (delivered.reads_per_s or 0) > 10, delivered
    assert found.facts.limits.io_uring == "allowed", found.facts.limits
    # The kernel's own target names the portal that it was asked by, and the one over RDMA, which is not ours to try.
    address = parse_address(f"nvme+tcp://10.0.2.15:4421/{RDMA_NQN}")
    assert isinstance(address, NvmeTcpAddress)
    probe = probe_target(address)
    assert probe.error is None and (probe.model, probe.advertised, probe.unusable) == ("Linux", (), ()), probe


@case
def fenced_over_rdma() -> None:
    """The kernel's host over RDMA, and one of ours over TCP, at one namespace of the kernel's target."""
    path = connect("rdma", "10.0.2.15", "4420", RDMA_NQN)
    own, other = new_key(), new_key()
    uri = f"nvme+tcp://10.0.2.15:4421/{RDMA_NQN}"
    with open_device(path) as device, open_device(uri, hostid=uuid.uuid4()) as rival:
        clear(device)
        kept = kernel(device)
        kept.register(own)
        kept.acquire(own, SHARED)
        device.write(0, b"1" * BLOCK)
        with pytest.raises(ReservationConflict):
            rival.write(0, b"2" * BLOCK)
        rival.reservations.register(other)
        rival.reservations.preempt(other, own, SHARED)
        with pytest.raises(ReservationConflict, match=r"^write failed: this node is fenced"):
            device.write(0, b"3" * BLOCK)
        stays_failed(device, ReservationConflict, "write failed: this node is fenced")
        with pytest.raises(ReservationConflict, match="the session was taken over from"):
            kept.join(own, SHARED)
        assert [found.key for found in kept.report().registrants] == [other]
        assert bytes_of(device, 0, BLOCK) == b"1" * BLOCK
        rival.write(0, b"4" * BLOCK)
        rival.reservations.clear(other)


@case
def volume_taken_over_rdma() -> None:
    """A session of this node over RDMA, and one of another host over TCP, at one namespace of the kernel's target: each
    takes the volume from the other, and what the loser still sends is refused."""
    path = connect("rdma", "10.0.2.15", "4420", RDMA_NQN)
    uri = f"nvme+tcp://10.0.2.15:4421/{RDMA_NQN}"
    data, late = DATA.tobytes(), np.full(BLOCK, 0xEE, np.uint8)
    Volume.create(path, force=True).close()
    with Volume.open(path, write=True) as node, Volume.open(uri, write=True) as host:
        first = node.session(run_id="node", heartbeat_s=60)
        with first.transaction() as tx:
            tx.put("over-rdma", data)
        open_tx = first.transaction()
        open_tx.put("late", data)

        second = host.session(run_id="host", heartbeat_s=60, takeover="now")
        assert (first.fence, second.fence) == ("node", "until-restart")
        assert host.read("over-rdma") == data
        with second.transaction() as tx:
            tx.put("over-tcp", data)
        # No heart beats while the medium is looked at, however slow the guest is.
        second._beat.halt()
        before, refused = medium(), conflicts()
        with pytest.raises(SessionLost):
            open_tx.commit()
        # A rank of it that asks nobody.
        with pytest.raises(ReservationConflict):
            first.writing[0].write(32 << 20, late)
        same(before, medium())
        assert conflicts() > refused
        with suppress(HeadraceError):
            first.close()

        open_tx = second.transaction()
        open_tx.put("late", data)
        third = node.session(run_id="node", heartbeat_s=60, takeover="now")
        assert third.fence == "node" and node.read("over-tcp") == data
        with third.transaction() as tx:
            tx.put("over-rdma-again", data)
        # It holds all the same, and beats no more.
        third.close()
        before, refused = medium(), conflicts()
        with pytest.raises(SessionLost):
            open_tx.commit()
        assert conflicts() > refused
        assert sum(device.describe()["counters"]["conflicts"] for device in second.writing) > 0
        with suppress(HeadraceError):
            second.close()
        same(before, medium())
        with Volume.open(path) as volume:
            assert [info.name for info in volume.list("over-")] == ["over-rdma", "over-rdma-again", "over-tcp"]
            assert all(volume.read(info.name) == data for info in volume.list("over-"))
            assert "late" not in volume
    with open_device(path) as device:
        clear(device)


@case
def mapped() -> None:
    path = connect("rdma", "10.0.2.15", "4420", RDMA_NQN)
    run("dmsetup", "create", "whole", "--table", f"0 {sectors(path)} linear {path} 0")
    name = dm("whole")
    with pytest.raises(UsageError, match=rf"in use.*is part of {name} \(whole\)"):
        open_device(path)
    key, late = new_key(), new_key()
    with open_device(name) as device:
        kept = kernel(device)
        assert kept.problem() == "" and device.describe()["kernel"]["paths"][0]["transport"] == "rdma"
        with pytest.raises(ReservationConflict, match="held by nobody"):
            kept.join(late, SHARED)
        assert kept.report().registered == 0
        kept.register(key)
        kept.acquire(key, SHARED)
        kept.join(key, SHARED)
        report = kept.report()
        assert [(found.key, found.holds, found.hostid) for found in report.registrants] == [(key, True, kept.hostid)]
        device.guard_writes(key, SHARED)
        device.write(0, b"m" * BLOCK)
        kept.clear(key)
        assert kept.report().registered == 0
        with pytest.raises(ReservationConflict):
            device.check_guard()
    run("dmsetup", "remove", "whole")


def as_nobody(path: str, key: int) -> None:
    os.setgid(65534)
    os.setuid(65534)
    with open_device(path) as device:
        kept = kernel(device)
        kept.register(key)
        kept.acquire(key, SHARED)
        kept.join(key, SHARED)
        report = kept.report()
        assert [(found.key, found.holds) for found in report.registrants] == [(key, True)], report
        device.guard_writes(key, SHARED)
        device.write(0, b"n" * BLOCK)
        kept.release(key, SHARED)
        kept.unregister(key)
        with pytest.raises(ReservationConflict, match="not registered; held by nobody"):
            device.check_guard()


@case
def unprivileged() -> None:
    path = connect("rdma", "10.0.2.15", "4420", RDMA_NQN)
    os.chown(path, 65534, 65534)
    child = multiprocessing.get_context("fork").Process(target=as_nobody, args=(path, new_key()))
    child.start()
    child.join(60)
    assert child.exitcode == 0


def sectors(path: str) -> int:
    with open_device(path, read_only=True) as device:
        return device.size_bytes // 512


def dm(name: str) -> str:
    return f"/dev/{run('dmsetup', 'info', '-c', '--noheadings', '-o', 'blkdevname', name).strip()}"


def load(name: str, table: str) -> None:
    run("dmsetup", "suspend", "--noflush", name)
    run("dmsetup", "reload", name, "--table", table)
    run("dmsetup", "resume", name)


@case
def failing_medium() -> None:
    run("dmsetup", "create", "bad", "--table", "0 65536 linear /dev/nullb2 0\n65536 65536 error")
    with open_device(dm("bad")) as device:
        device.write(0, b"a" * BLOCK)
        with pytest.raises(CommandFailed, match=r"^read failed at /dev/dm-\d+, offset 33554432"):
            bytes_of(device, 32 << 20, BLOCK)
        device.write(BLOCK, b"b" * BLOCK)
        with pytest.raises(CommandFailed, match=r"^write failed at .*its outcome is unknown: open the device again"):
            device.write(32 << 20, b"c" * BLOCK)
        stays_failed(device, CommandFailed, "write failed")
    with open_device(dm("bad")) as device:
        device.write(0, b"d" * BLOCK)
    run("dmsetup", "remove", "bad")


@case
def failing_flush() -> None:
    good = "0 131072 linear /dev/nullb2 0"
    run("dmsetup", "create", "flaky", "--table", good)
    with open_device(dm("flaky")) as device:
        device.write(0, b"e" * BLOCK)
        load("flaky", "0 131072 flakey /dev/nullb2 0 0 1000 1 error_writes")
        with pytest.raises(CommandFailed, match=r"^flush failed"):
            device.flush()
        load("flaky", good)
        stays_failed(device, CommandFailed, "flush failed")
    with open_device(dm("flaky")) as device:
        device.flush()
        assert bytes_of(device, 0, BLOCK) == b"e" * BLOCK
    run("dmsetup", "remove", "flaky")


@case
def slow_medium() -> None:
    run("dmsetup", "create", "slow", "--table", "0 131072 delay /dev/nullb2 0 0 /dev/nullb2 0 2500")
    with open_device(dm("slow")) as device:
        writer = threading.Thread(target=device.write, args=(0, b"s" * BLOCK))
        writer.start()
        until(lambda: (device.describe()["oldest_call_s"] or 0) > 0.5, 30, "nobody waits")
        writer.join()
        assert device.describe()["oldest_call_s"] is None
        assert bytes_of(device, 0, BLOCK) == b"s" * BLOCK
    run("dmsetup", "remove", "slow")


@case
def lost_cache() -> None:
    """A target that loses its volatile cache behind the kernel's back: what was written is there all the same."""
    nqn = os.environ["VOLATILE_NQN"]
    with open_device(connect("tcp", "10.0.2.2", os.environ["VOLATILE_PORT"], nqn)) as device:
        device.write(0, DATA)
        outside("lose-cache")
        assert bytes_of(device, 0, len(DATA)) == DATA.tobytes()
        reconnects = device.describe()["kernel"]["paths"][0]["reconnects"]
        assert reconnects is None or reconnects > 0
    run("nvme", "disconnect", "-n", nqn)


@case
def removed() -> None:
    with open_device(tcp.uri) as device:
        run("nvme", "disconnect", "-n", NQN)
        with pytest.raises(DeviceGone, match=r"read failed: the block device was removed"):
            bytes_of(device, 0, BLOCK)
        with pytest.raises(DeviceGone, match=r"^write failed: the block device was removed"):
            device.write(0, bytes(BLOCK))


@case
def nfs_cure() -> None:
    """What is judged outside: for it this guest has all that takes long."""
    assert os.path.ismount("/proc/1/root/nfs"), "guest.sh of examples/nfs_cure failed"
    inside.main()


for one in _cases:
    print(f"---- {one.__name__}", flush=True)
    begun = time.monotonic()
    try:
        one()
        print(f"CASE {one.__name__} ok ({time.monotonic() - begun:.0f} s)", flush=True)
    except BaseException:
        traceback.print_exc()
        print(f"CASE {one.__name__} FAILED", flush=True)
    finally:
        subprocess.run(
            ["chroot", "/proc/1/root", "nvme", "disconnect", "-n", RDMA_NQN], check=False, capture_output=True
        )
os._exit(0)
