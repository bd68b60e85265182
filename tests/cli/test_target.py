"""A real `headrace serve`, asked and changed over its control socket."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.device import open_device
from headrace.errors import DeviceError, DeviceTimeout, ProtocolError, UsageError
from headrace.fabric import discover
from headrace.fabric.control import ask
from headrace.testing.serve import ServeProcess, serving

NQN = "nqn.2026-01.io.headrace:target"


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "150", "TERM": "dumb", **(env or {})},
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("control")


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[ServeProcess]:
    with serving(NQN, "mem:4MiB", options=["--socket", f"{place}/t.sock"]) as target:
        # It listens before its socket is there.
        deadline = time.monotonic() + 20
        while not (place / "t.sock").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield target


def target(place: Path, *arguments: str) -> str:
    answer = run("target", *arguments, "--socket", f"{place}/t.sock")
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def status(place: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(run("serve", "--status", "--json", "--socket", f"{place}/t.sock").stdout)
    return found


def namespaces(place: Path) -> dict[int, dict[str, object]]:
    (subsystem,) = ask(place / "t.sock", {"do": "status"})["subsystems"]
    return {int(n["nsid"]): n for n in subsystem["namespaces"]}


def generation(served: ServeProcess) -> int:
    return discover([("127.0.0.1", served.port)]).controllers[0].generation


def test_status_for_people_and_for_machines(served: ServeProcess, place: Path) -> None:
    with open_device(served.uri()) as device:
        device.write(0, b"x" * 8192)
        shown = run("serve", "--status", "--socket", f"{place}/t.sock").stdout
        found = status(place)
    assert NQN in shown and f"127.0.0.1:{served.port}" in shown and "8.0 KiB" in shown and "memory" in shown
    assert "nqn.2014-08.org.nvmexpress:uuid:" in shown, "the host that is connected"
    assert re.search(r"^ *nsid +size .* media *$", shown, re.M), "a page for people has its headings in a pipe, too"
    assert re.search(r"^  [0-2]\d:[0-5]\d:[0-5]\d  127\.0\.0\.1:\d+: connected", shown, re.M)
    assert found["pid"] == served.process.pid
    controllers = found["controllers"]
    assert isinstance(controllers, list)
    assert controllers[0]["queues"] == [0, 1]
    assert controllers[0]["portal"] == "1"


def test_namespaces_come_grow_and_go(served: ServeProcess, place: Path) -> None:
    disk = place / "disk"
    assert "namespace 2 of" in target(place, "add-namespace", f"{disk}:1MiB")
    with open_device(served.uri(2)) as device:
        assert device.size_bytes == 1 << 20
        device.write(4096, b"k" * 4096)
    target(place, "resize-namespace", "2", "2MiB")
    assert disk.stat().st_size == 2 << 20
    with open_device(served.uri(2)) as device:
        assert device.size_bytes == 2 << 20
    answer = run("target", "resize-namespace", "2", "1MiB", "--socket", f"{place}/t.sock")
    assert answer.returncode == 2
    assert "must be forced (--force)" in answer.stderr
    answer = run("target", "add-namespace", str(disk), "--socket", f"{place}/t.sock")
    assert answer.returncode == 2
    assert f"this target serves it already at {disk}: found namespace 2 of {NQN}" in answer.stderr
    target(place, "resize-namespace", "2", "1MiB", "--force")
    assert target(place, "remove-namespace", "2") == "namespace 2 was removed\n"
    assert list(namespaces(place)) == [1]
    with pytest.raises(DeviceError):
        open_device(served.uri(2))
    # Flushed and closed: another server may have it.
    with serving("nqn.2026-01.io.headrace:other", str(disk)) as other, open_device(other.uri()) as device:
        kept = bytearray(4096)
        device.read_into(4096, kept)
        assert kept == b"k" * 4096


def test_a_namespace_with_an_identity_of_its_own(served: ServeProcess, place: Path) -> None:
    disk, reservations = place / "own", place / "own.reservations"
    reservations.touch()
    uuid, nguid = "5e1f2a3b-0000-4000-8000-00000000a001", "0123456789abcdef0123456789abcdef"
    options = ("--uuid", uuid, "--nguid", nguid, "--direct", "off", "--reservations", str(reservations))
    target(place, "add-namespace", f"{disk}:1MiB", "--nsid", "7", *options)
    assert namespaces(place)[7]["direct"] is False
    with open_device(served.uri(7)) as device:
        found = device.describe()
        assert (found["uuid"], found["nguid"]) == (uuid.replace("-", ""), nguid)
    target(place, "remove-namespace", "7")
    for option, value, says in (("--direct", "often", "direct"), ("--uuid", "5e1f", "uuid"), ("--nguid", "x", "nguid")):
        answer = run("target", "add-namespace", str(disk), option, value, "--socket", f"{place}/t.sock")
        assert answer.returncode == 2 and says in answer.stderr, answer.stderr
    answer = run(
        *("target", "add-namespace", "mem:1MiB", "--reservations", str(reservations), "--socket", f"{place}/t.sock")
    )
    assert answer.returncode == 2 and "it only with a path" in answer.stderr, answer.stderr


def test_ana_states_and_hosts(served: ServeProcess, place: Path) -> None:
    assert "is non-optimized through 1" in target(place, "ana", "non-optimized", "--portal", "1")
    subsystems = status(place)["subsystems"]
    assert isinstance(subsystems, list)
    assert subsystems[0]["ana_groups"] == [{"id": 1, "states": {"1": "non-optimized"}, "changes": 1}]
    target(place, "ana", "optimized")
    before = generation(served)
    host = "nqn.2026-01.io.example:host"
    os.environ["HEADRACE_HOSTNQN"] = host
    try:
        target(place, "allow-host", host, "--read-only")
        assert generation(served) > before
        with open_device(served.uri()) as device:
            device.read_into(0, bytearray(4096))
            # This host looks at the namespace first; that the target refuses is in native/target/tests/runtime.rs.
            with pytest.raises(UsageError, match=rf"lets this host only read.*allow-host {host}"):
                device.write(0, b"x" * 4096)
            assert target(place, "disconnect", host) == "1 controller was ended\n"
        assert target(place, "deny-host", "any").startswith("any may not connect any more")
        target(place, "deny-host", host)
        with pytest.raises(DeviceError, match="Invalid Host"):
            open_device(served.uri())
    finally:
        del os.environ["HEADRACE_HOSTNQN"]
        target(place, "allow-host", "any")
    open_device(served.uri()).close()


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["add-namespace", "mem:1000"], 2, "the request: expected 4096"),
        (["add-namespace", "mem:1MiB", "--nsid", "1"], 2, "has a namespace 1 already"),
        (["add-namespace", "mem:1MiB", "--ana-group", "9"], 2, "has no ANA group 9, only 1"),
        (["add-namespace", "/nowhere/disk:1MiB"], 1, "/nowhere/disk: No such file"),
        (["remove-namespace", "99"], 2, "has no namespace 99, only 1"),
        (["resize-namespace", "1", "4097"], 2, "multiple of its block"),
        (["resize-namespace", "1", "huge"], 2, "SIZE"),
        (["ana", "fast"], 2, "state at the request: expected optimized or"),
        (["ana", "change", "--portal", "z"], 2, "no portal"),
        (["disconnect", "somebody"], 2, "begins with"),
        (["deny-host", "nqn.nobody"], 2, "deny that first"),
        (["allow-host", "nqn.a", "--nqn", "nqn.none"], 2, f"a subsystem, {NQN}"),
    ],
)
def test_what_is_refused(
    served: ServeProcess, place: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], status: int, says: str
) -> None:
    before = list(namespaces(place))
    assert main(["target", *arguments, "--socket", f"{place}/t.sock"]) == status
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err
    assert list(namespaces(place)) == before


def test_only_its_user_opens_the_socket(served: ServeProcess, place: Path) -> None:
    assert stat.S_IMODE((place / "t.sock").stat().st_mode) == 0o600
    if os.getuid() == 0:
        code = f"import os, socket\nos.setuid(65534)\nsocket.socket(socket.AF_UNIX).connect({str(place / 't.sock')!r})"
        for folder in (place, *place.parents):
            if folder.owner() == "root" and folder.stat().st_mode & 1 == 0:
                folder.chmod(folder.stat().st_mode | 0o111)
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert "PermissionError" in answer.stderr


def test_a_hostile_client_hurts_nobody(served: ServeProcess, place: Path) -> None:
    path = place / "t.sock"
    for sent, says in (
        (b"x" * (1 << 20), "too long"),
        (b"\xff\xfe\n", "no JSON object"),
        (b"[" * 60000 + b"\n", "no JSON object"),
        (b"[]\n", "no JSON object"),
        (b"{}\n", "status or add-namespace"),
        (b'{"do": ["status"]}\n', "status or add-namespace"),
        (b'{"do": "status", "more": 1}\n', "nobody knows"),
        (b'{"do": "remove-namespace", "nsid": 1e9}\n', "nsid"),
        (b'{"do": "add-namespace", "namespace": 3}\n', "a table"),
        (b'{"do": "add-namespace", "namespace": {"path": "\\u0000"}}\n', "printable"),
        (b'{"do": "add-namespace", "namespace": {"path": "x", "size": 4096, "create": true}}\n', "a whole path"),
        (b'{"do": "add-namespace", "namespace": {"path": "/x", "reservations": "r"}}\n', "namespace.reservations"),
    ):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(30)
            peer.connect(str(path))
            # It may answer and close before all was said.
            with contextlib.suppress(BrokenPipeError):
                peer.sendall(sent)
            line = peer.makefile("rb").readline()
            assert says in json.dumps(json.loads(line)["error"]), line
    # As many as are heard at once, all of them silent; the others are turned away, and served when those are dropped.
    silent = []
    for _ in range(8):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(str(path))
        silent.append(peer)
    with open_device(served.uri()) as device:
        device.flush()
    deadline = time.monotonic() + 30
    while True:
        try:
            assert ask(path, {"do": "status"})["pid"] == served.process.pid
            break
        except DeviceError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    for peer in silent:
        peer.close()
    # Several requests on one connection.
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
        peer.sendall(b'{"do": "status"}\n{"do": "status"}\n')
        lines = peer.makefile("rb")
        assert all("ok" in json.loads(lines.readline()) for _ in range(2))


def test_a_target_without_descriptors_waits_for_one(tmp_path: Path) -> None:
    """It must not ask the kernel again and again for a client that it cannot take."""
    with serving(NQN, "mem:1MiB", options=["--socket", str(tmp_path / "socket")]) as served:
        pid = served.process.pid
        deadline = time.monotonic() + 20
        while not (tmp_path / "socket").exists():
            # It listens before its socket is there.
            assert time.monotonic() < deadline
            time.sleep(0.02)
        folder = Path(f"/proc/{pid}")
        held, before_that = len(list((folder / "fd").iterdir())), 0
        while held != before_that:  # what it has open for a moment only, as it starts, does not count
            time.sleep(0.3)
            held, before_that = len(list((folder / "fd").iterdir())), held
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (held, 4096))

        def switches() -> int:
            """How often its threads went to sleep, or were sent there."""
            texts = [(task / "status").read_text() for task in (folder / "task").iterdir()]
            return sum(int(number) for text in texts for number in re.findall(r"ctxt_switches:\t(\d+)", text))

        def ticks() -> int:
            return sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:13]))

        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "socket"))
            client.sendall(b'{"do": "status"}\n')
            client.settimeout(10)
            before = ticks(), switches()
            time.sleep(1)
            used = ticks() - before[0], switches() - before[1]
            # 100 ticks are all of a processor; 1,000 switches are far beyond what the pauses need.
            assert used[0] < 8, used
            assert used[1] < 1000, used
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (1024, 4096))
            assert client.recv(1 << 20).startswith(b'{"ok"')


@pytest.mark.parametrize("answer", [b"[" * 100000 + b"\n", b"x", b'{"ok": 1}\n'])
def test_an_answer_that_is_none(tmp_path: Path, answer: bytes) -> None:
    with answering(tmp_path / "socket", [answer]), pytest.raises(ProtocolError):
        ask(tmp_path / "socket", {"do": "status"})


def test_an_answer_that_drips_has_a_deadline(tmp_path: Path) -> None:
    with answering(tmp_path / "socket", [b"x"] * 100), pytest.raises(DeviceTimeout):
        ask(tmp_path / "socket", {"do": "status"}, timeout_s=0.5)


@contextlib.contextmanager
def answering(path: Path, pieces: list[bytes]) -> Iterator[None]:
    """Something that answers one client with these pieces, a while apart."""
    over = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            peer, _ = listener.accept()
            with peer, contextlib.suppress(OSError):
                for piece in pieces:
                    peer.sendall(piece)
                    if over.wait(0.1):
                        return
                peer.shutdown(socket.SHUT_WR)
                peer.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def test_found_by_itself_and_cleaned_up(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    assert "no target of this user runs here" in run("target", "status", env=env).stderr
    folder = tmp_path / "headrace"
    with serving(NQN, "mem:1MiB", env=env) as first:
        deadline = time.monotonic() + 20
        while "control socket" not in first.output():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert json.loads(run("serve", "--status", "--json", env=env).stdout)["pid"] == first.process.pid
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        assert (folder / f"{first.process.pid}.sock").exists()
        with serving(NQN, "mem:1MiB", env=env) as second:
            while "control socket" not in second.output():
                time.sleep(0.02)
            # What the killed one left is gone.
            assert [path.name for path in folder.iterdir()] == [f"{second.process.pid}.sock"]
            assert run("target", "stop", env=env).stdout == "stopping\n"
            assert second.process.wait(20) == 0
    assert list(folder.iterdir()) == []
    folder.chmod(0o777)
    assert "not this user's alone" in run("target", "status", env=env).stderr


def test_a_socket_in_use_and_what_is_none(served: ServeProcess, place: Path) -> None:
    answer = run("serve", "mem:1MiB", "--socket", f"{place}/t.sock")
    assert answer.returncode == 1
    assert "another target has this control socket" in answer.stderr
    (place / "file").write_text("")
    assert "this is no socket" in run("serve", "mem:1MiB", "--socket", f"{place}/file").stderr
    assert "too long" in run("serve", "mem:1MiB", "--socket", f"{place}/{'x' * 120}").stderr
    with pytest.raises(DeviceError, match="is it running"):
        ask(place / "nobody.sock", {"do": "status"})
    with pytest.raises(UsageError):
        ask(place / "t.sock", {"do": "dance"})


def test_drain_lets_commands_end_and_stops(tmp_path: Path) -> None:
    path = tmp_path / "t.sock"
    with serving(NQN, f"{tmp_path}/disk:64MiB", options=["--socket", str(path)]) as served:
        device = open_device(served.uri(loss_timeout=2))
        written = 0

        def write() -> None:
            nonlocal written
            try:
                while True:
                    device.write(written % 64 << 20, bytes([written % 251]) * (1 << 20))
                    written += 1
            except DeviceError:
                # The target is gone for good.
                return

        thread = threading.Thread(target=write)
        thread.start()
        while written < 3:
            time.sleep(0.01)
        answer = run("target", "drain", "--timeout", "30", "--socket", str(path))
        assert answer.stdout == "drained\n", answer.stderr
        assert served.process.wait(20) == 0
        thread.join()
        device.close()
    # What was answered is there.
    data = (tmp_path / "disk").read_bytes()
    for number in range(max(0, written - 60), written):
        at = number % 64 << 20
        assert data[at : at + 4096] in (bytes([number % 251]) * 4096, bytes([(number + 64) % 251]) * 4096)


def test_helpers_for_tests_ask_it_too() -> None:
    with serving(NQN, "mem:1MiB") as target:
        assert target.ask("status")["pid"] == target.process.pid
        assert target.ask("ana", state="inaccessible", portal="1") == {}
        with pytest.raises(DeviceError):
            open_device(target.uri(loss_timeout=0.5)).read_into(0, bytearray(4096))


def test_flags_as_a_file(tmp_path: Path) -> None:
    flags = [f"{tmp_path}/disk:8MiB", "mem:1MiB", "--nqn", NQN, "--volatile-cache", "1MiB", "--allow-host", "any"]
    printed = run("serve", *flags, "--print-config", "--listen", "127.0.0.1:0")
    assert printed.returncode == 0, printed.stderr
    assert not (tmp_path / "disk").exists(), "it only prints"
    assert 'direct = "on"' in run("serve", *flags, "--direct", "on", "--print-config").stdout
    file = tmp_path / "target.toml"
    file.write_text(printed.stdout)
    assert run("serve", "--config", str(file), "--print-config").stdout == printed.stdout
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", "--config", str(file), "--json", "--socket", f"{tmp_path}/s"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["socket"] == f"{tmp_path}/s"
        uris = [namespace["uri"] for namespace in ready["namespaces"]]
        assert len(uris) == 2
        for uri in uris:
            with open_device(uri) as device:
                device.write(0, b"x" * 4096)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout is not None
        process.stdout.close()
    answer = run("serve", "mem:1MiB", "--config", str(file))
    assert answer.returncode == 2
    assert "--config says all that is served" in answer.stderr
    file.write_text(printed.stdout.replace("size =", "sise ="))
    answer = run("serve", "--config", str(file))
    assert answer.returncode == 2
    assert "subsystem[0].namespace[0].sise" in answer.stderr
    assert "did you mean size?" in answer.stderr


def test_an_address_in_use_says_what_to_do(served: ServeProcess, tmp_path: Path) -> None:
    answer = run("serve", "mem:1MiB", "--listen", f"127.0.0.1:{served.port}")
    assert answer.returncode == 1
    assert "another process listens there" in answer.stderr
    with serving(NQN, f"{tmp_path}/disk:1MiB"):
        answer = run("serve", f"{tmp_path}/disk")
        assert answer.returncode == 1
        assert "in use by another server; stop the other one" in answer.stderr
    answer = run("serve", f"{tmp_path}/odd:1000")
    assert answer.returncode == 2
    assert "multiple of the block" in answer.stderr and "subsystems[" not in answer.stderr
