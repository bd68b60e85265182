"""Who this host is."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from headrace import settings
from headrace.errors import UsageError


@pytest.fixture(autouse=True)
def _nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADRACE_HOSTNQN", raising=False)
    monkeypatch.delenv("HEADRACE_HOSTID", raising=False)
    monkeypatch.setattr(settings, "ETC_NVME", tmp_path)


def test_made_once_a_process() -> None:
    identity = settings.host_identity()
    assert identity == settings.host_identity()
    assert identity.hostnqn == f"nqn.2014-08.org.nvmexpress:uuid:{identity.hostid}"
    code = "from headrace import settings; print(settings._generated(__import__('os').getpid()))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert uuid.UUID(other) != settings._generated(os.getpid())


def test_etc_then_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostnqn").write_text("nqn.2014-08.org.nvmexpress:uuid:one\n")
    (tmp_path / "hostid").write_text("11111111-1111-1111-1111-111111111111\n")
    identity = settings.host_identity()
    assert (identity.hostnqn, identity.hostid.int) == (
        "nqn.2014-08.org.nvmexpress:uuid:one",
        0x11111111111111111111111111111111,
    )
    monkeypatch.setenv("HEADRACE_HOSTNQN", "nqn.2026-01.io.example:me")
    monkeypatch.setenv("HEADRACE_HOSTID", "22222222-2222-2222-2222-222222222222")
    identity = settings.host_identity()
    assert identity.hostnqn == "nqn.2026-01.io.example:me"
    assert str(identity.hostid).startswith("2222")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADRACE_HOSTID", "zero"),
        ("HEADRACE_HOSTID", "0" * 32),
        ("HEADRACE_HOSTNQN", "x" * 224),
        ("HEADRACE_HOSTNQN", "nqn.a b"),
    ],
)
def test_nonsense_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError):
        settings.host_identity()
