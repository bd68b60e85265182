"""The rig of nodes: a network in common, nothing else, and nothing left of it afterwards."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.testing.nodes import Link, Nodes, NodesUnavailable

MEGABIT = 1e6
SERVE = """
import socket
with socket.create_server(("0.0.0.0", 7000)) as listener:
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(bytes(int(connection.recv(20))))
"""
FETCH = """
import socket, sys, time
address, count = sys.argv[1], int(sys.argv[2])
begun = time.monotonic()
with socket.create_connection((address, 7000), 20) as connection:
    connection.sendall(str(count).encode())
    while data := connection.recv(1 << 20):
        count -= len(data)
print(count, time.monotonic() - begun)
"""


@contextmanager
def rig_of(count: int, **options: Any) -> Iterator[Nodes]:
    with ExitStack() as stack:
        try:
            nodes = stack.enter_context(Nodes(count, **options))
        except NodesUnavailable as error:
            pytest.skip(str(error))
        yield nodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with rig_of(3) as rig:
        yield rig


def in_network(identity: str) -> list[int]:
    """Processes, of those that this one can see, in the network namespace with this inode."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and str((entry / "ns/net").stat().st_ino) == identity:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def gone(identity: str) -> bool:
    deadline = time.monotonic() + 20
    while in_network(identity):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def fetch(nodes: Nodes, count: int) -> float:
    """Node 1 asks node 0 for so many bytes; seconds."""
    with nodes[0].popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        try:
            fetched = nodes[1].run([sys.executable, "-c", FETCH, nodes[0].address, str(count)]).stdout
        finally:
            server.terminate()
    left, seconds = fetched.split()
    assert left == "0"
    return float(seconds)


def test_each_node_is_a_machine_of_its_own(nodes: Nodes) -> None:
    script = (
        "hostname; cat /proc/sys/kernel/random/boot_id; echo $HEADRACE_HOSTNQN; ls -A /dev/shm; echo here > /dev/shm/x"
    )
    lines = [node.run(["sh", "-c", script]).stdout.split("\n") for node in nodes]
    assert [line[0] for line in lines] == ["node0", "node1", "node2"]
    for column in (1, 2):
        assert len({line[column] for line in lines}) == 3
    assert not any("x" in line[3:] for line in lines)
    assert not Path("/dev/shm/x").exists()
    assert all(node.run(["cat", "/dev/shm/x"]).stdout == "here\n" for node in nodes)


def test_processes_of_another_node_are_not_seen(nodes: Nodes) -> None:
    with nodes[0].popen(["sh", "-c", "echo ready; exec sleep 1000"], stdout=subprocess.PIPE, text=True) as sleeper:
        assert sleeper.stdout is not None
        assert sleeper.stdout.readline() == "ready\n"
        look = [
            sys.executable,
            "-c",
            "from pathlib import Path; print([p.read_bytes() for p in Path('/proc').glob('[0-9]*/comm')])",
        ]
        here, there = nodes[0].run(look).stdout, nodes[1].run(look).stdout
        sleeper.kill()
    assert "sleep" in here
    assert "sleep" not in there


def test_nodes_reach_each_other_by_name_and_address(nodes: Nodes) -> None:
    assert fetch(nodes, 1000) >= 0
    named = nodes[2].run([sys.executable, "-c", "import socket; print(socket.gethostbyname('node1'))"]).stdout.strip()
    assert named == nodes[1].address
    outside = nodes[2].run(["ip", "route", "get", "192.0.2.1"], check=False)
    assert outside.returncode != 0, "a node must reach nothing but nodes"


def test_the_rest_of_the_file_system_is_read_only(nodes: Nodes) -> None:
    answer = nodes[0].run(["sh", "-c", f"echo no > {Path(__file__).parent}/written"], check=False)
    assert answer.returncode
    assert "Read-only" in answer.stderr
    assert not (Path(__file__).parent / "written").exists()


def test_what_is_passed_is_shared(tmp_path: Path) -> None:
    with rig_of(2, shared=[tmp_path]) as nodes:
        nodes[0].run(["sh", "-c", f"echo both > {tmp_path}/file"])
        assert nodes[1].run(["cat", str(tmp_path / "file")]).stdout == "both\n"
    assert (tmp_path / "file").read_text() == "both\n"


def test_a_shaped_link_is_no_faster_than_asked(nodes: Nodes) -> None:
    count, rate = 2_000_000, 40 * MEGABIT
    nodes[1].shape(down=Link(rate_bits=rate, buffer_bytes=64 << 10))
    before, _ = nodes[1].counters()
    seconds = fetch(nodes, count)
    after, _ = nodes[1].counters()
    # The burst and what the buffer held at the end come on top of the rate; a slow machine only makes it longer.
    assert seconds >= 0.8 * count * 8 / rate
    assert after.sent_bytes - before.sent_bytes >= count
    assert after.packets - before.packets >= count / 1500, "cut into packets, not sent as the kernel's large segments"


