"""Metrics of a node: real loaders in real processes, of which some die, stop, or come late."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from headrace.dataset import Staging
from headrace.errors import UsageError
from headrace.measure import Watch
from headrace.measure.watch.causes import CAUSES
from headrace.metrics import METRICS, NodeMetrics
from headrace.metrics.answers import Answers, ask_all
from headrace.metrics.folder import make_folder, run_folder
from headrace.metrics.prometheus import MOST_CLIENTS
from headrace.metrics.report import merged_latency
from headrace.testing.serve import ServeProcess, free_port, serving
from headrace.torch import TokenLoader
from headrace.volume import Volume
from tests.dataset.corpora import ingest_texts, native_volume
from tests.stopping import stop

NQN = "nqn.2026-01.io.headrace:test-metrics"
OPTIONS: dict[str, Any] = {"sequence_length": 32, "global_batch": 8, "rank": 0, "world": 1, "seed": 3}

#: Reads three batches, says so, and answers until its input ends.
RANK = """
import sys
from headrace.dataset import FeedOptions, TokenStream, WindowFeed
from headrace.metrics import NodeMetrics
from headrace.volume import Volume
uri, folder = sys.argv[1:]
with Volume.open(uri) as volume:
    feed = WindowFeed(TokenStream.open(volume, "corpus"), FeedOptions(sequence_length=32, global_batch=8))
    with NodeMetrics(feed, port=0, folder=folder) as metrics:
        for _ in range(3):
            feed.release(feed.acquire())
        print("ready", metrics.address, flush=True)
        sys.stdin.read()
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    with serving(NQN, "mem:32MiB") as target:
        with Volume.create([target.uri()]) as volume:
            ingest_texts(volume, tmp_path_factory.mktemp("corpus"), count=60)
        yield target


@pytest.fixture
def folder() -> Iterator[Path]:
    # The path of a socket has 107 bytes.
    with tempfile.TemporaryDirectory(prefix="hr-") as short:
        yield Path(short) / "run"


class RankProcess:
    def __init__(self, rank: int, uri: str, folder: Path) -> None:
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, uri, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def ready(self) -> str:
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said.startswith("ready"), said
        return said

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_what_the_ranks_of_a_node_say_together(target: ServeProcess, folder: Path) -> None:
    with Volume.open(target.uri()) as volume, TokenLoader(volume, "corpus", **OPTIONS) as loader:
        with NodeMetrics(loader, port=0, rank=0, local_rank=0, folder=folder) as metrics:
            list(islice(loader, 5))
            alone = metrics.node()
            assert [rank["up"] for rank in alone["ranks"]] == [True]
            assert alone["feeds"]["batches"] == 5 and alone["feeds"]["samples"] == 40
            assert alone["feeds"]["token_bytes"] == 40 * 33 * 2
            late = [RankProcess(rank, target.uri(), folder) for rank in (1, 2)]
            try:
                assert all("None" in each.ready() for each in late), "only local rank 0 serves"
                node = metrics.node(patience_s=30)
                assert [(rank["rank"], rank["up"]) for rank in node["ranks"]] == [(0, True), (1, True), (2, True)]
                assert [rank["feeds"][0]["batches"] for rank in node["ranks"]] == [5, 3, 3]
                assert node["feeds"]["batches"] == 11 and node["feeds"]["longest_wait_s"] > 0
                (path,) = node["paths"]
                each = [rank["devices"][0]["paths"][0] for rank in node["ranks"]]
                assert path["path"] == f"127.0.0.1:{target.port}" and path["device"] == volume.uris[0]
                assert path["ranks"] == path["usable_ranks"] == 3 and path["slow_ranks"] == 0
                assert path["read_bytes"] == sum(one["read_bytes"] for one in each) > 11 * 8 * 33 * 2
                count = sum(one["latency"]["count"] for one in each)
                assert path["latency"]["count"] == count > 0
                assert path["latency"]["max_s"] == max(one["latency"]["max_s"] for one in each)
                assert 0 < path["latency"]["p50_s"] <= path["latency"]["p99_s"] <= path["latency"]["max_s"]

                # One dies, one is stopped: neither holds anybody up.
                late[0].end()
                stop(late[1].process.pid)
                node = metrics.node(patience_s=0.2)
                assert [(rank["rank"], rank["up"]) for rank in node["ranks"]] == [(0, True), (2, False)]
                assert node["feeds"]["batches"] == 5 and len(list(folder.glob("*.sock"))) == 2
                late[1].process.send_signal(signal.SIGCONT)
                assert metrics.node(patience_s=30)["feeds"]["batches"] == 8
            finally:
                for one in late:
                    one.end()
        # The sockets of those that were killed are there until somebody finds them dead.
        assert all("rank-2-" in path.name for path in folder.iterdir())


