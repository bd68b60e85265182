"""An environment beside the project's: made once, not again, and where it cannot be made, the reason stays."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import environments
from scripts.environments import ROOT, CannotMake, Environment


@pytest.fixture
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wanted = tmp_path / "wanted.txt"
    wanted.write_text("# Here already.\nnumpy\n")
    return Environment(name="some", wanted=wanted, holds="some packages", keeps=("numpy",))


def test_it_is_made_once_and_sees_the_packages_of_the_project(
    somewhere: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is not up to date" in (somewhere.missing() or "")
    python = somewhere.make()
    assert somewhere.missing() is None and "getting some packages" in capsys.readouterr().err
    say = "import sys, numpy, pytest; print(sys.prefix); print(numpy.__file__)"
    said = subprocess.run([python, "-c", say], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == str(somewhere.folder) and said[1].startswith(sys.prefix)
    assert somewhere.make() == python and capsys.readouterr().err == ""
    somewhere.wanted.write_text("numpy>=1\n")
    assert "is not up to date" in (somewhere.missing() or "")


def test_why_it_could_not_be_made_is_what_a_skipped_test_says(somewhere: Environment) -> None:
    impossible = dataclasses.replace(somewhere, wanted=somewhere.wanted.with_name("impossible.txt"))
    impossible.wanted.write_text("no-such-package-anywhere==1\n")
    with pytest.raises(CannotMake, match="no-such-package-anywhere"):
        impossible.make()
    why = impossible.missing() or ""
    assert "could not be made" in why and "no-such-package-anywhere" in why and "make test" in why


def test_an_unknown_name_is_said() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/environments.py", "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "frameworks" in done.stderr and os.sep not in done.stderr