def test_a_shallow_buffer_drops(nodes: Nodes) -> None:
    nodes[1].shape(down=Link(rate_bits=40 * MEGABIT, buffer_bytes=8 << 10, burst_bytes=4 << 10))
    fetch(nodes, 2_000_000)
    assert nodes[1].counters()[0].dropped > 0


def test_a_link_is_taken_down_and_up_again(nodes: Nodes) -> None:
    code = (
        "import socket, sys; s = socket.socket(); s.settimeout(float(sys.argv[2])); "
        "print(s.connect_ex((sys.argv[1], 1)))"
    )

    def connected(timeout_s: float) -> int:
        return int(nodes[2].run([sys.executable, "-c", code, nodes[0].address, str(timeout_s)]).stdout)

    nodes[0].set_link(up=False)
    try:
        assert connected(0.5) != errno.ECONNREFUSED
    finally:
        nodes[0].set_link(up=True)
    assert connected(20) == errno.ECONNREFUSED


def test_a_delay_is_there_or_refused(nodes: Nodes) -> None:
    try:
        nodes[2].shape(up=Link(rate_bits=1e9, delay_s=0.05))
    except NodesUnavailable as error:
        pytest.skip(str(error))
    code = (
        "import socket, sys, time; begun = time.monotonic(); socket.socket().connect_ex((sys.argv[1], 1)); "
        "print(time.monotonic() - begun)"
    )
    assert float(nodes[2].run([sys.executable, "-c", code, nodes[0].address]).stdout) >= 0.05


def test_a_command_ends_as_it_ends(nodes: Nodes) -> None:
    assert nodes[0].run(["sh", "-c", "exit 7"], check=False).returncode == 7
    assert nodes[0].run(["sh", "-c", "kill -KILL $$"], check=False).returncode == -signal.SIGKILL
    assert nodes[0].run(["no-such-program"], check=False).returncode == 127
    with pytest.raises(subprocess.CalledProcessError):
        nodes[0].run(["false"])
    code = (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(5)); print('ready', flush=True); signal.pause()"
    )
    with nodes[0].popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(20) == 5


def test_killing_the_process_outside_kills_the_command(nodes: Nodes) -> None:
    with nodes[0].popen(["sh", "-c", "echo ready; exec sleep 1000.5"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
        # The pipe ends when the last one that could write to it is gone.
        assert process.stdout.read() == ""


def test_nothing_is_left_after_the_end() -> None:
    with rig_of(2) as rig:
        identity = rig[0].run(["stat", "-Lc", "%i", "/proc/self/ns/net"]).stdout.strip()
        sleeper = rig[0].popen(["sleep", "1000"])
        assert in_network(identity)
    assert not in_network(identity)
    sleeper.wait(20)
    with pytest.raises(IndexError):
        rig[2]
    with pytest.raises(RuntimeError, match="closed"):
        rig[0].run(["true"])


READ = """
import sys
from headrace.device import open_device
with open_device(sys.argv[1]) as device:
    found = bytearray(4096)
    device.read_into(0, found)
    print(sum(found))
"""


def test_a_target_serves_the_allowed_node_only(nodes: Nodes) -> None:
    serve = [sys.executable, "-m", "headrace.cli", "serve", "mem:1MiB", "--listen", f"{nodes[0].address}:4420"]
    refused = nodes[0].run(serve, check=False)
    assert refused.returncode == 2
    assert "--allow-host" in refused.stderr
    with nodes[0].popen(
        [*serve, "--allow-host", nodes[1].hostnqn, "--nqn", "nqn.2026-01.test:node"],
        stdout=subprocess.PIPE,
        text=True,
    ) as target:
        assert target.stdout is not None
        uri = target.stdout.readline().removeprefix("READY ").strip()
        try:
            read = [sys.executable, "-c", READ, uri]
            assert nodes[1].run(read).stdout == "0\n"
            other = nodes[2].run(read, check=False)
            assert other.returncode
            assert "ConnectRefused" in other.stderr
        finally:
            target.terminate()
        assert target.wait(20) == 0


OWNER = """
import sys, time
from headrace.testing.nodes import Nodes
with Nodes(2) as nodes:
    print(nodes[0].run(["stat", "-Lc", "%i", "/proc/self/ns/net"]).stdout.strip(), flush=True)
    nodes[0].popen(["sleep", "1000"])
    print("ready", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_killed_owner(nodes: Nodes, number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        identity = owner.stdout.readline().strip()
        assert owner.stdout.readline() == "ready\n"
        assert in_network(identity)
        owner.send_signal(number)
        owner.wait(20)
        assert gone(identity)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="nodes"):
        Nodes(0)
    with pytest.raises(ValueError, match="rate_bits"):
        Nodes(1, rate_bits=1)
    with pytest.raises(ValueError, match="buffer_bytes"):
        Link(rate_bits=1e6, buffer_bytes=1)