def test_prometheus_gets_every_metric_of_the_table(target: ServeProcess, folder: Path, tmp_path: Path) -> None:
    with (
        Volume.open(target.uri()) as volume,
        Staging(volume, "corpus", tmp_path) as staging,
        TokenLoader(volume, "corpus", stage=str(tmp_path), **OPTIONS) as loader,
    ):
        report = staging.wait(60)
        with Watch(device=None) as watch:
            list(islice(watch.loader(loader), 4))
        with (
            NodeMetrics({"train": loader, "copy": staging, "loop": watch}, port=0, folder=folder) as metrics,
            NodeMetrics(loader, port=0, folder=folder.with_name("another")) as other,
        ):
            assert metrics.address is not None and other.address is not None
            assert metrics.address[0] == "127.0.0.1" and metrics.address != other.address
            host, port = metrics.address
            told = json.loads((folder / "targets.json").read_text())
            assert told[0]["targets"] == [f"{host}:{port}"]
            with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=30) as answer:
                text = answer.read().decode()
            # What Prometheus asks for by itself, which is stricter about names.
            strict = urllib.request.Request(
                f"http://{host}:{port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
            )
            with urllib.request.urlopen(strict, timeout=30) as answer:
                assert len(list(parse_openmetrics(answer.read().decode()))) == len(METRICS)
            with pytest.raises(UsageError, match=f"served here at 127.0.0.1:{port}: .*port=0"):
                NodeMetrics(loader, port=port, folder=folder.with_name("third"))
            assert not folder.with_name("third").exists()
        assert not folder.exists()
        with pytest.raises(OSError):
            socket.create_connection((host, port), 2)
        with NodeMetrics(loader, port=port, folder=folder) as metrics:
            assert metrics.address == (host, port)
            assert "headrace_rank_up" in metrics.prometheus()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    by_name: dict[str, list[Any]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    # Where there is no GPU nothing is said of it.
    there = {f"headrace_{metric.name}" for metric in METRICS} - {"headrace_watch_sm_activity_ratio"}
    assert set(by_name) == there
    watched = by_name["headrace_watch_seconds_total"]
    assert {sample.labels["cause"] for sample in watched} == set(CAUSES)
    assert {(sample.labels["rank"], sample.labels["watch"]) for sample in watched} == {("0", "loop")}
    assert by_name["headrace_watch_steps_total"][0].value == 4 and sum(sample.value for sample in watched) > 0
    for metric in METRICS:
        for sample in by_name.get(f"headrace_{metric.name}", ()):
            assert set(sample.labels) == set(metric.labels), metric.name
    assert [(s.labels, s.value) for s in by_name["headrace_feed_batches_total"]] == [
        ({"rank": "0", "feed": "train"}, 4.0)
    ]
    assert by_name["headrace_feed_bytes_total"][0].value == 4 * 8 * 33 * 2
    assert by_name["headrace_feed_stage_bytes_total"][0].value >= 4 * 8 * 33 * 2
    copied = [by_name[f"headrace_staging_{name}"] for name in ("copied_bytes_total", "there_bytes", "wanted_bytes")]
    assert [(s.labels, s.value) for (s,) in copied] == [
        ({"rank": "0", "staging": "copy"}, float(report.copied_bytes))
    ] * 3
    (read,) = by_name["headrace_path_read_bytes_total"]
    assert read.labels["path"] == f"127.0.0.1:{target.port}" and read.value > 0
    assert [s.labels["quantile"] for s in by_name["headrace_path_latency_seconds"]] == ["0.5", "0.99", "1"]


def test_a_loader_is_asked_while_it_is_used(folder: Path, tmp_path: Path) -> None:
    with native_volume() as volume:
        ingest_texts(volume, tmp_path, count=20)
        with (
            TokenLoader(volume, "corpus", **OPTIONS) as one,
            TokenLoader(volume, "corpus", **OPTIONS) as two,
            NodeMetrics([one, two], folder=folder) as metrics,
        ):
            failed: list[BaseException] = []
            over = threading.Event()

            def ask() -> None:
                try:
                    while not over.is_set():
                        metrics.node()
                except BaseException as error:
                    failed.append(error)

            thread = threading.Thread(target=ask)
            thread.start()
            for loader in (one, two):
                list(islice(loader, 400))
            over.set()
            thread.join()
            assert not failed
            feeds = metrics.node()["ranks"][0]["feeds"]
            assert [(feed["name"], feed["batches"]) for feed in feeds] == [("corpus", 400), ("corpus 2", 400)]
            # Memory of this process has no paths.
            assert [device["paths"] for device in metrics.node()["ranks"][0]["devices"]] == [[], []]


def test_a_volume_that_was_closed_hides_no_other_rank(target: ServeProcess, folder: Path) -> None:
    volume = Volume.open(target.uri())
    loader = TokenLoader(volume, "corpus", **OPTIONS)
    with NodeMetrics(loader, port=0, folder=folder) as metrics:
        list(islice(loader, 3))
        loader.close()
        volume.close()
        node = metrics.node()
        assert node["ranks"][0]["up"] and node["feeds"]["batches"] == 3 and node["paths"] == []
        assert metrics.address is not None
        host, port = metrics.address
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=30) as answer:
            assert "headrace_feed_batches_total" in answer.read().decode()


