"""The frame of the command line: help that is quick, statuses, signals, pipes."""

from __future__ import annotations

import filecmp
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.testing.serve import serving
from headrace.volume import Volume

COMMANDS = ["demo", "serve", "target", "discover", "volume", "ingest"]
TARGET_COMMANDS = [
    *(
        "status",
        "add-namespace",
        "remove-namespace",
        "resize-namespace",
        "ana",
        "allow-host",
        "deny-host",
        "disconnect",
    ),
    *("drain", "stop"),
]
VOLUME_COMMANDS = [
    *("create", "info", "ls", "stat", "cat", "cp", "rm", "verify", "scrub", "salvage", "takeover"),
]
NQN = "nqn.2026-01.io.headrace:test"


def run(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "COLUMNS": "120", "TERM": "dumb"},
    )


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom headrace.cli import main\nstatus = main(['--help'])\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'pyarrow', 'headrace.volume', 'headrace._native'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "sys.exit(status)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
    for name in COMMANDS:
        assert re.search(rf"\b{name}\b", answer.stdout)
    assert answer.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "command",
    [[name] for name in COMMANDS]
    + [["volume", name] for name in VOLUME_COMMANDS]
    + [["target", name] for name in TARGET_COMMANDS],
)
def test_every_command_explains_itself_with_an_example(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "dumb")
    assert main([*command, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert command in (["volume"], ["target"]) or f"Example: headrace {' '.join(command)}" in said


def test_version() -> None:
    answer = run("--version")
    assert answer.returncode == 0
    assert re.fullmatch(r"headrace \d+\.\d+\.\d+\S*\n", answer.stdout)


def test_main_gives_statuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--version"]) == 0
    assert main(["volume", "info", f"file:{tmp_path}/nothing"]) == 1
    assert main(["volume", "info", "what"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert all(line.startswith("headrace: error: ") for line in said)


def test_where_a_volume_is_an_argument_its_option_is_answered_with_that(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("volume ls", "dataset ls", "checkpoint ls"):
        assert main([*command.split(), "--volume", "file:x"]) == 2
        assert "No such option: --volume (the addresses of the volume are arguments here" in capsys.readouterr().err
    assert main(["plan", "--volume", "file:x"]) == 2
    assert "arguments" not in capsys.readouterr().err


def test_no_standard_output_and_no_command(tmp_path: Path) -> None:
    uri = f"file:{tmp_path}/disk.img"
    Volume.create([f"{uri}?create=8MiB"]).close()
    shell = f"{sys.executable} -m headrace volume ls {uri} >&-"
    answer = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    # A file that took one of their numbers would be written into.
    script = f"""
import os, sys
from headrace.cli import main
status = main(["volume", "ls", {uri!r}])
sys.exit(status or [os.readlink(f"/proc/self/fd/{{n}}") for n in range(3)] != [os.devnull] * 3)
"""
    answer = subprocess.run(
        ["sh", "-c", f'{sys.executable} -c "$0" <&- >&- 2>&-', script], capture_output=True, timeout=60, check=False
    )
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, b"", b"")
    assert "a command is missing; see `headrace volume --help`" in run("volume").stderr


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    uri = f"file:{tmp_path}/disk.img"
    with (
        Volume.create([f"{uri}?create=64MiB"]) as volume,
        volume.session(run_id="t") as session,
        session.transaction() as transaction,
    ):
        transaction.put("large", os.urandom(16 << 20))
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "volume", "cat", "large", "--volume", uri],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert len(process.stdout.read(10)) == 10
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(30) != 0


def test_serve_says_where_and_stops_in_order(tmp_path: Path) -> None:
    media = tmp_path / "disk.img"
    process = subprocess.Popen(
        [
            *(
                sys.executable,
                "-m",
                "headrace",
                "serve",
                "--json",
                f"{media}:64MiB",
                "mem:16MiB",
                "--volatile-cache",
                "32MiB",
            ),
            *(
                "--subsystem",
                "nqn.2026-01.io.headrace:more=mem:16MiB",
                "--listen",
                "127.0.0.1:0",
                "--listen",
                "127.0.0.1:0",
            ),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["event"] == "ready"
        assert len(set(ready["listen"])) == 2
        assert set(ready["io_engine"].split(", ")) <= {"io_uring", "pread", "memory"}
        uris = [namespace["uri"] for namespace in ready["namespaces"]]
        # One address for each namespace, every portal a path.
        assert len(uris) == 3 and all(",".join(ready["listen"]) in uri for uri in uris)
        Volume.create([uris[0]], name="x").close()
        found = run("discover", ready["listen"][0], "--json")
        names = {record["subnqn"] for record in json.loads(found.stdout)["records"]}
        assert {"nqn.2026-01.io.headrace:serve", "nqn.2026-01.io.headrace:more"} <= names
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    # What the volatile cache held was written down on the way out.
    with Volume.open([f"file:{media}"]) as volume:
        assert volume.info().name == "x"


def test_ctrl_c_is_130_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    words = "".join(f"word{i} " for i in range(20_000))
    for number in range(200):
        (folder / f"{number}.txt").write_text(f"{number} {words}")
    uri = f"file:{tmp_path}/disk.img"
    Volume.create([f"{uri}?create=256MiB"]).close()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "headrace", "ingest", str(folder), "data", "--volume", uri),
            *("--vocab-size", "300", "--train-size", "64KiB"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        # Past the tokenizer: tokens are being written.
        while "tokenizer" in (line := process.stderr.readline()):
            pass
        assert line, "it was over too soon"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "headrace: error: interrupted"
    assert "Traceback" not in err
    with Volume.open([uri]) as volume:
        assert volume.list() == []


def test_an_interrupted_copy_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C, SIGTERM and SIGKILL in the middle of a large file, in both directions; and the same copy again."""
    uri = f"file:{tmp_path}/disk.img"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "small").write_bytes(b"1")
    with (folder / "large").open("wb") as file:
        for _ in range(6):
            file.write(os.urandom(64 << 20))
    Volume.create([f"{uri}?create=1GiB"]).close()

    def interrupted(number: signal.Signals, *arguments: str, under_way: Callable[[], bool]) -> str:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "volume", "cp", "-r", *arguments, "-V", uri],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            deadline = time.monotonic() + 60
            while not under_way():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.002)
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), err
        return err

    def holds_it() -> bool:
        with Volume.open([uri]) as volume:
            writer = volume.info().writer
            return writer is not None and writer.state == "active" and volume.info().quarantined_bytes > 0

    for number in (signal.SIGINT, signal.SIGKILL):
        err = interrupted(number, str(folder), ":x", under_way=holds_it)
        assert err == ("" if number == signal.SIGKILL else "headrace: error: interrupted\n")
        with Volume.open([uri]) as volume:
            assert volume.list() == []
    # What was killed is taken over from, by the same command, when it has been silent for long enough.
    answer = run("volume", "cp", "-r", str(folder), ":x", "-V", uri)
    assert answer.returncode == 0, answer.stderr
    for number in (signal.SIGTERM, signal.SIGKILL):
        out = tmp_path / f"out-{number.name}"
        interrupted(number, ":x", str(out), under_way=out.exists)
        assert [path.name for path in out.iterdir()] in ([], ["small"])
        again = run("volume", "cp", "-r", ":x/.", str(out), "-V", uri, "--existing", "update")
        assert again.returncode == 0 and filecmp.cmp(folder / "large", out / "large", shallow=False)


def test_volume_commands_over_nvme_tcp() -> None:
    with serving(NQN, "mem:64MiB", "mem:64MiB") as target:
        members = [target.uri(nsid=1), target.uri(nsid=2)]
        options = [text for uri in members for text in ("--volume", uri)]
        made = run("volume", "create", *members, "--name", "two", "--json")
        assert json.loads(made.stdout)["name"] == "two"
        with (
            Volume.open(members, write=True) as volume,
            volume.session(run_id="t") as session,
            session.transaction() as transaction,
        ):
            transaction.put("a/1", b"one")
            transaction.put("a/2", b"two" * 100_000)
            transaction.put("b", b"")
        listed = [json.loads(line) for line in run("volume", "ls", *members, "--json").stdout.splitlines()]
        assert [(entry["name"], entry["length_bytes"]) for entry in listed] == [("a/1", 3), ("a/2", 300_000), ("b", 0)]
        assert run("volume", "ls", *members, "--prefix", "a/").stdout.splitlines()[0].split("\t")[1:] == ["3", "a/1"]
        assert run("volume", "cat", "a/2", *options).stdout == "two" * 100_000
        assert run("volume", "cat", "b", *options).stdout == ""
        verified = run("volume", "verify", *members, "--json")
        assert (verified.returncode, json.loads(verified.stdout)["objects"]) == (0, 3)
        assert run("volume", "rm", "a/1", "b", *options).returncode == 0
        assert run("volume", "rm", "a/2", "never/was", *options).returncode == 1
        assert [line.split("\t")[2] for line in run("volume", "ls", *members).stdout.splitlines()] == ["a/2"]
        assert "two" in run("volume", "info", *members).stdout


def test_sigterm_within_an_exec_of_text_is_no_ctrl_c(tmp_path: Path) -> None:
    """`python -m` would end itself by SIGINT at last, had a KeyboardInterrupt gone through there, whoever caught it."""
    (tmp_path / "interrupted_exec.py").write_text(
        "import sys\nfrom headrace import cli\n"
        "def commands(first):\n"
        "    exec('import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)')\n"
        "cli._commands = commands\nsys.exit(cli.main(['volume']))\n"
    )
    command = [sys.executable, "-m", "interrupted_exec"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (143, "headrace: error: interrupted\n")
