"""The documents are tested text: code runs, links lead somewhere, commands exist and are told."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt  # comes with rich

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("examples/**/*.md"),
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


@pytest.mark.parametrize("name", NAMES)
def test_drawings_and_tables_are_rendered(name: str) -> None:
    """What is drawn in a list is indented deeper than it, and behind an empty line; no table is cut in two."""
    tokens = MarkdownIt("commonmark").enable("table").parse((ROOT / name).read_text())
    texts = [re.sub(r"`[^`]*`", "", token.content) for token in tokens if token.type == "inline"]
    broken = [text for text in texts if re.search(r"\S {3,}\S|^\|", text, re.M)]
    assert not broken


@pytest.mark.parametrize("name", NAMES)
def test_files_and_modules_that_are_named_are_there(name: str) -> None:
    text = (ROOT / name).read_text()
    paths = re.findall(r"`((?:src|tests|native|benchmarks|scripts|examples|docs)/[\w./-]+)", text)
    paths += [f"src/headrace/{path}" for path in re.findall(r"`((?:volume|device|fabric)/\w[\w./-]+)`", text)]
    missing = [path for path in paths if not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()]
    for module in re.findall(r"python -m ((?:tests|benchmarks)[.\w]*)", text):
        path = ROOT / module.replace(".", "/")
        if not (path / "__main__.py").exists() and not path.with_suffix(".py").exists():
            missing.append(module)
    for module in re.findall(r"`(headrace(?:\.[a-z]\w*)+)", text):
        # A module, or a name in one.
        path = ROOT / "src" / module.replace(".", "/")
        if path.exists() or path.with_suffix(".py").exists() or (ROOT / "src/headrace" / f"{path.name}.pyi").exists():
            continue
        owner = path.parent / "__init__.py" if path.parent.is_dir() else path.parent.with_suffix(".py")
        if not owner.exists() or not re.search(rf"\b{path.name}\b", owner.read_text()):
            missing.append(module)
    assert not missing


def test_the_architecture_names_every_file_of_the_volume() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rows = dict(re.findall(r"^\| [`(](\w+)[/`)]+ \| (.*?) \|", text.partition("## Inside the volume")[2], re.M))
    volume = ROOT / "src/headrace/volume"
    for room in [volume, *(folder for folder in volume.iterdir() if (folder / "__init__.py").exists())]:
        if room.name == "layout":
            continue  # A file for each structure.
        files = {path.stem for path in room.glob("*.py")} - {"__init__"}
        assert files <= set(re.findall(r"\w+", rows["top" if room == volume else room.name])), room.name


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