def test_a_child_of_a_fork_answers_for_nobody(folder: Path, tmp_path: Path) -> None:
    with native_volume() as volume:
        ingest_texts(volume, tmp_path, count=20)
        with TokenLoader(volume, "corpus", **OPTIONS) as loader:
            metrics = NodeMetrics(loader, port=0, folder=folder)
            assert metrics.address is not None
            reader, writer = os.pipe()
            heard, closed = os.pipe()
            child = os.fork()
            if child == 0:
                # Alive for as long as the parent looks.
                os.close(writer)
                # As at the end of a `with` block that it has left.
                metrics.close()
                os.write(closed, b"x")
                os.read(reader, 1)
                os._exit(0)
            os.close(reader)
            if not select.select([heard], [], [], 60)[0]:
                os.kill(child, signal.SIGKILL)
                pytest.fail("the child waits for a thread that it does not have")
            assert (folder / "targets.json").exists()
            path = next(folder.glob("*.sock"))
            address = metrics.address
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                assert json.loads(client.makefile().read())["pid"] == os.getpid()
            metrics.close()
            with pytest.raises(OSError):
                socket.create_connection(address, 2)
            for end in (writer, heard, closed):
                os.close(end)
            os.waitpid(child, 0)


def test_every_job_of_a_node_has_a_directory_of_its_own() -> None:
    job = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "GROUP_RANK": "0"}
    first = run_folder({**job, "LOCAL_RANK": "0", "RANK": "0"})
    assert first == run_folder({**job, "LOCAL_RANK": "7", "RANK": "7"})
    others = [run_folder({**job, name: "another"}) for name in job]
    assert len({first, *others, run_folder({}), run_folder({"SLURM_JOB_ID": "7"})}) == 7


@pytest.mark.parametrize(
    ("options", "say"),
    [
        ({"port": -1}, "port is out of range"),
        ({"port": 65536}, "port is out of range"),
        ({"rank": -1}, "rank is out of range"),
        ({"host": "no.such.host.invalid", "port": 0}, "cannot be served here"),
        ({"folder": "/proc/none"}, "cannot be made"),
        ({"folder": "/"}, "not this user's alone"),
    ],
)
def test_what_cannot_be_meant(folder: Path, options: dict[str, Any], say: str) -> None:
    with pytest.raises(UsageError, match=say):
        NodeMetrics([], **{"folder": folder, **options})
    assert not folder.exists()


