"""The demo, small, with real processes and real SIGKILLs; and Ctrl-C at several points, which leaves nobody behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.accidents.processes import descendants


def demo(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "headrace",
            "demo",
            "--small",
            "--json",
            "--report",
            str(directory / "r.html"),
            *arguments,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(directory)},
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    directory = tmp_path_factory.mktemp("demo")
    process = demo(directory, "--keep", str(directory / "kept"), "--gpu-hour-price", "2.5")
    try:
        out, err = process.communicate(timeout=280)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "Traceback" not in err
    summary: dict[str, Any] = json.loads(out)
    return summary, directory


def runs(pid: int) -> bool:
    """A zombie does not: it is for its new parent to bury, and the first process of a container may not care."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_whole_job(run: tuple[dict[str, Any], Path]) -> None:
    summary, _ = run
    assert summary["holds"] is True
    comparison = summary["comparison"]
    assert comparison["steps"] == summary["training"]["steps"] == 20
    assert comparison["samples_equal"] and comparison["samples_differ"] == comparison["missing"] == []
    # Both kinds of comparison took place.
    assert comparison["losses_bitwise"] and comparison["same_ranks"] >= 8
    assert comparison["losses_within_tolerance"] and comparison["other_ranks"] >= 4
    assert 0 <= comparison["other_ranks_difference"] <= comparison["tolerance"]


def test_the_target_was_really_gone(run: tuple[dict[str, Any], Path]) -> None:
    summary, directory = run
    outages = summary["outages"]
    assert outages and all(outage["seconds"] >= 2.0 for outage in outages)
    # Two lives of the target and one more for each further outage, all on the ports of the first.
    ready = [
        json.loads(line) for line in (directory / "kept/logs/target.log").read_text().splitlines() if "ready" in line
    ]
    assert len(ready) == 1 + len(outages)
    assert all(life["listen"] == ready[0]["listen"] for life in ready)
    # Each checkpoint that met an outage is whole or not there.
    committed = {save["step"] for save in summary["saves"] if save["committed"] and save["phase"] == "first"}
    for outage in outages:
        assert (outage["step"] in committed) == outage["committed"]


def test_the_job_went_on_from_the_last_commit(run: tuple[dict[str, Any], Path]) -> None:
    summary, directory = run
    kill = summary["rank_kill"]
    assert kill["resume_step"] == max(kill["checkpoints"]) == summary["restore"]["step"]
    assert kill["committed"] == (kill["step"] in kill["checkpoints"])
    resumed = [json.loads(line) for line in (directory / "kept/train/resumed-steps-0.jsonl").read_text().splitlines()]
    assert resumed[0]["step"] == kill["resume_step"]
    assert {row["rank"] for row in resumed} == {0}
    assert (directory / "kept/train/first-steps-1.jsonl").exists()


def test_the_model_is_the_same_in_three_places(run: tuple[dict[str, Any], Path]) -> None:
    from safetensors import safe_open

    summary, directory = run
    assert summary["model"]["headrace_bitwise"] is True
    assert summary["model"]["safetensors_bitwise"] is True
    with safe_open(directory / "kept/demo.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        assert len(list(file.keys())) == summary["model"]["tensors"]


def test_the_report_is_one_file_that_asks_nobody(run: tuple[dict[str, Any], Path]) -> None:
    summary, directory = run
    html = (directory / "r.html").read_text()
    assert summary["verdict"]["sentence"].replace("'", "&#x27;") in html.replace("\N{NO-BREAK SPACE}", " ")
    assert "at $2.5 an hour" in html
    for outward in ("http:", "https:", "src=", "href=", "<script", "@import"):
        assert outward not in html
    assert (directory / "kept/report.html").read_text() == html


def test_everything_lies_in_the_volume_that_was_kept(run: tuple[dict[str, Any], Path]) -> None:
    from headrace.checkpoint import list_checkpoints
    from headrace.dataset import TokenStream
    from headrace.volume import Volume

    summary, directory = run
    files = [f"file:{directory}/kept/namespace-{letter}.img" for letter in "ab"]
    with Volume.open(files) as volume:
        assert TokenStream.open(volume, "corpus").token_count == summary["dataset"]["token_count"]
        steps = [info.step for info in list_checkpoints(volume, "run")]
        assert steps[-1] == 20
        assert "models/demo.safetensors" in volume
        # Nothing of a save that was not committed.
        assert {entry.name.split("/")[1] for entry in volume.list("run/")} == {f"step-{step:08d}" for step in steps}


@pytest.mark.parametrize("until", ["3. text into tokens", "4. training", "parameters, 20 steps", "5. target killed"])
def test_ctrl_c_leaves_no_process_and_no_directory(tmp_path: Path, until: str) -> None:
    process = demo(tmp_path)
    try:
        assert process.stderr is not None
        family: set[int] = set()
        for line in process.stderr:
            family |= set(descendants([process.pid]))
            if until in line:
                break
        else:
            pytest.fail("it ended by itself")
        time.sleep(0.3)
        family |= set(descendants([process.pid]))
        assert family
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(30) == 130
        assert time.monotonic() - began < 15
    finally:
        process.kill()
        process.wait()
    assert json.loads(rest.splitlines()[-1])["error"]["message"] == "interrupted"
    assert "Traceback" not in rest
    assert [pid for pid in family if runs(pid)] == []
    assert list(tmp_path.iterdir()) == []
