"""An environment beside the project's: made once, not again, and where it cannot be made, the reason stays."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
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


#: Makes one whose pip hangs, and says its number first.
HANGS = """
import sys
from pathlib import Path
from scripts import environments

folder = Path(sys.argv[1])
environments.ROOT = folder
(folder / "wanted.txt").write_text("numpy\\n")
some = environments.Environment(name="some", wanted=folder / "wanted.txt", holds="some packages", keeps=("numpy",))
environments.ENVIRONMENTS = {"some": some}
pip = folder / "pip.py"
pip.write_text(
    "import os, time; from pathlib import Path; Path('tmp').write_text(str(os.getpid())); "
    "os.rename('tmp', 'pid'); time.sleep(600)"
)
run = environments.Environment._run
environments.Environment._run = lambda self, command: run(self, [sys.executable, str(pip)])
sys.argv = ["environments.py", "some"]
sys.exit(environments.main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_it_has_started_ends_with_it(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", HANGS, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as process:
        said, end = tmp_path / "pid", time.monotonic() + 60
        while not said.exists():
            assert process.poll() is None and time.monotonic() < end, process.stderr
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in err
    # It was waited for.
    assert not Path(f"/proc/{said.read_text().strip()}").exists()


def test_a_place_where_nothing_can_be_made_is_said(somewhere: Environment) -> None:
    somewhere.folder.write_text("in the way")
    gone = dataclasses.replace(somewhere, name="other", wanted=somewhere.wanted.with_name("gone.txt"))
    for each, why in ((somewhere, "some"), (gone, "gone.txt")):
        with pytest.raises(CannotMake, match=why):
            each.make()


def test_an_unknown_name_is_said() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/environments.py", "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "frameworks" in done.stderr and os.sep not in done.stderr
