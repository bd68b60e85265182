"""The guide of the target: its file is served, its commands are run against it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from headrace.testing.serve import free_port

GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "guides" / "target.md"


def test_what_the_guide_says_works(tmp_path: Path) -> None:
    text = GUIDE.read_text()
    (toml,) = re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)
    (script,) = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    ports = {port: str(free_port()) for port in re.findall(r"127\.0\.0\.1:(\d+)", toml)}
    assert len(ports) == 3
    for port, free in ports.items():
        toml = toml.replace(f":{port}", f":{free}")
    (tmp_path / "target.toml").write_text(toml)
    (tmp_path / "run").mkdir()
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "run"), "TERM": "dumb"}
    headrace = [sys.executable, "-m", "headrace"]
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(
            [*headrace, "serve", "--config", "target.toml"], cwd=tmp_path, env=env, stdout=said, stderr=said
        )
        try:
            deadline = time.monotonic() + 30
            while "control socket" not in (tmp_path / "said").read_text():
                assert process.poll() is None, (tmp_path / "said").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            lines = script.splitlines()
            assert len(lines) == 10
            for line in lines:
                name, *arguments = shlex.split(line)
                assert name == "headrace"
                answer = subprocess.run(
                    [*headrace, *arguments],
                    cwd=tmp_path,
                    env=env,
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                assert answer.returncode == 0, f"{line}: {answer.stderr}"
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
    assert (tmp_path / "disk.img").stat().st_size == 128 << 20
    assert (tmp_path / "more.img").stat().st_size == 32 << 20
