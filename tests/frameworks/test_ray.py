"""`headrace ingest --ray` on a real cluster of two nodes: its driver killed, a worker, a node; and what cannot work."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace.testing.serve import free_port, serving
from headrace.volume import Volume
from tests.dataset.test_ingest import objects
from tests.dataset.test_ingest_workers import corpus, plainly, tokenizer  # noqa: F401

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Cluster:
    def __init__(self, python: Path, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [python, HERE / "ray_cluster.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        self.address = self._line()

    def say(self, command: str) -> None:
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        assert self._line() == command.partition(" ")[0]

    def _line(self) -> str:
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline().strip()
        if not line:
            pytest.fail(f"the Ray cluster did not come: {self.process.stderr.read()[-2000:]}")
        return line

    def close(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def environment(framework_environment: dict[str, str]) -> dict[str, str]:
    """Ray's nodes and drivers talk over the loopback alone where they are told that this is no cluster's machine."""
    return {**framework_environment, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@pytest.fixture(scope="module")
def cluster(framework_python: Path, environment: dict[str, str]) -> Iterator[Cluster]:
    found = Cluster(framework_python, environment)
    try:
        yield found
    finally:
        found.close()


def _lines(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _workers(address: str) -> list[psutil.Process]:
    """Processes that read for somebody on a cluster; of ours, for addresses differ."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "headrace.dataset.ingestion.worker" in process.cmdline():
                above = [each.cmdline() for each in process.parents()]
                if any(address in word for command in above for word in command):
                    found.append(process)
    return found


def test_the_same_bytes_though_the_driver_a_worker_and_a_node_are_killed(
    cluster: Cluster,
    corpus: Path,  # noqa: F811
    tokenizer: Path,  # noqa: F811
    plainly: dict[str, bytes],  # noqa: F811
    tmp_path: Path,
    framework_python: Path,
    environment: dict[str, str],
) -> None:
    with serving("nqn.2026-01.io.headrace:test-ray", "mem:16MiB", "mem:16MiB") as target:
        where = [target.uri(nsid=1), target.uri(nsid=2)]
        Volume.create(where).close()
        go = tmp_path / "go"
        command = [
            framework_python, HERE / "ray_ingest.py", cluster.address, corpus, tokenizer, go, *where,
        ]  # fmt: skip

        def begin() -> subprocess.Popen[str]:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
            )

        with begin() as first:
            assert _lines(first) == "kept"
            left = _workers(cluster.address)
            assert left
            first.kill()
        # Nobody ends them but Ray, and that their socket is closed.
        psutil.wait_procs(left, timeout=60)
        assert not [process for process in left if process.is_running()]
        with begin() as second:
            assert _lines(second) == "kept"
            workers = _workers(cluster.address)
            workers[0].kill()
            cluster.say("kill")
            go.touch()
            said = json.loads(_lines(second))
        assert said["resumed"] >= 2 and said["direct"] and 1 <= said["workers"] <= 2, said
        with Volume.open(where) as volume:
            assert objects(volume, "a") == plainly


def test_a_node_with_another_headrace_is_named(
    cluster: Cluster,
    corpus: Path,  # noqa: F811
    tokenizer: Path,  # noqa: F811
    tmp_path: Path,
    framework_python: Path,
    environment: dict[str, str],
) -> None:
    other = tmp_path / "other"
    shutil.copytree(ROOT / "src" / "headrace", other / "headrace", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    with (other / "headrace" / "dataset" / "slices.py").open("a") as file:
        file.write("#\n")
    cluster.say(f"other {other}")
    uri = f"file:{tmp_path}/a.img"
    Volume.create([f"{uri}?create=16MiB"]).close()
    done = subprocess.run(
        [framework_python, HERE / "ray_ingest.py", cluster.address, corpus, tokenizer, tmp_path, uri],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    said = json.loads(done.stdout.splitlines()[-1])
    assert "a node has another headrace" in said["error"] and "sources of headrace" in said["error"], said


def test_no_cluster_there(
    corpus: Path,  # noqa: F811
    tmp_path: Path,
    framework_python: Path,
    environment: dict[str, str],
) -> None:
    uri = f"file:{tmp_path}/a.img"
    Volume.create([f"{uri}?create=16MiB"]).close()
    address = f"127.0.0.1:{free_port()}"
    command = ["-m", "headrace", "ingest", str(corpus), "a", "--volume", uri, "--vocab-size", "300", "--ray"]
    for python, where, expected in [
        (framework_python, address, f"the Ray cluster cannot be reached at {address}: found Connection refused"),
        (framework_python, "somewhere", "no address of a Ray cluster"),
        (Path(sys.executable), address, "pip install 'headrace[ray]'"),
    ]:
        done = subprocess.run(
            [python, *command, where], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode in (1, 2) and expected in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
