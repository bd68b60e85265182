"""The guide of the fabric: its commands and its Python run, in its order, against one target."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.testing.serve import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
GUIDE = ROOT / "docs" / "guides" / "fabric.md"
HEADRACE = [sys.executable, "-m", "headrace"]


def blocks(text: str) -> list[tuple[str, str]]:
    return [(language, code) for language, code in re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)]


def test_what_the_guide_says_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GUIDE.read_text()
    ports = sorted(set(re.findall(r"127\.0\.0\.1:(\d+)", text)))
    assert len(ports) == 2
    for port in ports:
        text = text.replace(f":{port}", f":{free_port()}")
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    found = blocks(text)
    assert [language for language, _ in found].count("python") >= 8
    served: list[subprocess.Popen[bytes]] = []
    names: dict[str, Any] = {"__name__": "guide"}
    said = tmp_path / "said"
    try:
        for language, code in found:
            if language == "python":
                exec(compile(code, str(GUIDE), "exec"), names)
                continue
            assert language == "sh"
            for line in code.splitlines():
                command, *arguments = shlex.split(line)
                if command == "export":
                    monkeypatch.setenv(*arguments[0].split("=", 1))
                    continue
                assert command == "headrace"
                if arguments[0] == "serve":
                    with said.open("w") as out:
                        served.append(subprocess.Popen([*HEADRACE, *arguments], cwd=tmp_path, stdout=out, stderr=out))
                    deadline = time.monotonic() + 30
                    while "control socket" not in said.read_text():
                        assert served[-1].poll() is None and time.monotonic() < deadline, said.read_text()
                        time.sleep(0.05)
                    continue
                answer = subprocess.run(
                    [*HEADRACE, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
                )
                assert answer.returncode == 0, f"{line}: {answer.stderr}"
                if arguments[0] == "discover":
                    assert names_address(text) in answer.stdout.splitlines()
    finally:
        for name in ("device", "other"):
            if name in names:
                names[name].close()
        for process in served:
            process.kill()
            process.wait()
    assert len(served) == 1


def names_address(text: str) -> str:
    """What the guide opens, without the option that it adds."""
    (address,) = re.findall(r'^ADDRESS = "(.*)&loss_timeout=\d+"$', text, re.M)
    return str(address)


def test_every_option_is_told_with_its_default() -> None:
    from headrace.device.address import _NVME_DEFAULTS, _NVME_OPTIONS

    part = GUIDE.read_text().split("## The address")[1].split("\n## ")[0]
    rows = {
        name: default
        for names, default in re.findall(r"^\| (`[\w`, ]+`) \| ([^|]*) \|", part, re.M)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert set(_NVME_OPTIONS) <= set(rows)
    for name, (attribute, _) in _NVME_OPTIONS.items():
        default = getattr(_NVME_DEFAULTS, attribute)
        if isinstance(default, (int, float)) and name != "tos":
            assert str(int(default)) in re.findall(r"\d+", rows[name]), name


def test_every_key_that_is_told_is_there(tmp_path: Path) -> None:
    from headrace.device import open_device
    from headrace.testing.serve import serving

    part = GUIDE.read_text().split("## Looking closer")[1].split("```")[0]
    keys = {key for row in re.findall(r"^\| (`.*?) \|", part, re.M) for key in re.findall(r"`(\w+)`", row)}
    assert len(keys) > 20
    with serving("nqn.2026-01.test:guide", "mem:1MiB") as target, open_device(target.uri()) as device:
        assert keys <= set(device.describe())
