"""The documents are tested text: code runs, links lead somewhere, commands exist and are told."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("examples/*.md"),
    ]
)
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


def code_blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.M | re.S)


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"COLUMNS": "200", "PATH": "/usr/bin:/bin", "TERM": "dumb"},
    )


def commands(text: str) -> list[str]:
    """The names in the `Commands` part of a help text, whatever frame is drawn around it."""
    part = re.split(r"(?m)^.*\bCommands\b.*$", text, maxsplit=1)[-1]
    return re.findall(r"(?m)^[\s│|]*([a-z][a-z-]+)\s{2,}\S", part)


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists():
            broken.append(target)
        elif anchor and there.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
            if anchor not in slugs:
                broken.append(target)
    assert not broken


@pytest.mark.parametrize("name", NAMES)
def test_no_path_of_one_machine(name: str) -> None:
    found = re.findall(r"(?<![\w.-])/(?:root|work|home)/\S*", (ROOT / name).read_text())
    assert not found


def test_the_python_of_the_readme_runs() -> None:
    blocks = code_blocks(ROOT / "README.md", "python")
    assert blocks
    for block in blocks:
        assert len([line for line in block.splitlines() if line.strip()]) <= 22
        answer = subprocess.run(
            [sys.executable, "-c", block],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr
        assert "step-000100/state 19" in answer.stdout


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(example: Path) -> None:
    if "headrace.torch" in example.read_text():
        pytest.importorskip("torch")
    answer = subprocess.run(
        [sys.executable, str(example)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout


def test_every_command_is_told_in_the_readme() -> None:
    top = headrace("--help")
    assert top.returncode == 0, top.stderr
    names = commands(top.stdout)
    assert {"serve", "volume", "ingest", "demo", "discover"} <= set(names), top.stdout
    readme = (ROOT / "README.md").read_text()
    untold = [name for name in names if f"headrace {name}" not in readme]
    assert not untold


def test_every_help_says_what_it_does() -> None:
    top = commands(headrace("--help").stdout)
    for name in top:
        answer = headrace(name, "--help")
        assert answer.returncode == 0, answer.stderr
        assert "Usage" in answer.stdout
        assert len(answer.stdout.split()) > 20, f"headrace {name} --help says too little"


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.M)
    assert phony
    answer = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in phony[1].split():
        assert f"make {target}" in answer.stdout