def test_a_rank_that_is_asked_while_it_begins_is_not_taken_for_dead(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = socket.socket.listen

    class Asked(socket.socket):
        def listen(self, backlog: int = 16) -> None:  # type: ignore[override]
            assert list(ask_all(folder)) == []
            listen(self, backlog)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Asked)
        metrics = NodeMetrics([], rank=3, folder=folder)
    with metrics:
        assert [(rank, report is not None) for rank, _, report in ask_all(folder, 30)] == [(3, True)]
    assert not folder.exists()


def test_the_end_of_the_last_rank_and_the_beginning_of_the_next_do_not_meet(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def make(path: Path) -> None:
        make_folder(path)
        made.append(path)
        if len(made) == 1:
            path.rmdir()

    monkeypatch.setattr("headrace.metrics.node.make_folder", make)
    with NodeMetrics([], rank=0, folder=folder):
        assert len(list(folder.glob("rank-0-*.sock"))) == 1


def test_a_full_disk_is_said_and_leaves_no_port_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(UsageError, match=r"targets\.json: found No space left"):
            NodeMetrics([], port=port, local_rank=0, folder=folder)
    assert not folder.exists()
    with NodeMetrics([], port=port, local_rank=0, folder=folder) as metrics:
        assert metrics.address == ("127.0.0.1", port)


def test_a_second_one_of_a_process_does_not_take_the_place_of_the_first(folder: Path) -> None:
    with NodeMetrics([], rank=0, folder=folder):
        with pytest.raises(UsageError, match="answers here already"):
            NodeMetrics([], rank=0, folder=folder)
        assert [(rank, report is not None) for rank, _, report in ask_all(folder, 30)] == [(0, True)]
    with NodeMetrics([], rank=0, folder=folder):
        assert len(list(folder.glob("rank-0-*.sock"))) == 1


def test_nonsense_from_a_socket_is_a_rank_that_is_not_up(folder: Path) -> None:
    with NodeMetrics([], rank=0, folder=folder) as metrics:
        with socket.socket(socket.AF_UNIX) as liar:
            liar.bind(str(folder / "rank-5-123.sock"))
            liar.listen(8)

            def lie(text: bytes) -> None:
                with liar.accept()[0] as client:
                    client.sendall(text)

            for text in (b"", b"{", b"[]", b'{"feeds": 3, "devices": []}', b"[" * 100_000):
                thread = threading.Thread(target=lie, args=(text,))
                thread.start()
                ranks = metrics.node(patience_s=30)["ranks"]
                thread.join()
                assert [(rank["rank"], rank["up"]) for rank in ranks] == [(0, True), (5, False)]
        (folder / "rank-5-123.sock").unlink()


def test_a_rank_that_cannot_report_says_why(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("no such counter")

    with NodeMetrics([], port=0, folder=folder) as metrics:
        answers = Answers(folder, 7, broken)
        try:
            (rank,) = [each for each in metrics.node(patience_s=30)["ranks"] if each["rank"] == 7]
            assert (rank["up"], rank["error"]) == (False, "RuntimeError: no such counter")
            assert 'headrace_rank_up{rank="7"} 0.0' in metrics.prometheus()
        finally:
            answers.close()
        assert metrics._server is not None
        metrics._server._http.RequestHandlerClass.registry = None  # type: ignore[attr-defined]
        assert metrics.address is not None
        with pytest.raises(OSError), urllib.request.urlopen("http://{}:{}/metrics".format(*metrics.address)):
            pass
        end = time.monotonic() + 30
        while "metrics could not be served to 127.0.0.1" not in caplog.text:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_clients_that_say_nothing_take_no_threads_and_keep_nobody_out(folder: Path) -> None:
    def clients() -> int:
        return sum(thread.name == "headrace-metrics-client" for thread in threading.enumerate())

    with NodeMetrics([], port=0, folder=folder) as metrics, contextlib.ExitStack() as stack:
        assert metrics.address is not None
        silent = [stack.enter_context(socket.create_connection(metrics.address, 30)) for _ in range(50)]
        # It comes behind all of them.
        with urllib.request.urlopen("http://{}:{}/metrics".format(*metrics.address), timeout=60) as answer:
            assert b"headrace_rank_up" in answer.read()
        # And the one that has been answered, as long as it takes to end.
        assert clients() <= MOST_CLIENTS + 1
        hung_up = 0
        for client in silent[:-MOST_CLIENTS]:
            client.settimeout(30)
            hung_up += client.recv(1) == b""
        assert hung_up == 50 - MOST_CLIENTS
        # Nobody but the oldest: as many as there may be stay beside the one that asks.
        assert select.select(silent[1 - MOST_CLIENTS :], [], [], 0)[0] == []
    assert not clients()


def test_a_device_that_is_open_twice_is_one(target: ServeProcess, folder: Path) -> None:
    with Volume.open(target.uri()) as one, Volume.open(target.uri()) as two:
        loaders = [TokenLoader(volume, "corpus", **OPTIONS) for volume in (one, two)]
        with NodeMetrics(loaders, folder=folder) as metrics:
            counts = []
            for loader in loaders:
                list(islice(loader, 3))
                # Nothing is under way any more, so nothing is counted.
                while metrics.node()["feeds"]["ready"] < metrics.node()["feeds"]["in_flight"]:
                    time.sleep(0.001)
                (path,) = metrics.node()["paths"]
                counts.append((path["ranks"], path["reads"], path["latency"]["count"]))
            (device,) = metrics.node()["ranks"][0]["devices"]
            assert len(device["paths"]) == 1
            assert counts[0][0] == counts[1][0] == 1
            assert counts[1][1] > counts[0][1] and counts[1][2] > counts[0][2]
        for loader in loaders:
            loader.close()


def test_what_was_read_still_counts_when_one_of_two_is_closed(target: ServeProcess, folder: Path) -> None:
    """As a staging closes what it reads from when it has ended: counters only grow."""
    with Volume.open(target.uri()) as one, Volume.open(target.uri()) as two:
        loaders = [TokenLoader(volume, "corpus", **OPTIONS) for volume in (one, two)]
        with NodeMetrics(loaders, folder=folder) as metrics:
            for loader in loaders:
                list(islice(loader, 3))
                loader.close()
            (before,) = metrics.node()["paths"]
            two.close()
            (after,) = metrics.node()["paths"]
            for name in ("reads", "read_bytes"):
                assert after[name] >= before[name]
            assert after["usable_ranks"] == 1 and after["under_way"] == 0


def test_percentiles_of_several_ranks_are_those_of_all_that_was_counted() -> None:
    quick = {"buckets": [[1_000_000, 97]], "max_s": 0.001}
    slow = {"buckets": [[1_000_000, 1], [2_000_000_000, 2]], "max_s": 1.9}
    together = merged_latency([quick, slow])
    assert together == {"count": 100, "p50_s": 0.001, "p99_s": 1.9, "max_s": 1.9}
    assert merged_latency([]) == {"count": 0, "p50_s": 0.0, "p99_s": 0.0, "max_s": 0.0}


def test_what_a_killed_run_left_is_taken_away_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus goes by `run-*/targets.json`: one port must not be there under two runs."""
    program = "import sys; from headrace.metrics import NodeMetrics; m = NodeMetrics([], port=0); print(flush=True); "
    with tempfile.TemporaryDirectory() as short, contextlib.ExitStack() as stack:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        killed, lives = (
            subprocess.Popen(
                [sys.executable, "-c", program + "sys.stdin.read()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "SLURM_JOB_ID": str(job)},
            )
            for job in (1, 2)
        )
        for each in (killed, lives):
            stack.enter_context(each)
            stack.callback(each.kill)
            assert each.stdout is not None and each.stdout.readline() == b"\n"
        folders = [run_folder({"SLURM_JOB_ID": str(job)}) for job in (1, 2)]
        killed.kill()
        killed.wait()
        assert all((folder / "targets.json").exists() for folder in folders)
        with NodeMetrics([], port=0) as metrics:
            assert not folders[0].exists()
            assert (folders[1] / "targets.json").exists() and (metrics.folder / "targets.json").exists()
            assert len(list(folders[1].glob("rank-*.sock"))) == 1
        # Of another node, where nodes share the temporary directory: its sockets always refuse here.
        afar = run_folder({"SLURM_JOB_ID": "3"})
        afar.mkdir()
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(str(afar / "rank-0-1.sock"))
        (afar / "targets.json").write_text('[{"targets": [], "labels": {"__meta_headrace_node": "another node"}}]')
        with NodeMetrics([], port=0):
            assert len(list(afar.iterdir())) == 2
